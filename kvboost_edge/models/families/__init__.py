"""One file per model family: its flags, config, GGUF names and notes; and what several share."""
