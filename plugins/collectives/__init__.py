"""Nodes that exchange activations between the GPUs of an engine."""
