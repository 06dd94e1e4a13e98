"""Helpers for the tests of the manager and of llmds: roots, a block size, a whole prompt, and an
empty page cache.
"""

from __future__ import annotations

from kvboost_edge.compat.page_cache import KVCache
from kvboost_edge.kvcache.block_table import BlockTable
from kvboost_edge.kvcache.manager import KVCacheManager

ROOT = b"r" * 32
OTHER = b"o" * 32
B = 4  # tokens in a block

# Counts of a cache of a hundred pages with nothing attached.
BASELINE = {
    "total_sequences": 0,
    "total_pages": 100,
    "allocated_pages": 0,
    "free_pages": 100,
    "shared_pages_count": 0,
    "total_page_refs": 0,
}


def prefill(
    manager: KVCacheManager, tokens: list[int], root: bytes = ROOT, *, use_cache: bool = True
) -> BlockTable:
    """Open, extend, compute and commit a whole prompt."""
    table = manager.open_table(tokens, root, use_cache=use_cache)
    manager.extend(table, len(tokens))
    manager.commit(table, tokens, len(tokens))
    return table


def held(cache: KVCache) -> dict[str, int]:
    return {name: value for name, value in cache.stats().items() if name in BASELINE}
