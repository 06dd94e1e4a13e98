"""NumPy oracles of the kernels, which serve as their specification."""
