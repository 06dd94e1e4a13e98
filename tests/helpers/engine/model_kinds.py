"""The two kinds of models that engine tests step by hand: plain ones, and hybrids with recurrent
states.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

from helpers.engine.fake_hybrid import hybrid_parts
from helpers.engine.fake_runner import Bench, fake_parts
from kvboost_edge.engine.build import EngineParts
from kvboost_edge.engine.spec_decode.draft_model import DraftParts


class ModelKind(enum.Enum):
    """A kind of model."""

    PLAIN = "plain"
    HYBRID = "hybrid"

    def parts(self, num_blocks: int = 64, num_slots: int = 40, **states: Any) -> EngineParts:
        """Make the parts of an engine. A plain model ignores the options for states."""
        return (
            fake_parts(num_blocks)
            if self is PLAIN
            else hybrid_parts(num_blocks, num_slots, **states)
        )

    def bench(
        self,
        num_blocks: int = 64,
        num_slots: int = 40,
        *,
        interval: int = 1024,
        every_block: bool = False,
        num_draft_rows: int = 31,
        drafter: DraftParts | Callable[[Any], DraftParts] | None = None,
        **options: Any,
    ) -> Bench:
        """Make an engine that is stepped by hand, optionally with a draft model.

        The draft model may be a function of the engine's pool.
        """
        states = {
            "interval": interval,
            "every_block": every_block,
            "num_draft_rows": num_draft_rows,
        }
        parts = self.parts(num_blocks, num_slots, **states)
        if callable(drafter):
            drafter = drafter(parts.backend)
        return Bench(parts=dataclasses.replace(parts, drafter=drafter), **options)

    def cached(self, length: int) -> int:
        """Count the tokens of a prompt of this length that a full cache serves.

        The last token is always computed. For a hybrid, snapshots exist only at block ends.
        """
        return length - 1 if self is PLAIN else (length - 1) // 16 * 16


PLAIN, HYBRID = ModelKind
