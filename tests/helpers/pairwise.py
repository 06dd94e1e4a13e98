"""Selection of the parameter combinations that `make test` runs: each value once, or each pair of
values once.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(*axes: Iterable[Any]) -> list[Any]:
    """Return all combinations for `parametrize`. Those beyond a subset that covers every pair of
    values are marked `full`.

    The choice is greedy: the next case is the first one with the most new pairs.
    """
    choices = [list(axis) for axis in axes]
    shown = {
        case: set(combinations(enumerate(case), 2)) for case in product(*map(_places, choices))
    }
    missing = set().union(*shown.values())
    kept = set()
    while missing:
        best = max(shown, key=lambda case: len(shown[case] & missing))
        kept.add(best)
        missing -= shown[best]
    return _marked(choices, kept)


def each_once(*axes: Iterable[Any]) -> list[Any]:
    """Return all combinations for `parametrize`. Those beyond a subset that covers every value are
    marked `full`.
    """
    choices = [list(axis) for axis in axes]
    turns = range(max(map(len, choices)))
    return _marked(choices, {tuple(turn % len(axis) for axis in choices) for turn in turns})


def _places(axis: list[Any]) -> range:
    return range(len(axis))


def _marked(choices: list[list[Any]], kept: set[tuple[int, ...]]) -> list[Any]:
    return [
        pytest.param(
            *(axis[index] for axis, index in zip(choices, case, strict=True)),
            marks=() if case in kept else pytest.mark.full,
        )
        for case in product(*map(_places, choices))
    ]
