"""How keys and values lie in a page."""
