"""Model families, one file each: config, flags, GGUF names, notes; and code that they share."""
