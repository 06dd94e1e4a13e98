"""Paged attention over float KV."""
