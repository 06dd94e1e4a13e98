"""Non-prefix KV reuse: index, search, recompute plans, and chunking of documents."""
