"""The automaton against a search of the whole text for the longest suffix that occurred before."""

import numpy as np
import pytest

from kvboost_edge.kernels.suffix_automaton import (
    MATCH_END,
    MATCH_LENGTH,
    NUM_STATES,
    NUM_TOKENS,
    automaton_bytes,
    extend,
    new_automaton,
)


def longest_before(text):
    """Return the length of the longest suffix that occurs earlier in the text, and the position
    after its latest occurrence.
    """
    for length in range(len(text) - 1, 0, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:]:
                return length, end
    return 0, 0


@pytest.mark.parametrize("alphabet", [1, 2, 3, 5, 2**31 - 1])
def test_the_longest_repeated_suffix_is_found(alphabet):
    rng = np.random.default_rng(alphabet)
    for _ in range(40):
        text = rng.integers(0, alphabet, rng.integers(1, 60), dtype=np.int32)
        automaton = new_automaton(64)
        for stop in range(1, len(text) + 1):
            extend(text[stop - 1 : stop], *automaton)
            length, end = longest_before(text[:stop].tolist())
            assert automaton.counts[MATCH_LENGTH] == length
            assert not length or automaton.counts[MATCH_END] == end


def test_appending_in_pieces_equals_appending_one_by_one():
    text = np.random.default_rng(0).integers(0, 4, 300, dtype=np.int32)
    whole = new_automaton(512)
    pieces = new_automaton(512)
    extend(text, *whole)
    for start in range(0, 300, 7):
        extend(text[start : start + 7], *pieces)
    assert whole.counts.tolist() == pieces.counts.tolist()
    assert whole.counts[NUM_TOKENS] == 300


@pytest.mark.parametrize("kind", ["one token", "all different", "halves", "fibonacci"])
def test_a_text_of_the_maximum_length_fits(kind):
    """There are at most two states and three edges per token. Even the texts with the most of each
    fit the tables.
    """
    count = 4096
    texts = {
        "one token": [7] * count,
        "all different": list(range(count)),
        "halves": [*range(count // 2)] * 2,
    }
    word = [1]
    other = [0]
    while len(word) < count:
        word, other = word + other, word
    text = np.array(texts.get(kind, word[:count]), np.int32)
    automaton = new_automaton(count)
    extend(text, *automaton)
    assert automaton.counts[NUM_STATES] <= 2 * count
    assert (automaton.keys >= 0).sum() <= 3 * count
    if kind == "one token":
        assert automaton.counts[[MATCH_LENGTH, MATCH_END]].tolist() == [count - 1, count - 1]
    if kind == "halves":
        assert automaton.counts[[MATCH_LENGTH, MATCH_END]].tolist() == [count // 2, count // 2]


def test_the_reported_size_is_exact():
    automaton = new_automaton(1024)
    assert (
        (automaton.room, automaton.nbytes)
        == (1024, automaton_bytes(1024))
        == (1024, 96 * 1024 + 40)
    )
