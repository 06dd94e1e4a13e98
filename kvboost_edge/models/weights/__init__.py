"""Tensors as checkpoints store them, checked before they are read."""
