"""From a model and a policy to an engine directory."""
