"""NumPy reference implementations of the kernels, which serve as oracle and specification."""
