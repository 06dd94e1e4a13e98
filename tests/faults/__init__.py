"""Planted faults for `make mutants`, by subject."""
