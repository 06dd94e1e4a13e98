"""Helpers for the tests of the Redis tier: its secret, its space, a chain of blocks, and a clock
that tests advance.
"""

from __future__ import annotations

import random
from typing import Any

from kvboost_edge.kvcache.hashing import BlockAddress, chain_hash
from kvboost_edge.tiers.redis.tier import RedisTier

SECRET = "a secret of the test suite"
SPACE = bytes(range(32))
OPENED: list[RedisTier] = []  # closed after each test


class Clock:
    """A clock in seconds that tests advance."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def chain(
    count: int, payload_bytes: int = 1000, seed: int = 0
) -> tuple[list[BlockAddress], list[memoryview]]:
    """Return consecutive blocks of 16 tokens with random payloads."""
    draw = random.Random(seed)
    blocks: list[BlockAddress] = []
    parent = draw.randbytes(32)
    for _ in range(count):
        tokens = draw.randbytes(64)
        blocks.append(BlockAddress(chain_hash(parent, tokens), parent, tokens))
        parent = blocks[-1].prefix_hash
    return blocks, [memoryview(draw.randbytes(payload_bytes)) for _ in range(count)]


def opened(url: str, **options: Any) -> RedisTier:
    """Open a tier with the suite's secret by default."""
    options.setdefault("secret", SECRET)
    options.setdefault("environment", {})
    OPENED.append(RedisTier(url, options.pop("space", SPACE), **options))
    return OPENED[-1]


def filled(
    url: str, count: int, payload_bytes: int = 1000, **options: Any
) -> tuple[RedisTier, list[BlockAddress], list[memoryview]]:
    """Open a tier and write a chain to it."""
    tier = opened(url, **options)
    blocks, payloads = chain(count, payload_bytes)
    tier.write(blocks, payloads)
    return tier, blocks, payloads


def hashes_of(blocks: list[BlockAddress]) -> list[bytes]:
    return [block.prefix_hash for block in blocks]


def reads(tier: RedisTier, blocks: list[BlockAddress], payloads: list[memoryview]) -> int:
    """Return how many blocks a read serves, after checking that they are the written ones."""
    into = [memoryview(bytearray(len(payload))) for payload in payloads]
    count = tier.read(blocks, into)
    assert into[:count] == payloads[:count]
    return count


def stored_keys(client: Any) -> list[str]:
    """Return all keys on the server."""
    return sorted(key.decode() for key in client.keys("*"))
