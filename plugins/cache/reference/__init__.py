"""Caches in tensors of exactly the size that a policy stores: evict and quantize roles run as they are defined.

Slower than pages and kernels, and right: this is what kernels are checked against, and what runs a policy that has none.
"""
