"""Inputs for the index of non-prefix reuse."""
