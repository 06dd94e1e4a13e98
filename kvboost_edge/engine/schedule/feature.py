"""The interface between a sequence and the features that take part in it.

The classes here are the null implementations, and a feature subclasses one of them: speculative
decoding `Drafting`, structured output `Constraint`, non-prefix KV reuse `SharedSpans`. Callers call
them in the same way whether or not a feature is on. `Restored` has no subclass: without offload
tiers it counts nothing.

`planners.py` holds the interface for all sequences together.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from kvboost_edge.kvcache.block_table import BlockTable
    from kvboost_edge.reuse.block_history import Chain
    from kvboost_edge.reuse.deviation_scoring import Probe

__all__ = ["Constraint", "Drafting", "Feature", "Restored", "SequenceFeatures", "SharedSpans"]

Floats = npt.NDArray[np.float32]


class Feature:
    """A feature's part of one sequence."""

    @property
    def is_ready(self) -> bool:
        """True if the sequence may take part in the next step."""
        return True

    @property
    def prepares(self) -> bool:
        """True if the feature computes something before the sequence's next tokens."""
        return False

    def admit(self, table: BlockTable) -> None:
        """Note the fresh table on which the sequence starts or resumes."""

    def forget(self) -> None:
        """Drop everything that depended on the sequence's blocks, which are freed."""

    def release(self) -> None:
        """Free the feature's resources; the sequence has ended."""

    def result_fields(self) -> dict[str, Any]:
        """Return the feature's fields of the sequence's `GenerationResult`."""
        return {}


class Constraint(Feature):
    """Structured output: the tokens that may follow. The null implementation allows all."""

    def constrain(self, logits: Floats, largest: int | None) -> tuple[Floats, int | None]:
        """Return the logits [vocab_size] with forbidden tokens masked.

        Args:
            largest: index of the largest logit, or None if unknown.

        Returns:
            The masked logits, and the index of the largest one, or None if unknown.
        """
        return logits, largest

    def advance(self, token_id: int) -> bool:
        """Accept the chosen token; return whether the output is complete."""
        return False

    def forced(self) -> list[int]:
        """Return the tokens that must follow."""
        return []


class Drafting(Feature):
    """Speculative decoding: the draft tokens of one sequence. The null implementation has none.

    Attributes:
        tokens: draft tokens that the next step computes after the last certain token.
        proposes: True if there can be draft tokens.
    """

    proposes = False

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """Count a step's draft tokens and drop them."""

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """Learn from the outcome of a draft; 0 and 0 mean that none was computed."""


class SharedSpans(Feature):
    """Non-prefix KV reuse: spans of tokens whose KV comes from other positions.

    The null implementation has no spans.

    Attributes:
        num_ahead: tokens in spans that the sequence has not reached.
        num_shared: largest number of prompt tokens reused this way.
        probe: deviation scoring that runs before anything else is computed, or None.
        recomputed_at: time at which the last span was passed, see `PhaseMarks.phases`.
        probe_seconds: time of deviation scoring.
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
        """Return the next run that only a tier may hold, each run once; None at the end.

        Args:
            find: returns all such runs.
        """
        return None

    def place(self, found: list[tuple[int, int]], probe: Probe | None) -> None:
        """Note the runs found at other positions.

        Args:
            found: [start, stop) of each run.
            probe: deviation scoring of the runs, or None.
        """

    def end_probe(self, table: BlockTable, seconds: float) -> None:
        """Replace the spans by those that deviation scoring left in `table`.

        Args:
            seconds: time of the scoring.
        """

    def ahead(self) -> Iterable[tuple[int, int]]:
        """Return [start, stop) of the spans that the sequence has not reached, in order."""
        return ()

    def pass_over(self, position: int) -> int:
        """Return the position after the spans that begin at `position`; they count as computed."""
        return position


class Restored(Feature):
    """Tokens of one sequence whose KV came from offload tiers.

    Attributes:
        seconds: total time of the prefetches.
        was_asked: True if the tiers were asked since the sequence last lost its blocks.
    """

    def __init__(self) -> None:
        self._tokens: Counter[str] = Counter()
        self._num_cached: int | None = None  # at the first admission
        self.seconds = 0.0
        self.was_asked = False

    def admit(self, table: BlockTable) -> None:
        if self._num_cached is None:
            self._num_cached = table.num_cached_tokens

    def forget(self) -> None:
        self.was_asked = False

    def note(self, tokens: Mapping[str, int], seconds: float) -> None:
        """Count tokens that came before the first admission; later ones are not counted.

        Args:
            tokens: number of tokens by tier name.
            seconds: time of the prefetch.
        """
        if self._num_cached is None:
            self._tokens.update(tokens)
            self.seconds += seconds

    def result_fields(self) -> dict[str, Any]:
        return {"hit_tokens": self._split(self._num_cached or 0)}

    def _split(self, num_cached: int) -> dict[str, int]:
        """Return the cached tokens by tier, "pool" included.

        The counts are cut to `num_cached`: the last token of a fully cached prompt may be
        recomputed, and arrived blocks may have been evicted before use.
        """
        rest = num_cached
        found = {}
        for tier, count in self._tokens.items():
            found[tier] = min(count, rest)
            rest -= found[tier]
        return {"pool": rest, **found}


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceFeatures:
    """The features of one sequence, null implementations unless given."""

    drafting: Drafting = dataclasses.field(default_factory=Drafting)
    grammar: Constraint = dataclasses.field(default_factory=Constraint)
    spans: SharedSpans = dataclasses.field(default_factory=SharedSpans)
    restored: Restored = dataclasses.field(default_factory=Restored)

    def __iter__(self) -> Iterator[Feature]:
        return iter((self.drafting, self.grammar, self.spans, self.restored))
