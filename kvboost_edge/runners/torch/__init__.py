"""Any causal model of transformers, its attention over paged KV."""
