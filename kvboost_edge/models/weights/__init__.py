"""Tensors in the formats of checkpoints, checked before they are read."""
