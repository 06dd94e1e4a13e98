"""Model configs: layers, RoPE, pooling, quantization."""
