"""The plugin nodes as a TensorRT library in C++: what their launches are, recorded from the Python nodes, and the library that repeats them."""
