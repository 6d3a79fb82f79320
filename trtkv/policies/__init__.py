"""What to do with the KV cache: one folder a role, one file an algorithm."""
