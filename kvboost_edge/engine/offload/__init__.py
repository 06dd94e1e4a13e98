"""KV offload, which prefetches blocks from tiers below the block pool and writes blocks back."""
