"""Prompts grouped by their common prefixes, and KVBoost's hashes."""

import hashlib
import random

import numpy as np
import pytest

from kvboost_edge.compat import hf_batches
from kvboost_edge.errors import RequestError
from kvboost_edge.kvcache.prompt_groups import (
    chained_hash,
    content_hash_from_tokens,
    find_common_chunk_prefix,
    group_by_prefix,
)


def test_find_common_chunk_prefix_of_prompts():
    find = find_common_chunk_prefix
    assert find([], 4) == 0
    assert find([[1, 2, 3]], 4) == 3, "the prefix of a single prompt must be its length"
    assert find([[1, 2, 3, 4, 5]] * 3, 2) == 4
    assert find([[1, 2, 3, 4, 5], [1, 2, 3, 9, 5]], 2) == 2
    assert find([[1, 2, 3, 4], [1, 2, 3, 4, 5, 6]], 2) == 4
    assert find([[1, 2], [2, 2]], 1) == 0
    assert find([[1, 2], []], 1) == 0
    assert find([[1] * 7, [1] * 9, [1] * 8], 8) == 0
    with pytest.raises(RequestError, match="chunk_size=0"):
        find([[1], [1]], 0)


def test_group_by_prefix_of_prompts():
    ids = [[1, 2, 3, 4, 9], [5, 6, 7, 8], [1, 2, 3, 4, 7, 7], [1, 2, 3], [1, 2, 3], [1, 2], [], []]
    groups = group_by_prefix("abcdefgh", ids, 2, n_prefix_chunks=2)
    assert list(groups.values()) == [[0, 2], [1], [3, 4], [5], [6, 7]]
    assert groups["empty"] == [6, 7]
    assert list(group_by_prefix("ab", [[1, 2, 3], [1, 2, 4]], 4).values()) == [[0], [1]]
    assert list(group_by_prefix("ab", [[1, 2, 3, 4], [1, 2, 3, 5]], 1).values()) == [[0, 1]]
    assert group_by_prefix("ab", [[1, 2], [3]], 4, 0) == {"empty": [0, 1]}
    assert group_by_prefix([], [], 4) == {}
    for name, sizes in (("chunk_size=0", (0,)), ("n_prefix_chunks=-1", (4, -1))):
        with pytest.raises(RequestError, match=name):
            group_by_prefix(["a"], [[1]], *sizes)
    with pytest.raises(RequestError, match="1 prompts and 0 lists"):
        group_by_prefix(["a"], [], 4)


def digest(token_ids, before=b""):
    words = b"".join(int(token).to_bytes(4, "little") for token in token_ids)
    return hashlib.sha256(before + words).hexdigest()


def test_groups_are_keyed_by_the_hash_of_the_first_tokens():
    rng = random.Random(5)
    for _ in range(300):
        chunk_size = rng.randrange(1, 5)
        num_chunks = rng.randrange(1, 4)
        ids = [rng.choices(range(2), k=rng.randrange(12)) for _ in range(6)]
        expected = {}
        for index, row in enumerate(ids):
            first = row[: num_chunks * chunk_size]
            expected.setdefault(digest(first) if first else "empty", []).append(index)
        assert group_by_prefix(ids, ids, chunk_size, num_chunks) == expected
    [key] = group_by_prefix(["a"], [np.array([1, 2, 3])], 1)
    assert key == digest([1, 2, 3])


def test_hashes_of_token_ids():
    ids = [0, 1, 2**32 - 1]
    assert content_hash_from_tokens(ids) == digest(ids)
    assert chained_hash(ids) == chained_hash(ids, None) == digest(ids, b"root")
    assert chained_hash([7], chained_hash(ids)) == digest([7], digest(ids, b"root").encode())
    for bad in ([-1], [2**32], ["a"]):
        for call in (content_hash_from_tokens, chained_hash):
            with pytest.raises(RequestError, match="token ids"):
                call(bad)


def test_prompt_group_functions_are_importable_from_hf_batches():
    assert hf_batches.group_by_prefix is group_by_prefix
    assert hf_batches.find_common_chunk_prefix is find_common_chunk_prefix
