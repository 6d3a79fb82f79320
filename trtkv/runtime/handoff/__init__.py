"""Prefill and decode apart: a prompt that one engine has read continues in another, with its cache as it is stored."""
