"""What a model says of itself: configs, families, rope, quantization."""
