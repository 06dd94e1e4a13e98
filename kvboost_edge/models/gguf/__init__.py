"""GGUF files: header, block formats, metadata as a config."""
