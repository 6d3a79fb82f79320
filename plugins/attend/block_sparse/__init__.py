"""Attention of a prompt's chunk to chosen blocks of keys: the definition in torch, and kernels that choose and attend."""
