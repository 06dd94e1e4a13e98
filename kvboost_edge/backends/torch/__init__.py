"""Parts of the torch backend: padded groups, attention, float and quantized blocks, Apple GPUs."""
