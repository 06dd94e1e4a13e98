"""Paged attention over float32, float16 and bfloat16 KV."""
