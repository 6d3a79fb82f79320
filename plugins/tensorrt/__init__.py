"""TensorRT's side of the ops: import of either package, and one generic plugin that shows any OpFace to TensorRT."""
