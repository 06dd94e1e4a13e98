"""The torch runner: causal models of transformers, with paged attention."""
