"""Device code: compiling and launching CUDA C++ kernels."""
