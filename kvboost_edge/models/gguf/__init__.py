"""GGUF files: header, blocks, names, metadata as a config."""
