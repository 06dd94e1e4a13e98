"""The interface between a sequence and optional features.

The classes here are null implementations, which features subclass. Speculative decoding subclasses
`Drafting`, structured output and reasoning budgets `Constraint`, non-prefix KV reuse
`SharedSpans`, and sparse prefill `Prefill`. Callers use the same methods whether or not a feature
is on. `Restored` has no subclass. Without offload tiers, its counts stay 0.

`planners.py` holds the interfaces of features that plan for all sequences together.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Several
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from kvboost_edge.kvcache.block_table import BlockTable
    from kvboost_edge.reuse.block_history import Chain
    from kvboost_edge.reuse.deviation_scoring import Probe

__all__ = [
    "Constraint",
    "Drafting",
    "Feature",
    "Lookahead",
    "Prefill",
    "Restored",
    "SequenceFeatures",
    "SharedSpans",
]

Floats = npt.NDArray[np.float32]


class Feature:
    """The state of a feature for one sequence."""

    @property
    def is_ready(self) -> bool:
        """True if the feature lets the sequence run in the next step."""
        return True

    @property
    def prepares(self) -> bool:
        """True if the feature must compute something before the sequence's next tokens."""
        return False

    def admit(self, table: BlockTable) -> None:
        """Set up the feature for the block table on which the sequence starts or resumes."""

    def forget(self) -> None:
        """Drop everything that depends on the sequence's freed blocks."""

    def release(self) -> None:
        """Free the feature's resources when the sequence ends."""

    def result_fields(self) -> dict[str, Any]:
        """Return the fields that the feature adds to the `GenerationResult`."""
        return {}


class Lookahead:
    """A constraint as draft tokens see it, which leaves the constraint itself unchanged.

    It may allow a token that the constraint forbids, but never forbids an allowed one. The null
    implementation allows all tokens.
    """

    def masked(self, logits: Floats) -> Floats:
        """Return logits [vocab_size] with forbidden tokens set to -inf, valid until the next call.

        Other masked logits of the engine become invalid, too.
        """
        return logits

    def advance(self, token_id: int) -> bool:
        """Continue after a draft token and return whether the output is complete."""
        return False

    def num_allowed(self, token_ids: Several[int]) -> int:
        """Return the number of draft tokens before the first forbidden one.

        Args:
            token_ids: the first draft tokens, at least one.
        """
        return len(token_ids)


class Constraint(Feature):
    """Limits on the next tokens of one sequence, such as a grammar.

    The null implementation allows all tokens.
    """

    def constrain(self, logits: Floats, largest: int | None) -> tuple[Floats, int | None]:
        """Return the logits [vocab_size] with forbidden tokens masked.

        Args:
            largest: index of the largest logit, or None if unknown.

        Returns:
            The masked logits, and the index of the largest one or None if unknown.
        """
        return logits, largest

    def advance(self, token_id: int) -> bool:
        """Accept the chosen token and return whether the output is complete."""
        return False

    def forced(self) -> list[int]:
        """Return the tokens that must follow, as far as they are known."""
        return []

    def lookahead(self) -> Lookahead:
        """Return the constraint of the next draft tokens. The sequence must be ready."""
        return Lookahead()


class Drafting(Feature):
    """Draft tokens of one sequence. The null implementation drafts nothing.

    Attributes:
        tokens: draft tokens to compute in the next step, after the last certain token.
        proposes: True if there can be draft tokens.
    """

    proposes = False

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """Record the numbers of a step's draft tokens and drop the tokens."""

    def learn(self, num_drafted: int, num_accepted: int, token_ids: Several[int]) -> None:
        """Learn from the outcome of a step.

        Args:
            num_drafted: number of draft tokens, 0 if the step had no draft.
            num_accepted: number of draft tokens that were accepted.
            token_ids: tokens that the step generated.
        """


class SharedSpans(Feature):
    """Reused spans of one sequence, whose KV comes from other positions.

    The null implementation reuses nothing.

    Attributes:
        num_ahead: number of tokens in spans after the sequence's current position.
        num_shared: largest number of prompt tokens reused this way.
        probe: deviation scoring to run before other computation, or None.
        recomputed_at: time at which the last span was passed, see `PhaseMarks.phases`.
        probe_seconds: time spent on deviation scoring.
    """

    num_ahead = 0
    num_shared = 0
    probe: Probe | None = None
    recomputed_at: float | None = None
    probe_seconds = 0.0

    @property
    def is_ready(self) -> bool:
        return self.probe is None

    @property
    def prepares(self) -> bool:
        return self.probe is not None

    def next_lost_run(self, find: Callable[[], list[Chain]]) -> Chain | None:
        """Return the next run that only a tier may hold, or None when all were returned.

        Args:
            find: function that returns all such runs.
        """
        return None

    def place(self, found: list[tuple[int, int]], probe: Probe | None) -> None:
        """Record the runs found at other positions.

        Args:
            found: [start, stop) of each run.
            probe: deviation scoring of the runs, or None.
        """

    def end_probe(self, table: BlockTable, seconds: float) -> None:
        """Update the spans to those that remain in `table` after deviation scoring.

        Args:
            seconds: time that the scoring took.
        """

    def ahead(self) -> Iterable[tuple[int, int]]:
        """Return [start, stop) of the spans after the current position, in order."""
        return ()

    def pass_over(self, position: int) -> int:
        """Skip the spans that begin at `position` and return the position after them."""
        return position


class Prefill(Feature):
    """The computation of one sequence's prompt. In the null implementation it is exact.

    Attributes:
        sparse_range: first position and end of the tokens that attend to selected key blocks only.
    """

    sparse_range: tuple[int, int] = (0, 0)

    def query_block_start(self, position: int) -> int:
        """Return the position at which computation must begin to compute `position`."""
        return position

    def whole_query_blocks(self, start: int, count: int) -> int:
        """Return how many tokens to compute from `start` on if a step has room for `count`."""
        return count


class Restored(Feature):
    """Counts of one sequence's tokens whose KV came from offload tiers.

    Attributes:
        seconds: total duration of the prefetches.
        was_asked: True if the tiers were queried since the sequence last lost its blocks.
    """

    def __init__(self) -> None:
        self._tokens: Counter[str] = Counter()
        self._num_cached: int | None = None  # cached tokens at the first admission
        self.seconds = 0.0
        self.was_asked = False

    def admit(self, table: BlockTable) -> None:
        if self._num_cached is None:
            self._num_cached = table.num_cached_tokens

    def forget(self) -> None:
        self.was_asked = False

    def note(self, tokens: Mapping[str, int], seconds: float) -> None:
        """Count the tokens of a prefetch until the first admission. Later ones are ignored.

        Args:
            tokens: number of tokens by tier name.
            seconds: duration of the prefetch.
        """
        if self._num_cached is None:
            self._tokens.update(tokens)
            self.seconds += seconds

    def result_fields(self) -> dict[str, Any]:
        return {"hit_tokens": self._split(self._num_cached or 0)}

    def _split(self, num_cached: int) -> dict[str, int]:
        """Return the number of cached tokens by tier, including "pool".

        The counts add up to `num_cached` at most. The last token of a fully cached prompt may be
        recomputed, and arrived blocks may be evicted before use.
        """
        rest = num_cached
        found = {}
        for tier, count in self._tokens.items():
            found[tier] = min(count, rest)
            rest -= found[tier]
        return {"pool": rest, **found}


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceFeatures:
    """The features of one sequence. Each defaults to its null implementation."""

    drafting: Drafting = dataclasses.field(default_factory=Drafting)
    grammar: Constraint = dataclasses.field(default_factory=Constraint)
    spans: SharedSpans = dataclasses.field(default_factory=SharedSpans)
    prefill: Prefill = dataclasses.field(default_factory=Prefill)
    restored: Restored = dataclasses.field(default_factory=Restored)

    def __iter__(self) -> Iterator[Feature]:
        return iter((self.drafting, self.grammar, self.spans, self.prefill, self.restored))
