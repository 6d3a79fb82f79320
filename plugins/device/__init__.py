"""Device code: what kernels are made from, how they are compiled ahead of time or when first needed, and how they are launched."""
