"""Offload tiers below the block pool, and the I/O thread that moves blocks to and from them."""
