"""DRY, a penalty for tokens that would continue a repetition, and bad words.

DRY ("Don't Repeat Yourself") is by p-e-w. The rules here are those of llama.cpp. Both samplers read
all token ids at every token and keep no state.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.engine.request.words import Breakers

__all__ = ["make_bad_words", "make_dry", "repeat_lengths"]

Ids = npt.NDArray[np.int32]
Counts = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32] | npt.NDArray[np.float64]

# Repetitions are first extended backwards, all at once. Longer ones are left to an algorithm whose
# work does not grow with their length.
_AT_ONCE = 256
_FLOAT_MAX_LOG = 88.7228391
_MAX_PENALTY = 1e30


def make_dry(
    params: SamplingParams, breakers: Breakers
) -> Callable[[Logits, Sequence[int], int], None]:
    """Return a function that subtracts DRY's penalties from logits [vocab_size]."""
    base = params.dry_base
    allowed = params.dry_allowed_length
    window = params.dry_penalty_last_n
    # llama.cpp's bound, with which the penalty stays finite in float32.
    most = int(_FLOAT_MAX_LOG / math.log(base)) if base > 1.000001 else None
    longest_tail = max(
        (len(tail) for tails in breakers.begun.values() for tail in tails), default=0
    )

    def dry(logits: Logits, token_ids: Sequence[int], num_prompt: int) -> None:
        recent = token_ids if window < 0 else token_ids[max(0, len(token_ids) - window) :]
        if len(recent) <= allowed:
            return
        ids = np.asarray(recent, np.int32)
        lengths = repeat_lengths(ids)
        longest = int(lengths.max())
        if longest < allowed:
            return
        lengths = np.minimum(lengths, _limit(recent, breakers, longest + longest_tail))
        ends = np.flatnonzero(lengths >= allowed)
        if not len(ends):
            return
        # The token after an earlier occurrence would continue the repetition.
        following = ids[ends + 1]
        tokens, places = np.unique(following, return_inverse=True)
        repeated = np.zeros(len(tokens), np.int64)
        np.maximum.at(repeated, places, lengths[ends])
        kept = np.fromiter(
            (int(token) not in breakers.alone for token in tokens), np.bool_, len(tokens)
        )
        powers = repeated[kept] - allowed
        if most is not None:
            powers = np.minimum(powers, most)
        penalties = params.dry_multiplier * base ** powers.astype(np.float64)
        # Finite, so that a token stays possible if nothing else is.
        logits[tokens[kept]] -= np.minimum(penalties, _MAX_PENALTY)

    return dry


def repeat_lengths(ids: Ids) -> Counts:
    """Return how many tokens before each position equal the last tokens of all.

    Args:
        ids: token ids, at least one.

    Returns:
        int64 [len(ids) - 1]. Entry i is the length of the longest common suffix of ids[: i + 1] and
            ids.
    """
    last = len(ids) - 1
    lengths = np.zeros(last, np.int64)
    ends = np.flatnonzero(ids[:last] == ids[last])
    for length in range(1, _AT_ONCE + 1):
        if not len(ends):
            return lengths
        lengths[ends] = length
        ends = ends[ends >= length]
        ends = ends[ids[ends - length] == ids[last - length]]
    return lengths if not len(ends) else _linear_lengths(ids)


def _linear_lengths(ids: Ids) -> Counts:
    """Compute `repeat_lengths` by the Z-algorithm, on the reversed ids."""
    text = ids[::-1].tolist()
    size = len(text)
    found = [0] * size
    left = right = 0
    for at in range(1, size):
        length = min(right - at, found[at - left]) if at < right else 0
        if at + length >= right:
            while at + length < size and text[length] == text[at + length]:
                length += 1
            left, right = at, at + length
        found[at] = length
    return np.array(found[:0:-1], np.int64)


def _limit(token_ids: Sequence[int], breakers: Breakers, reach: int) -> int:
    """Return the number of tokens after the last sequence breaker.

    Breakers that begin more than `reach` tokens before the end are not looked for.
    """
    size = len(token_ids)
    for back in range(min(size, reach + 1)):
        token = token_ids[size - 1 - back]
        longest = 0 if token in breakers.alone else -1
        for tail in breakers.begun.get(token, ()):
            begin = size - back
            if longest < len(tail) <= back and (
                tuple(token_ids[begin : begin + len(tail)]) == tail
            ):
                longest = len(tail)
        if longest >= 0:
            return back - longest
    return size


def make_bad_words(
    words: Sequence[tuple[int, ...]],
) -> Callable[[Sequence[int], int], list[int]]:
    """Return a function that lists the tokens which would complete a bad word in the output.

    Args:
        words: token ids of each word, at least one per word.
    """
    ends: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
    for word in words:
        ends[word[:-1]].add(word[-1])
    sizes = sorted({len(begin) for begin in ends})

    def forbidden(token_ids: Sequence[int], num_prompt: int) -> list[int]:
        found: set[int] = set()
        for size in sizes:
            start = len(token_ids) - size
            if start >= num_prompt:
                found |= ends.get(tuple(token_ids[start:]), set())
        return sorted(found)

    return forbidden
