"""`make cuda-check`: what can be proven of the kernels without a GPU, by NVIDIA's compilers
alone.
"""
