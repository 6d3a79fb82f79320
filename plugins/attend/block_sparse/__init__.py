"""Attention of a prompt's chunk to chosen blocks of keys: the definition in torch, kernels that choose, one file a method, and one that attends."""
