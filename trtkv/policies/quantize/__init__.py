"""How is a stored token encoded? One file an algorithm."""
