"""Attention over pages: dense, over a list, and a prompt chunk against what is stored."""
