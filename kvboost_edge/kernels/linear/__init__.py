"""Linear layers: matrix products over packed, quantized weights."""
