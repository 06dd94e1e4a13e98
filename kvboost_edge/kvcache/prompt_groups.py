"""Common prefixes of a list of prompts, and KVBoost-compatible hashes of token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from kvboost_edge.errors import RequestError
from kvboost_edge.kvcache.hashing import encode_tokens

__all__ = [
    "chained_hash",
    "content_hash_from_tokens",
    "find_common_chunk_prefix",
    "group_by_prefix",
]


def find_common_chunk_prefix(all_token_ids: Sequence[Sequence[int]], chunk_size: int) -> int:
    """Return the number of tokens in the longest common prefix, rounded down to whole chunks.

    For a single prompt, the result is its full length, not rounded.
    """
    _check_count("chunk_size", chunk_size, 1)
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
    """Group prompts by their first `n_prefix_chunks * chunk_size` tokens.

    A prompt with fewer tokens is grouped by all of them.

    Returns:
        prompt indices by group key, in order of appearance. The key is the
            `content_hash_from_tokens` of the leading tokens, or "empty" for a prompt without
            tokens.
    """
    _check_count("chunk_size", chunk_size, 1)
    _check_count("n_prefix_chunks", n_prefix_chunks, 0)
    if len(prompts) != len(token_ids_list):
        raise RequestError(
            f"got {len(prompts)} prompts and {len(token_ids_list)} lists of token ids; give one "
            "list for each prompt"
        )
    groups: dict[str, list[int]] = {}
    for index, token_ids in enumerate(token_ids_list):
        prefix = token_ids[: n_prefix_chunks * chunk_size]
        key = content_hash_from_tokens(prefix) if len(prefix) else "empty"
        groups.setdefault(key, []).append(index)
    return groups


def content_hash_from_tokens(token_ids: Sequence[int]) -> str:
    """Return the SHA-256 of the token ids alone, as 64 hexadecimal digits."""
    return hashlib.sha256(encode_tokens(token_ids)).hexdigest()


def chained_hash(token_ids: Sequence[int], parent_hash: str | None = None) -> str:
    """Return the SHA-256 of the parent's hash and a chunk, as 64 hexadecimal digits.

    This is KVBoost's hash. It differs from the prefix hashes of this package's cache, which also
    cover the model, KV format and tenant.
    """
    parent = (parent_hash or "root").encode()
    return hashlib.sha256(parent + encode_tokens(token_ids)).hexdigest()


def _check_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise RequestError(f"{name}={value!r} must be an integer of at least {least}")
