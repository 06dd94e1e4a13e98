"""Packed weights: planned, packed in the layout of the kernels, and cached in a checked file."""
