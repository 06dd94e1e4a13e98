"""What of a pool can be shared at other positions, and what of a prompt is found there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvboost_edge.kvcache.block_table import PrefixEntry, Span
from kvboost_edge.kvcache.hashing import TOKEN_BYTES, LoneRoot
from kvboost_edge.kvcache.manager import KVCacheManager
from kvboost_edge.reuse.block_history import BlockHistory, Chain
from kvboost_edge.reuse.recompute import Repair
from kvboost_edge.reuse.span_index import SpanIndex
from kvboost_edge.reuse.span_plan import plan_spans
from kvboost_edge.reuse.span_search import find_runs

__all__ = ["Found", "Harvest"]

_REMEMBERED = 4  # pools full of blocks that are gone, some 0.5 KB for each


class Found(NamedTuple):
    """What was found of a sequence's tokens: spans to share, and [start, stop) of all runs, with
    what is computed anyway.
    """

    spans: list[Span]
    runs: list[tuple[int, int]]


class Harvest:
    """The published blocks of a pool, offered by their own tokens from the first question on.
    Published are blocks of exact sequences alone, so what is approximate is never harvested.
    `remembers`: what leaves the pool from the first question on is kept in mind, as a tier may have
    it.
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
        """What of a prompt's runs could be brought back from tiers: texts that hold them, from
        their beginnings.
        """
        size = self._manager.block_size
        if self._remembered is None or len(token_ids) <= size:
            return []
        self._offered()
        return self._remembered.lost_chains(
            find_runs(token_ids, size, self._remembered.index, root, self._least)
        )

    def find(self, token_ids: Sequence[int], start: int, root: bytes, repair: Repair) -> Found:
        """What can be shared of the tokens behind the first `start`, but for the last one. Valid
        until the pool's next change.
        """
        size = self._manager.block_size
        if len(token_ids) <= size:
            return Found([], [])
        runs = find_runs(token_ids, max(start, size), self._offered(), root, self._least)
        where = [(run.prompt_start, run.prompt_stop) for run in runs]
        return Found(plan_spans(runs, start, size, repair.num_seam_tokens), where)

    def context_of(self, token_ids: Sequence[int], root: bytes) -> int | None:
        """How many tokens stood before these where they were computed, of a run that holds all of
        them; None where none does, or they are fewer than are looked for.
        """
        # One more token, because the last one of a prompt is never covered.
        runs = find_runs((*token_ids, 0), 0, self._offered(), root, self._least)
        return runs[0].context if runs and runs[0].length == len(token_ids) else None

    def _offered(self) -> SpanIndex:
        if self._index is None:
            self._index = SpanIndex(self._manager.num_blocks, self._manager.block_size)
            self._manager.spans.watch(self)
        return self._index

    def entered(self, block_id: int, entry: PrefixEntry) -> None:
        """A block was published."""
        assert self._index is not None
        if self._remembered is not None:
            self._remembered.entered(block_id, entry)
        if isinstance(entry.root, LoneRoot):  # only context for what follows it
            return
        size = self._manager.block_size
        tokens = entry.tokens[-size * TOKEN_BYTES :]
        self._index.offer(
            entry.root, block_id, entry.serial, entry.parent_serial, tokens, entry.depth * size
        )

    def left(self, block_id: int) -> None:
        """A block is published no more."""
        assert self._index is not None
        if self._remembered is not None:
            self._remembered.left(block_id)
        if block_id in self._index:
            self._index.withdraw(block_id)
