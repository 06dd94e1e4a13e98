"""Prompts grouped by their common prefixes, in whole chunks."""

import pytest

from kvboost_edge.compat import hf_batches
from kvboost_edge.errors import RequestError
from kvboost_edge.kvcache.prompt_groups import find_common_chunk_prefix, group_by_prefix


def test_find_common_chunk_prefix():
    find = find_common_chunk_prefix
    assert find([], 4) == 0
    assert find([[1, 2, 3]], 4) == 3, "one prompt: its length"
    assert find([[1, 2, 3, 4, 5]] * 3, 2) == 4
    assert find([[1, 2, 3, 4, 5], [1, 2, 3, 9, 5]], 2) == 2
    assert find([[1, 2, 3, 4], [1, 2, 3, 4, 5, 6]], 2) == 4
    assert find([[1, 2], [2, 2]], 1) == 0
    assert find([[1, 2], []], 1) == 0
    assert find([[1] * 7, [1] * 9, [1] * 8], 8) == 0
    with pytest.raises(RequestError, match="chunk_size=0"):
        find([[1], [1]], 0)


def test_group_by_prefix():
    ids = [[1, 2, 3, 4, 9], [5, 6, 7, 8], [1, 2, 3, 4, 7, 7], [1, 2, 3], [1, 2, 3], [1, 2], [], []]
    groups = group_by_prefix("abcdefgh", ids, 2, n_prefix_chunks=2)
    assert list(groups.values()) == [[0, 2], [1], [3, 4, 5], [6, 7]]
    assert list(group_by_prefix("ab", [[1, 2, 3], [1, 2, 4]], 4).values()) == [[0], [1]], (
        "no whole chunk: whole prompt"
    )
    assert group_by_prefix([], [], 4) == {}
    with pytest.raises(RequestError, match="1 prompts and 0 lists"):
        group_by_prefix(["a"], [], 4)


def test_both_stay_importable_next_to_the_other_batch_functions():
    assert hf_batches.group_by_prefix is group_by_prefix
    assert hf_batches.find_common_chunk_prefix is find_common_chunk_prefix
