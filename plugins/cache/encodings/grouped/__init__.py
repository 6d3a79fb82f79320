"""Caches of encoded tokens on a GPU: pages of codes, and the newest tokens of every sequence in full precision."""
