"""Inputs, drivers and float64 references for kernels."""
