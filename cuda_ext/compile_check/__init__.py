"""`make cuda-check`: properties of the kernels that NVIDIA's compilers prove without a GPU."""
