"""A prompt as the router sees it: the prefix hashes of its full blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import RequestError
from kvboost_edge.kvcache.hashing import HASH_BYTES, STATE_MASK, STATE_WORD, narrowed_root
from kvboost_edge.serve_ray.routing.cache_records import KEY_BYTES, OUTSIDE_MASK, Place

__all__ = ["Outside", "PromptChain", "key_of"]


def key_of(prefix_hash: bytes, place: Place = Place.POOL) -> int:
    """Return the part of a hash that identifies a block at a place."""
    return int.from_bytes(prefix_hash[place * KEY_BYTES : (place + 1) * KEY_BYTES], "little")


class Outside(NamedTuple):
    """The blocks of a prompt that are reported outside of pools, a subset (`OUTSIDE_MASK`).

    Attributes:
        keys: Keys of these blocks, in order.
        ends: For each key, the number of the prompt's blocks up to and including this block.
    """

    keys: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()


class PromptChain(NamedTuple):
    """A prompt to route, without its text and tokens.

    Attributes:
        keys: Keys of the prompt's full blocks, in order.
        num_tokens: Number of tokens, at least 1.
        block_size: Tokens per block.
        cache_key: Hash of the caller's `prompt_cache_key`, or None. Prompts with the same key
            prefer the same replica.
        disk: The same blocks on disk.
        shared: The same blocks on the shared server.
        states: For hybrid models, the keys of the recurrent states after all these blocks, by
            `Place`; () for other models.
    """

    keys: tuple[int, ...]
    num_tokens: int
    block_size: int
    cache_key: int | None = None
    disk: Outside = Outside()
    shared: Outside = Outside()
    states: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of_hashes(
        cls,
        hashes: Sequence[bytes],
        num_tokens: int,
        block_size: int,
        root: bytes = b"",
        prompt_cache_key: str | None = None,
        *,
        has_states: bool = False,
    ) -> PromptChain:
        """Build a chain from known block hashes.

        Args:
            hashes: Prefix hashes of the prompt's full blocks.
            num_tokens: Number of tokens of the prompt.
            block_size: Tokens per block.
            root: Root hash of the tenant. Only used with a `prompt_cache_key`.
            prompt_cache_key: The caller's key for a preferred replica.
            has_states: Whether the model has recurrent state. Its blocks are usable only with a
                state.
        """
        if num_tokens < 1 or len(hashes) != num_tokens // block_size:
            raise RequestError(
                f"{len(hashes)} hashes of blocks of {block_size} tokens do not fit {num_tokens} "
                "tokens"
            )
        cache_key = (
            None
            if not prompt_cache_key
            else key_of(narrowed_root(root, "cache_key", prompt_cache_key))
        )
        words = np.frombuffer(b"".join(hashes), "<u8").reshape(len(hashes), HASH_BYTES // KEY_BYTES)
        keys = tuple(words[:, Place.POOL].tolist())
        disk, shared = (_outside(words[:, place]) for place in (Place.DISK, Place.SHARED))
        states = tuple(_states(words[:, place]) for place in Place) if has_states else ()
        return cls(keys, num_tokens, block_size, cache_key, disk, shared, states)

    def servable_states(self, place: Place) -> tuple[int, ...]:
        """Return the keys of recurrent states at a place from which this prompt can continue."""
        # The last token is always computed, so a state after it is useless.
        return self.states[place][: (self.num_tokens - 1) // self.block_size]


def _states(keys: npt.NDArray[np.uint64]) -> tuple[int, ...]:
    return tuple(((keys ^ np.uint64(STATE_WORD)) & np.uint64(STATE_MASK)).tolist())


def _outside(keys: npt.NDArray[np.uint64]) -> Outside:
    at = np.flatnonzero(keys & np.uint64(OUTSIDE_MASK) == 0)
    return Outside(tuple(keys[at].tolist()), tuple((at + 1).tolist()))
