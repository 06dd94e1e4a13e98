"""The draft model, a smaller model that proposes draft tokens for the engine's model."""

from __future__ import annotations

from typing import NamedTuple

from kvboost_edge.backends.base import Backend
from kvboost_edge.runners.base import Runner

__all__ = ["DraftParts"]


class DraftParts(NamedTuple):
    """A loaded draft model.

    Attributes:
        runner: runner of the draft model, bound to `backend`.
        backend: pool of its KV. It has as many blocks of the same size as the engine's pool, and
            stores 16 bits, because draft tokens rewrite full blocks.
    """

    runner: Runner
    backend: Backend
