"""Non-prefix KV reuse: span index, search, recompute settings, and chunking of documents."""
