"""Weights in the layout the kernels read: planned, packed, kept in one checked file."""
