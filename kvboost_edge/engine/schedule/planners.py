"""The interface between the scheduler and features that plan for all sequences together.

The classes here are null implementations, which features subclass. Speculative decoding subclasses
`DraftPlanner`, non-prefix KV reuse `SpanPlacement`, and KV offload `Prefetcher`. `feature.py` holds
the interface for a single sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Several
from types import MappingProxyType
from typing import Any, Protocol

from kvboost_edge.engine.request.results import DraftCounts, MissReason
from kvboost_edge.engine.schedule.sequence import Floats, Sequence
from kvboost_edge.engine.schedule.step_plan import ScheduledTokens
from kvboost_edge.kvcache.block_table import BlockTable, CopyOp

__all__ = ["DraftPlanner", "PendingPrefetch", "Prefetcher", "SpanPlacement"]


class DraftPlanner:
    """A planner of draft tokens for all sequences. The null implementation plans none.

    Attributes:
        counts: counts of the verified drafts by source.
    """

    num_drafted = 0
    num_accepted = 0
    counts: Mapping[str, DraftCounts] = MappingProxyType({})

    @property
    def memory_bytes(self) -> int:
        """Size of the draft history, in bytes."""
        return 0

    @property
    def draft_vocabulary(self) -> int:
        """Number of ids that the draft model usually chooses from, or 0 without one."""
        return 0

    @property
    def draft_failed(self) -> bool:
        """True after an error that turned the draft model off."""
        return False

    def draft(
        self,
        running: Several[Sequence],
        wanted: Mapping[int, int],
        budget: int,
        reserve: Callable[[Sequence, int], bool],
    ) -> None:
        """Assign draft tokens to sequences that decode.

        Args:
            wanted: number of tokens that the step computes, by sequence index.
            budget: maximum number of rows to add to the step.
            reserve: function that reserves a sequence's slots up to a position. It returns False if
                too few spare blocks are left.
        """

    def complete(
        self,
        work: list[ScheduledTokens[Sequence]],
        copies: Several[CopyOp],
        is_ending: Callable[[Sequence], bool],
    ) -> None:
        """Compute the draft tokens that `draft` only reserved, and put them into `work`.

        The engine thread calls this before it builds the batch of a step. It does not hold the
        engine's lock, because a draft model takes a while.

        Args:
            work: items of the step's plan, which are replaced in place.
            copies: blocks that the step copies, which a draft model's pool has to copy as well.
            is_ending: function that returns whether a sequence is about to end.
        """

    def num_hidden_states(self, work: ScheduledTokens[Sequence]) -> int:
        """Return the number of last tokens of an item for `keep_hidden_states`."""
        return 0

    def keep_hidden_states(
        self,
        work: Several[ScheduledTokens[Sequence]],
        hidden_states: Several[Floats],
        is_ending: Callable[[Sequence], bool],
    ) -> None:
        """Keep hidden states of a step's pass for later drafts.

        The engine thread calls this after the pass, without the engine's lock.

        Args:
            work: items of the step's plan.
            hidden_states: hidden states [num_hidden_states, hidden_size] of the last tokens of each
                item.
            is_ending: function that returns whether a sequence is about to end.
        """

    def settle(self, work: ScheduledTokens[Sequence], num_accepted: int) -> None:
        """Record the outcome of a step's draft tokens and free the blocks of rejected ones."""

    def observe(self, work: Several[ScheduledTokens[Sequence]], seconds: float) -> None:
        """Learn the cost of a forward pass from its measured time."""

    def remember(self, sequence: Sequence) -> None:
        """Add the tokens of a finished request to the draft history."""

    def forget_all(self) -> None:
        """Clear the draft history."""

    def close(self) -> None:
        """Release the draft model."""


class SpanPlacement:
    """A planner of non-prefix KV reuse. The null implementation reuses nothing."""

    def bring(self, sequence: Sequence, prefetcher: Any, spare: int) -> PendingPrefetch | None:
        """Start loading the next run that only a tier holds, or return None."""
        return None

    def place(self, sequence: Sequence, table: BlockTable, spare: int) -> bool | None:
        """Place reused spans in a new block table and allocate its blocks.

        Returns:
            True if all blocks were allocated. False if `spare` free blocks do not suffice, in which
                case nothing changed. None if there is nothing to reuse.
        """
        return None

    def context_of(self, token_ids: Several[int], root: bytes) -> int | None:
        """Return the number of context tokens before a document, or None if it is not indexed."""
        return None


class PendingPrefetch(Protocol):
    """A prefetch from a tier for one sequence."""

    sequence: Sequence
    is_done: bool


class Prefetcher:
    """A prefetcher from the offload tiers. The null implementation loads nothing."""

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

    def is_awaited_by(self, sequence: Sequence) -> bool:
        """Return whether a sequence waits for an incomplete prefetch, its own or another's."""
        return False

    def bring(self, sequence: Sequence, spare_blocks: int, sharing: SpanPlacement) -> bool:
        """Query the tiers for a sequence's blocks, once, and return whether any are arriving."""
        return False

    def end(self, sequence: Sequence) -> None:
        """End a sequence's prefetch, if any, and free its blocks."""

    def make_room(self) -> bool:
        """End all prefetches to free their blocks, and return whether there were any."""
        return False

    def give_up_silent(self) -> None:
        """End prefetches that have made no progress for a long time."""

    def used(self, table: BlockTable) -> None:
        """Tell the tiers that the cached blocks of a table were used."""

    def missed(self, table: BlockTable) -> MissReason:
        """Return why the token after the cached ones missed, and which tiers evicted it."""
        if table.miss_reason == "evicted" and table.missed_hash is not None:
            return MissReason("evicted", ("pool",))
        return MissReason(table.miss_reason)
