"""Common prefixes of several prompts, in whole chunks."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any

from kvboost_edge.errors import RequestError

__all__ = ["find_common_chunk_prefix", "group_by_prefix"]


def find_common_chunk_prefix(all_token_ids: Sequence[Sequence[int]], chunk_size: int) -> int:
    """Return the length in tokens of the longest prefix that all prompts share, in whole chunks.

    One prompt: its length.
    """
    _check_chunk_size(chunk_size)
    if len(all_token_ids) < 2:
        return len(all_token_ids[0]) if all_token_ids else 0
    first = all_token_ids[0]
    rest = all_token_ids[1:]
    common = 0
    for token_ids in zip(first, *rest, strict=False):
        if any(token_id != token_ids[0] for token_id in token_ids):
            break
        common += 1
    return common - common % chunk_size


def group_by_prefix(
    prompts: Sequence[Any],
    token_ids_list: Sequence[Sequence[int]],
    chunk_size: int,
    n_prefix_chunks: int = 3,
) -> dict[str, list[int]]:
    """Group prompts that share their first `n_prefix_chunks` whole chunks.

    Return {key: indices in order of appearance}. A prompt with fewer whole chunks is grouped by
    those it has; with none, with others that have none and are equal.
    """
    _check_chunk_size(chunk_size)
    if len(prompts) != len(token_ids_list):
        raise RequestError(
            f"{len(prompts)} prompts and {len(token_ids_list)} lists of token ids; give one for "
            "each"
        )
    groups: dict[str, list[int]] = {}
    for index, token_ids in enumerate(token_ids_list):
        num_chunks = min(n_prefix_chunks, len(token_ids) // chunk_size)
        prefix = token_ids[: num_chunks * chunk_size] if num_chunks else token_ids
        key = hashlib.sha256(array("q", [num_chunks, *prefix]).tobytes()).hexdigest()
        groups.setdefault(key, []).append(index)
    return groups


def _check_chunk_size(chunk_size: int) -> None:
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise RequestError(f"chunk_size={chunk_size!r} must be an integer of at least 1")
