"""The ring of tokens against a list of all appended tokens."""

import numpy as np
import pytest

from kvboost_edge.kernels.ngram_cache import GRAM, append_tokens, find_end, new_ring

ROOM = 64


def look(ring, tail):
    found = np.full(2, -1, np.int64)
    find_end(np.array(tail, np.int32), found, *ring)
    return int(found[0]), int(found[1])


def latest_place(appended, tail):
    """Return the latest stored place of the last GRAM tokens that has a successor, and the length
    of the match before it.
    """
    oldest = max(0, len(appended) - ROOM)
    for end in range(len(appended), oldest + GRAM - 1, -1):
        if appended[end - GRAM : end] == tail[-GRAM:]:
            if end == len(appended):
                return 0, 0
            length = 0
            while (
                length < len(tail)
                and end - length > oldest
                and appended[end - 1 - length] == tail[-1 - length]
            ):
                length += 1
            return length, end
    return 0, 0


@pytest.mark.parametrize("alphabet", [1, 2, 3])
def test_lookups_equal_a_linear_search(alphabet):
    """With two tokens, nearly every run of eight occurred before. The latest one counts, and
    overwritten tokens do not.
    """
    rng = np.random.default_rng(alphabet)
    ring = new_ring(ROOM)
    appended = list[int]()
    for _ in range(200):
        piece = rng.integers(0, alphabet, rng.integers(1, 12))
        append_tokens(piece.astype(np.int32), *ring)
        appended += piece.tolist()
        start = int(rng.integers(0, max(1, len(appended) - GRAM)))
        tail = (
            appended[start : start + int(rng.integers(GRAM, 30))]
            if rng.random() < 0.5
            else rng.integers(0, alphabet, GRAM).tolist()
        )
        if len(tail) >= GRAM:
            found = look(ring, tail)
            expected = latest_place(appended, tail)
            # Another run may have replaced it in the hash table. Then nothing is found.
            assert found == expected or (found == (0, 0) and alphabet > 1)


def test_overwritten_tokens_are_not_found():
    ring = new_ring(ROOM)
    run = list(range(100, 100 + GRAM))
    append_tokens(np.array([*run, 1], np.int32), *ring)
    assert look(ring, run) == (GRAM, GRAM)
    append_tokens(np.zeros(ROOM - GRAM - 1, np.int32), *ring)
    assert look(ring, run) == (GRAM, GRAM)
    append_tokens(np.zeros(1, np.int32), *ring)
    assert look(ring, run) == (0, 0)


def test_hash_collisions_are_not_matches():
    ring = new_ring(ROOM)
    run = list(range(GRAM))
    append_tokens(np.array([*run, 1], np.int32), *ring)
    ring.heads[:] = GRAM  # every hash points there
    assert look(ring, run) == (GRAM, GRAM)
    assert look(ring, [50] * GRAM) == (0, 0)
    assert look(ring, [50, *run[1:]]) == (0, 0)
    assert look(ring, [9, *run]) == (GRAM, GRAM)
