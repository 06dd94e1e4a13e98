"""The interface between the scheduler and the features that plan for all sequences together.

The classes here are the null implementations; a feature subclasses one: speculative decoding
`DraftPlanner`, non-prefix KV reuse `SpanPlacement`, KV offload `Prefetcher`. What a feature does in
one sequence is in `feature.py`.
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
    """Speculative decoding, all sequences together. Null: no draft tokens."""

    num_drafted = 0
    num_accepted = 0

    @property
    def memory_bytes(self) -> int:
        """Bytes of what is kept of finished requests."""
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
            wanted: tokens that the step computes, by the sequence's index.
            budget: rows that the step has room for besides those.
            reserve: reserves slots up to a position of a sequence; False where no block is spare.
        """

    def settle(self, work: ScheduledTokens[Sequence], num_accepted: int) -> None:
        """Take the outcome of a sequence's draft tokens, and free the blocks of rejected ones."""

    def remember(self, sequence: Sequence) -> None:
        """Keep what was new in a finished request: it may come again."""

    def forget_all(self) -> None:
        """Drop what was kept of all requests."""


class SpanPlacement:
    """Non-prefix KV reuse, all sequences together. Null: nothing is shared."""

    def bring(self, sequence: Sequence, prefetcher: Any, spare: int) -> PendingPrefetch | None:
        """Begin to load the next run that only a tier holds; None where there is none."""
        return None

    def place(self, sequence: Sequence, table: BlockTable, spare: int) -> bool | None:
        """Share spans in a fresh table and take its blocks.

        Return False, and change nothing, where `spare` free blocks do not suffice; None where there
        is nothing to share.
        """
        return None

    def context_of(self, token_ids: Several[int], root: bytes) -> int | None:
        """Return the number of tokens before a document in its own context; None: not indexed."""
        return None


class PendingPrefetch(Protocol):
    """Blocks of one sequence on their way from a tier."""

    sequence: Sequence
    is_done: bool


class Prefetcher:
    """Prefetch from the offload tiers, all sequences together. Null: there are no tiers."""

    @property
    def num_arriving(self) -> int:
        """Loads of which more is to come."""
        return 0

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def num_arriving_besides(self, sequence: Sequence) -> int:
        """Return the number of loads of other sequences of which more is to come."""
        return 0

    def bring(self, sequence: Sequence, spare_blocks: int, sharing: SpanPlacement) -> bool:
        """Return whether blocks of a sequence are arriving; ask the tiers first if not done yet."""
        return False

    def end(self, sequence: Sequence) -> None:
        """End a sequence's load, if it has one, and give its blocks back."""

    def make_room(self) -> bool:
        """End all loads, because their blocks are needed; return whether there was one."""
        return False

    def give_up_silent(self) -> None:
        """End loads of which nothing was heard for long."""

    def used(self, table: BlockTable) -> None:
        """Note that a sequence was admitted on these blocks: their copies count as used too."""

    def missed(self, table: BlockTable) -> Missed:
        """Return why the token after the cached ones is not cached, and who dropped it."""
        if table.miss_reason == "evicted" and table.missed_hash is not None:
            return Missed("evicted", ("pool",))
        return Missed(table.miss_reason)
