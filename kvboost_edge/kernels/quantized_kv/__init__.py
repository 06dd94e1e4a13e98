"""Quantized KV: its bytes, how it is written, and attention over them in integers."""
