"""Serving: an engine over the OpenAI API and in Triton Inference Server."""
