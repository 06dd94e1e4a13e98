"""GGUF files: header, block formats, and metadata as a config."""
