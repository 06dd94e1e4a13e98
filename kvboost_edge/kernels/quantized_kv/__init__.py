"""Quantized KV: layout, writing, and integer attention."""
