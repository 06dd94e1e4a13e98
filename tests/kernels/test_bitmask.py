"""The mask of logits against its oracle."""

import numpy as np
import pytest

from kvboost_edge.kernels import bitmask
from kvboost_edge.kernels.reference import bitmask as reference


def words_of(rng, count):
    """Return words of which some are all ones, some zero, some have a single bit, and the rest are
    random.
    """
    words = rng.integers(-(2**31), 2**31, count).astype(np.int32)
    kinds = rng.integers(0, 5, count)
    words[kinds == 0] = -1
    words[kinds == 1] = 0
    single = 1 << rng.integers(0, 32, count)
    words[kinds == 2] = single.astype(np.uint32).view(np.int32)[kinds == 2]
    return words


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 100, 257, 49152, 151_936, 151_665])
def test_every_token_follows_its_bit(vocab_size):
    rng = np.random.default_rng(vocab_size)
    for _ in range(5):
        words = words_of(rng, -(-vocab_size // bitmask.WORD_BITS))
        logits = rng.normal(0, 9, vocab_size).astype(np.float32)
        logits[rng.random(vocab_size) < 0.1] = -np.inf  # as a bias may have set them
        before = logits.copy()
        found = np.full(vocab_size, np.nan, np.float32)
        expected = np.full(vocab_size, np.nan, np.float32)
        bitmask.mask_logits(words, logits, found)
        reference.mask_logits(words, logits, expected)
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize("word", [-1, 0])
def test_nothing_is_written_after_the_vocabulary(word):
    vocab_size = 70
    room = np.full(96, 7, np.float32)
    logits = np.arange(96, dtype=np.float32)
    bitmask.mask_logits(np.full(3, word, np.int32), logits[:vocab_size], room[:vocab_size])
    np.testing.assert_array_equal(room[:vocab_size], logits[:vocab_size] if word else -np.inf)
    np.testing.assert_array_equal(room[vocab_size:], 7)
