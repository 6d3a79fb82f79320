"""How many tokens may each layer and KV head keep? One file an algorithm."""
