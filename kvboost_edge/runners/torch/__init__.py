"""Torch runner: causal models of transformers with paged attention."""
