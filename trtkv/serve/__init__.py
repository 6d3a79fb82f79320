"""Serving: an engine behind the OpenAI API and behind Triton Inference Server."""
