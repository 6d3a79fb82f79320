"""From a model's shape and a cache plan to an ONNX graph."""
