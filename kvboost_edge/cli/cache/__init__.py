"""Commands that list, verify and clear the KV blocks and packed weights on disk."""
