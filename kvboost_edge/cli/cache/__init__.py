"""Command that lists, verifies and removes the KV blocks and packed weights on disk."""
