"""Products of few tokens with matrices of codes."""
