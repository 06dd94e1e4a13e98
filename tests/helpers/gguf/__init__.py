"""Writers of GGUF files, by the rules of llama.cpp's converters."""
