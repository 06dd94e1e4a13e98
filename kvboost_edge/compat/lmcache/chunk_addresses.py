"""Token ids, masks and chunk addresses of a sequence."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvboost_edge.errors import RequestError
from kvboost_edge.kvcache.hashing import TOKEN_BYTES, BlockAddress, chain_hash

__all__ = ["chunk_addresses", "is_tensor", "mask_like", "num_skipped", "token_bytes"]

_MAX_TOKEN_ID = 2**32 - 1


def is_tensor(value: object) -> bool:
    """Return whether a value is a torch tensor, without loading torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def token_bytes(tokens: Any) -> bytes:
    """Convert token ids [num_tokens] of any integer type to little-endian u32 bytes.

    Equal ids give equal bytes.
    """
    array = _array(tokens)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise RequestError(f"tokens must be one row of integers, not {_described(array)}")
    if array.size and not 0 <= int(array.min()) <= int(array.max()) <= _MAX_TOKEN_ID:
        raise RequestError(
            f"tokens must be in [0, {_MAX_TOKEN_ID}], not in [{array.min()}, {array.max()}]"
        )
    return array.astype("<u4").tobytes()


def chunk_addresses(space: bytes, tokens: bytes, chunk_size: int) -> list[BlockAddress]:
    """Return the addresses of a sequence's chunks. The last chunk may have fewer tokens."""
    addresses: list[BlockAddress] = []
    parent = space
    step = chunk_size * TOKEN_BYTES
    for start in range(0, len(tokens), step):
        own = tokens[start : start + step]
        addresses.append(BlockAddress(chain_hash(parent, own), parent, own))
        parent = addresses[-1].prefix_hash
    return addresses


def num_skipped(name: str, mask: Any, num_tokens: int) -> int:
    """Return how many leading tokens a mask skips. All later entries must be True."""
    if mask is None:
        return 0
    array = _array(mask)
    if array.shape != (num_tokens,) or (array.dtype != np.bool_ and num_tokens):
        raise RequestError(
            f"{name} must be {num_tokens} booleans, one per token, not {_described(array)}"
        )
    count = num_tokens - int(np.count_nonzero(array))
    if array[:count].any():
        raise RequestError(f"{name} must be False for the first tokens and True for all others")
    return count


def mask_like(tokens: Any, start: int, end: int, num_tokens: int) -> Any:
    """Return a mask [num_tokens] that is True in [start, end): a tensor if the tokens are one."""
    mask: NDArray[np.bool_] = np.zeros(num_tokens, np.bool_)
    mask[start:end] = True
    return sys.modules["torch"].from_numpy(mask).to(tokens.device) if is_tensor(tokens) else mask


def _array(value: Any) -> NDArray[Any]:
    if is_tensor(value):
        value = value.detach().cpu().numpy()
    try:
        return np.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestError(f"tokens and masks must be a row of numbers: {error}") from error


def _described(array: NDArray[Any]) -> str:
    return f"{array.dtype} {list(array.shape)}"
