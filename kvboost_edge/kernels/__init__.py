"""Numba kernels and their plain NumPy oracle. Importing this package imports neither; import the
module you need.
"""
