"""NumPy oracles: every kernel under its name, as its specification."""
