"""Numba kernels and their NumPy reference implementations.

Importing this package imports no kernel. Import the module that you need.
"""
