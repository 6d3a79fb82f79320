# own name: this package is imported as `plugins`, in a checkout as in a wheel
"""What runs inside the nodes of an engine: the KV cache and its parts, the kernels, and their TensorRT faces."""
