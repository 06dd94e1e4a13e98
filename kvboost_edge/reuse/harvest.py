"""What of a pool can be shared at other positions, and what of a prompt is found there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvboost_edge.kvcache.block_table import PrefixEntry, Span
from kvboost_edge.kvcache.hashing import TOKEN_BYTES
from kvboost_edge.kvcache.manager import KVCacheManager
from kvboost_edge.reuse.finding import find_runs
from kvboost_edge.reuse.plan import plan_spans
from kvboost_edge.reuse.repair import Repair
from kvboost_edge.reuse.spans import SpanIndex

__all__ = ["Found", "Harvest"]


class Found(NamedTuple):
    """What was found of a sequence's tokens: spans to share, and [start, stop) of all runs, with what is computed
    anyway."""

    spans: list[Span]
    runs: list[tuple[int, int]]


class Harvest:
    """The published blocks of a pool, offered by their own tokens from the first question on. Published are blocks of
    exact sequences alone, so what is approximate is never harvested."""

    def __init__(self, manager: KVCacheManager, min_chunk_tokens: int) -> None:
        self._manager, self._least = manager, min_chunk_tokens
        self._index: SpanIndex | None = None

    def find(self, token_ids: Sequence[int], start: int, root: bytes, repair: Repair) -> Found:
        """What can be shared of the tokens behind the first `start`, but for the last one. Valid until the pool's next
        change."""
        if self._index is None:
            self._index = SpanIndex(self._manager.num_blocks, self._manager.block_size)
            self._manager.spans.watch(self)
        size = self._manager.block_size
        if len(token_ids) <= size:
            return Found([], [])
        runs = find_runs(token_ids, max(start, size), self._index, root, self._least)
        where = [(run.prompt_start, run.prompt_stop) for run in runs]
        return Found(plan_spans(runs, start, size, repair.num_seam_tokens), where)

    def entered(self, block_id: int, entry: PrefixEntry) -> None:
        """A block was published."""
        assert self._index is not None
        size = self._manager.block_size
        tokens = entry.tokens[-size * TOKEN_BYTES :]
        self._index.offer(entry.root, block_id, entry.serial, entry.parent_serial, tokens, entry.depth * size)

    def left(self, block_id: int) -> None:
        """A block is published no more."""
        assert self._index is not None
        self._index.withdraw(block_id)
