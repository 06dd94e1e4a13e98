"""The interface between the scheduler and the features that plan for all sequences together.

The classes here are the null implementations, and a feature subclasses one of them: speculative
decoding `DraftPlanner`, non-prefix KV reuse `SpanPlacement`, KV offload `Prefetcher`. `feature.py`
holds the interface for a single sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Several
from typing import Any, Protocol

from kvboost_edge.engine.request.results import Missed
from kvboost_edge.engine.schedule.sequence import Sequence
from kvboost_edge.engine.schedule.step_plan import ScheduledTokens
from kvboost_edge.kvcache.block_table import BlockTable

__all__ = ["DraftPlanner", "PendingPrefetch", "Prefetcher", "SpanPlacement"]


class DraftPlanner:
    """Speculative decoding of all sequences. The null implementation makes no draft tokens."""

    num_drafted = 0
    num_accepted = 0

    @property
    def memory_bytes(self) -> int:
        """Bytes of the draft history."""
        return 0

    def draft(
        self,
        running: Several[Sequence],
        wanted: Mapping[int, int],
        budget: int,
        reserve: Callable[[Sequence, int], bool],
    ) -> None:
        """Give draft tokens to sequences that compute one token.

        Args:
            wanted: tokens that the step computes, by sequence index.
            budget: rows that the step has room for in addition to those.
            reserve: reserves slots up to a position of a sequence; returns False if it has too few
                spare blocks.
        """

    def settle(self, work: ScheduledTokens[Sequence], num_accepted: int) -> None:
        """Record the outcome of a step's draft tokens; free the blocks of rejected ones."""

    def remember(self, sequence: Sequence) -> None:
        """Add the tokens that a finished request computed to the draft history."""

    def forget_all(self) -> None:
        """Clear the draft history."""


class SpanPlacement:
    """Non-prefix KV reuse of all sequences. The null implementation reuses nothing."""

    def bring(self, sequence: Sequence, prefetcher: Any, spare: int) -> PendingPrefetch | None:
        """Begin to load the next run that only a tier holds; return None without one."""
        return None

    def place(self, sequence: Sequence, table: BlockTable, spare: int) -> bool | None:
        """Place spans in a fresh table and take its blocks.

        Returns:
            True: all blocks are taken.
            False: `spare` free blocks do not suffice, and nothing changed.
            None: there is nothing to reuse.
        """
        return None

    def context_of(self, token_ids: Several[int], root: bytes) -> int | None:
        """Return the number of tokens before a document in its own context; None if not indexed."""
        return None


class PendingPrefetch(Protocol):
    """A prefetch from a tier for one sequence."""

    sequence: Sequence
    is_done: bool


class Prefetcher:
    """Prefetch from the offload tiers for all sequences. The null implementation has no tiers."""

    @property
    def num_arriving(self) -> int:
        """Number of prefetches that are not complete."""
        return 0

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def num_arriving_besides(self, sequence: Sequence) -> int:
        """Return the number of incomplete prefetches of other sequences."""
        return 0

    def bring(self, sequence: Sequence, spare_blocks: int, sharing: SpanPlacement) -> bool:
        """Return whether blocks of a sequence are arriving; ask the tiers first if not done yet."""
        return False

    def end(self, sequence: Sequence) -> None:
        """End a sequence's prefetch, if it has one, and free its blocks."""

    def make_room(self) -> bool:
        """End all prefetches to free their blocks; return whether there were any."""
        return False

    def give_up_silent(self) -> None:
        """End prefetches that brought nothing for a long time."""

    def used(self, table: BlockTable) -> None:
        """Mark the copies of a table's cached blocks in the tiers as used."""

    def missed(self, table: BlockTable) -> Missed:
        """Return why the token after the cached ones is not cached, and who evicted it."""
        if table.miss_reason == "evicted" and table.missed_hash is not None:
            return Missed("evicted", ("pool",))
        return Missed(table.miss_reason)
