"""Lookup of KV that a prompt can share at other positions, in an index of published blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvboost_edge.kvcache.block_table import PrefixEntry, Span
from kvboost_edge.kvcache.manager import KVCacheManager
from kvboost_edge.reuse.block_history import BlockHistory, Chain
from kvboost_edge.reuse.recompute import Repair
from kvboost_edge.reuse.span_index import SpanIndex
from kvboost_edge.reuse.span_plan import plan_spans
from kvboost_edge.reuse.span_search import find_runs

__all__ = ["Found", "SpanFinder"]

# Number of blocks in the history, as a multiple of the pool size. Each takes about 0.5 KB.
_REMEMBERED = 4


class Found(NamedTuple):
    """KV found for reuse in a sequence.

    Attributes:
        spans: spans to share.
        runs: [start, stop) of each run, including tokens that will be recomputed.
    """

    spans: list[Span]
    runs: list[tuple[int, int]]


class SpanFinder:
    """Lookup of KV that a sequence can share at other positions.

    From the first lookup on, it indexes the pool's published blocks by their own tokens. Only
    blocks that were computed exactly are published, so approximate KV is never indexed.

    Args:
        manager: KV cache manager of the pool.
        min_chunk_tokens: minimum length of a run to use, in tokens.
        remembers: keep a history of blocks that left the pool since the first lookup. Useful if a
            tier may store them.
    """

    def __init__(
        self, manager: KVCacheManager, min_chunk_tokens: int, *, remembers: bool = False
    ) -> None:
        self._manager = manager
        self._least = min_chunk_tokens
        self._index: SpanIndex | None = None
        self._remembered: BlockHistory | None = None
        if remembers:
            self._remembered = BlockHistory(_REMEMBERED * manager.num_blocks, manager.block_size)

    def lost(self, token_ids: Sequence[int], root: bytes) -> list[Chain]:
        """Return the chains to load from tiers for blocks of a prompt's runs that left the pool."""
        size = self._manager.block_size
        if self._remembered is None or len(token_ids) <= size:
            return []
        self._offered()
        return self._remembered.lost_chains(
            find_runs(token_ids, size, self._remembered.index, root, self._least)
        )

    def find(self, token_ids: Sequence[int], start: int, root: bytes, repair: Repair) -> Found:
        """Return the KV that a prompt can share after its first `start` tokens.

        The last token is never shared. The result is valid until the pool changes.
        """
        size = self._manager.block_size
        if len(token_ids) <= size:
            return Found([], [])
        runs = find_runs(token_ids, max(start, size), self._offered(), root, self._least)
        where = [(run.prompt_start, run.prompt_stop) for run in runs]
        return Found(plan_spans(runs, start, size, repair.num_boundary_tokens), where)

    def context_of(self, token_ids: Sequence[int], root: bytes) -> int | None:
        """Return the number of context tokens before a cached run of exactly these tokens, or None.

        None means that there is no such run, or that there are too few tokens for a lookup.
        """
        # Append a token, because the last token of a prompt is never part of a run.
        runs = find_runs((*token_ids, 0), 0, self._offered(), root, self._least)
        return runs[0].context if runs and runs[0].length == len(token_ids) else None

    def _offered(self) -> SpanIndex:
        if self._index is None:
            self._index = SpanIndex(self._manager.num_blocks, self._manager.block_size)
            self._manager.spans.watch(self)
        return self._index

    def entered(self, block_id: int, entry: PrefixEntry) -> None:
        """Record that a block was published."""
        assert self._index is not None
        if self._remembered is not None:
            self._remembered.entered(block_id, entry)
        self._index.offer_entry(block_id, entry)

    def left(self, block_id: int) -> None:
        """Record that a block is no longer published."""
        assert self._index is not None
        if self._remembered is not None:
            self._remembered.left(block_id)
        if block_id in self._index:
            self._index.withdraw(block_id)
