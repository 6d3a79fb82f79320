"""From a model's name to its configuration and its weights on disk."""
