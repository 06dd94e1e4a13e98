"""The CUDA kernels on a CPU."""
