"""Commands that list, verify and clear what is cached on disk: KV blocks and packed weights."""
