"""Model families, a file for each: flags, config, GGUF names and notes; and shared code."""
