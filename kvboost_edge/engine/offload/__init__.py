"""KV offload: prefetch from the tiers below the block pool, and write-back to them."""
