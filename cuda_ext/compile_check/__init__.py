"""Checks of the CUDA kernels that NVIDIA's compilers can run without a GPU (`make cuda-check`)."""
