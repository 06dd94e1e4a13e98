"""Quantized KV cache: layout, quantization and integer attention."""
