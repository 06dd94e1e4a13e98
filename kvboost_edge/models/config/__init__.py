"""Model configs: layers, RoPE, pooling and quantization."""
