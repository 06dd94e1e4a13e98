"""What callers, and the threads that work for the engine, put into its inbox."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvboost_edge.engine.sequence import Sequence
    from kvboost_edge.tiers.mover import Piece

__all__ = ["Arrived", "Cancel", "Close", "Message", "Submit"]


class Submit(NamedTuple):
    """A new request."""

    sequence: Sequence


class Cancel(NamedTuple):
    """A request is to end; it may have."""

    request_index: int


class Arrived(NamedTuple):
    """Blocks came from a tier."""

    piece: Piece


class Close(NamedTuple):
    """The engine is to end."""


Message = Submit | Cancel | Arrived | Close
