"""A prompt as the router sees it: the prefix hashes of its full blocks, made by the engine's own code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvboost_edge.errors import RequestError
from kvboost_edge.kvcache.hashing import TOKEN_BYTES, chain_hash, encode_tokens, narrowed_root
from kvboost_edge.serve_ray.routing.records import KEY_BYTES

__all__ = ["PromptChain", "key_of", "prefix_hashes"]


def prefix_hashes(token_ids: Sequence[int], root: bytes, block_size: int) -> tuple[bytes, ...]:
    """The prefix hashes (32 bytes each) of the full blocks of a prompt, in order; RequestError for wrong ids."""
    data, size = encode_tokens(token_ids), block_size * TOKEN_BYTES
    found: list[bytes] = []
    parent = root
    for start in range(0, len(data) - size + 1, size):
        parent = chain_hash(parent, data[start : start + size])
        found.append(parent)
    return tuple(found)


def key_of(prefix_hash: bytes) -> int:
    """The part of a hash that the router remembers."""
    return int.from_bytes(prefix_hash[:KEY_BYTES], "little")


class PromptChain(NamedTuple):
    """A prompt to be routed. Nothing of its text or tokens is in it.

    keys         of its full blocks, in order
    num_tokens   of the whole prompt, at least 1
    block_size   tokens of a block
    cache_key    of the caller's `prompt_cache_key`, None without one: such prompts lean to one replica
    """

    keys: tuple[int, ...]
    num_tokens: int
    block_size: int
    cache_key: int | None = None

    @classmethod
    def of(
        cls, token_ids: Sequence[int], root: bytes, block_size: int, prompt_cache_key: str | None = None
    ) -> PromptChain:
        """From a prompt's tokens. `root`: where the chains of its tenant and salt start, see `hashing.shared_root`."""
        return cls.of_hashes(
            prefix_hashes(token_ids, root, block_size), len(token_ids), block_size, root, prompt_cache_key
        )

    @classmethod
    def of_hashes(
        cls,
        hashes: Sequence[bytes],
        num_tokens: int,
        block_size: int,
        root: bytes = b"",
        prompt_cache_key: str | None = None,
    ) -> PromptChain:
        """From hashes that are known already; `root` matters for a `prompt_cache_key` alone: it is the tenant's own."""
        if num_tokens < 1 or len(hashes) != num_tokens // block_size:
            raise RequestError(f"{len(hashes)} hashes of blocks of {block_size} tokens do not fit {num_tokens} tokens")
        cache_key = None if not prompt_cache_key else key_of(narrowed_root(root, "cache_key", prompt_cache_key))
        return cls(tuple(map(key_of, hashes)), num_tokens, block_size, cache_key)
