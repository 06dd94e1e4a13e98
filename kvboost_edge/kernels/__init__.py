"""Numba kernels, and their NumPy oracles.

Importing this package imports neither; import the module that you need.
"""
