"""Non-prefix KV reuse: index, search and recompute plans, document chunking."""
