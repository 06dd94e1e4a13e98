"""Paged attention over KV as it is stored in floats."""
