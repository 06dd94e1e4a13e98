"""Packed weights: planned, packed in the kernels' layout, kept in one checked file."""
