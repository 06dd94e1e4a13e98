"""Torch runner: runs causal models of transformers with paged attention."""
