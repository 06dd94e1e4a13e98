"""GGUF files: headers, block formats, and configs derived from the metadata."""
