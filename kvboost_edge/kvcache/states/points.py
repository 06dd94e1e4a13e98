"""Where the states of a prompt are kept, beside its end: where other prompts may leave it, foreseen
or not.

One prompt, however long, takes no more than a part of the slots, so that what it keeps first,
behind what all the conversations of an assistant begin with, is still there when it ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["backbone_points", "hint_points"]

_BACKBONE_SHARE = 8  # a backbone of more than one in so many slots is thinned
_EVERY_BLOCK_SHARE = 2  # so is one behind every block
_HINT_SHARE = 4  # hints may be so many at most, and two in any case


def backbone_points(
    start: int, stop: int, step: int, num_slots: int, *, small: bool
) -> Iterable[int]:
    """Positions of a prompt's backbone in (start, stop), every `step` tokens. Where those are many,
    only those at doubling distances from the end: a prompt that branches off late finds one near.
    Of small states, kept behind every block, as many as may be, at equal distances.
    """
    every = range((start // step + 1) * step, stop, step)
    if small:
        return every[:: -(-len(every) // max(1, num_slots // _EVERY_BLOCK_SHARE)) or 1]
    if len(every) <= num_slots // _BACKBONE_SHARE:
        return every
    return sorted({every[0], *_doubling(every)})


def hint_points(hints: Sequence[int], num_slots: int) -> Sequence[int]:
    """Which of the message borders ahead, ascending, are kept: the first, which stands behind the
    system message of a new conversation, and of many the last ones at doubling distances.
    """
    most = max(2, num_slots // _HINT_SHARE)
    return hints if len(hints) <= most else sorted({hints[0], *_doubling(hints)[: most - 1]})


def _doubling(points: Sequence[int]) -> list[int]:
    """The last one, the one before, the fourth from the end, the eighth ..."""
    return [points[-(1 << n)] for n in range(len(points).bit_length())]
