"""The interface between the scheduler and the features that plug into it.

The classes here are the null implementations; a feature subclasses them. Of one sequence there are
`Drafting` (speculative decoding), `Constraint` (structured output) and `SharedSpans` (non-prefix KV
reuse); of the scheduler `DraftPlanner`, `SpanPlacement` and `Prefetcher` (KV offload). They are
called in the same way whether or not a feature is on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Several
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from kvboost_edge.engine.request.results import Missed

if TYPE_CHECKING:
    from kvboost_edge.engine.schedule.sequence import Sequence
    from kvboost_edge.kvcache.block_table import BlockTable
    from kvboost_edge.reuse.deviation_scoring import Probe

__all__ = [
    "Constraint",
    "DraftPlanner",
    "Drafting",
    "Feature",
    "Load",
    "Prefetcher",
    "SharedSpans",
    "SpanPlacement",
]

Floats = npt.NDArray[np.float32]


class Feature:
    """A feature's part of one sequence."""

    def admit(self, table: BlockTable) -> None:
        """Take note of the fresh table on which the sequence starts or resumes."""

    def forget(self) -> None:
        """Drop what depended on the sequence's blocks, which are gone."""

    def result_fields(self) -> dict[str, Any]:
        """Return what the feature adds to the sequence's `GenerationResult`."""
        return {}


class Constraint(Feature):
    """Structured output: the tokens that may follow. Null: all of them."""

    def constrain(self, logits: Floats, largest: int | None) -> tuple[Floats, int | None]:
        """Return the logits [vocab_size] of tokens that may follow, and the largest if known."""
        return logits, largest

    def advance(self, token_id: int) -> bool:
        """Take the chosen token; return whether nothing can follow it."""
        return False

    def forced(self) -> list[int]:
        """Return the tokens that follow in any case."""
        return []


class Drafting(Feature):
    """Speculative decoding: the draft tokens of the next step. Null: never any.

    tokens      the draft tokens that the next step computes after the last certain one
    proposes    whether there can be any
    """

    proposes = False

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """Count a step's draft tokens, and drop them."""

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """Learn from the outcome of a draft; 0, 0: none was computed."""

    def release(self) -> None:
        """Give back the memory that drafts needed."""


class SharedSpans(Feature):
    """Non-prefix KV reuse: token ranges whose KV comes from other positions. Null: there are none.

    num_ahead     tokens of the spans that the sequence has not reached
    num_shared    most prompt tokens that it shared this way
    probe         deviation scoring that comes before anything else is computed
    recomputed_at, probe_seconds    marks of the request's phases, see `phase_times`
    """

    num_ahead = 0
    num_shared = 0
    probe: Probe | None = None
    recomputed_at: float | None = None
    probe_seconds = 0.0

    def ahead(self) -> Iterable[tuple[int, int]]:
        """Return the [start, stop) of the spans that the sequence has not reached, in order."""
        return ()

    def pass_over(self, position: int) -> int:
        """Return the position after the spans that begin at `position`, which count as computed."""
        return position


class DraftPlanner:
    """Speculative decoding, all sequences together. Null: no draft tokens."""

    num_drafted = 0
    num_accepted = 0

    @property
    def memory_bytes(self) -> int:
        """Bytes of what is kept of finished requests."""
        return 0

    def draft(
        self, running: Several[Sequence], wanted: Mapping[int, int], budget: int, block_size: int
    ) -> list[Sequence]:
        """Give draft tokens to sequences that compute one token; return those that have some.

        wanted    tokens that the step computes, by the sequence's index
        budget    rows that the step has room for besides those
        """
        return []

    def settle(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Learn from the outcome of a step's draft tokens."""

    def remember(self, sequence: Sequence) -> None:
        """Keep what was new in a finished request: it may come again."""

    def forget_all(self) -> None:
        """Drop what was kept of all requests."""


class SpanPlacement:
    """Non-prefix KV reuse, all sequences together. Null: nothing is shared."""

    def bring(self, sequence: Sequence, prefetcher: Any, spare: int) -> Load | None:
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


class Load(Protocol):
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

    def of(self, sequence: Sequence) -> Load | None:
        """Return the load of a sequence: on its way, or arrived and not taken yet."""
        return None

    def begin(self, sequence: Sequence, spare_blocks: int) -> Load | None:
        """Begin to load what tiers hold of a sequence's prefix; None where that is nothing."""
        return None

    def finish(self, load: Any) -> None:
        """End a load and give its blocks back."""

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
