"""Packed weights: planned, packed in the kernels' layout, and stored in one checked file."""
