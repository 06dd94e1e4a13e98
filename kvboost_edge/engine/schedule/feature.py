"""The interface between a sequence and the features that take part in it.

The classes here are the null implementations; a feature subclasses one: speculative decoding
`Drafting`, structured output `Constraint`, non-prefix KV reuse `SharedSpans`. They are called in
the same way whether or not a feature is on. `Restored` needs no subclass: without offload tiers it
counts nothing. What features do for all sequences together is in `planners.py`.
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
        """True if it computes something before the sequence's next tokens."""
        return False

    def admit(self, table: BlockTable) -> None:
        """Take note of the fresh table on which the sequence starts or resumes."""

    def forget(self) -> None:
        """Drop what depended on the sequence's blocks, which are gone."""

    def release(self) -> None:
        """Free what the feature holds; the sequence has ended."""

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

    Attributes:
        tokens: the draft tokens that the next step computes after the last certain one.
        proposes: whether there can be any.
    """

    proposes = False

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """Count a step's draft tokens, and drop them."""

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """Learn from the outcome of a draft; 0, 0: none was computed."""


class SharedSpans(Feature):
    """Non-prefix KV reuse: token ranges whose KV comes from other positions. Null: there are none.

    Attributes:
        num_ahead: tokens of the spans that the sequence has not reached.
        num_shared: most prompt tokens that it shared this way.
        probe: deviation scoring that comes before anything else is computed.
        recomputed_at, probe_seconds: marks of the request's phases, see `phase_times`.
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
        """Return the next run that only a tier may hold, each once; `find` returns all of them."""
        return None

    def place(self, found: list[tuple[int, int]], probe: Probe | None) -> None:
        """Note the [start, stop) of the runs found at other positions, and their scoring."""

    def end_probe(self, table: BlockTable, seconds: float) -> None:
        """Take the spans of `table` as deviation scoring of `seconds` left them."""

    def ahead(self) -> Iterable[tuple[int, int]]:
        """Return the [start, stop) of the spans that the sequence has not reached, in order."""
        return ()

    def pass_over(self, position: int) -> int:
        """Return the position after the spans that begin at `position`, which count as computed."""
        return position


class Restored(Feature):
    """The blocks that offload tiers brought for one sequence, as counts of tokens.

    Attributes:
        seconds: of all loads, one after another.
        was_asked: whether tiers were asked since the sequence last lost its blocks.
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
        """Count tokens that came before the first admission, by the tier's name; later ones do not
        count.
        """
        if self._num_cached is None:
            self._tokens.update(tokens)
            self.seconds += seconds

    def result_fields(self) -> dict[str, Any]:
        return {"hit_tokens": self._split(self._num_cached or 0)}

    def _split(self, num_cached: int) -> dict[str, int]:
        """Return the cached tokens by the tier that had them, "pool" included.

        The last token of a fully cached block may have to be computed, and blocks that arrived may
        have been evicted before they were used, so the parts are cut to `num_cached`.
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
