"""TensorRT plugins over the KV cache: one folder an op, with its reference, its torch form, its kernels and its TensorRT face."""
