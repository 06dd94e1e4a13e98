"""Every kernel in plain NumPy, under its kernel's name: the specification and the oracle."""
