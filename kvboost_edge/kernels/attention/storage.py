"""KV storage dtypes, and kernels that write KV to slots, copy blocks and merge partial results.

NumPy has no bfloat16, so bfloat16 arrays are uint16 bit patterns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ConfigError
from kvboost_edge.kernels.attention.paged import Floats, KVPool, storage_kind
from kvboost_edge.kernels.entry import KernelEntry
from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.signature import array
from kvboost_edge.kernels.vectors import KIND_F32, exp_f32, store_scalar

__all__ = [
    "STORAGE_DTYPES",
    "copy_blocks",
    "copy_entry",
    "from_storage",
    "merge_state",
    "to_storage",
    "write_kv",
]

STORAGE_DTYPES: dict[str, npt.DTypeLike] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
}
"""NumPy dtype that stores each KV dtype."""


def to_storage(values: Floats, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Convert float32 to float32, float16 or uint16 (bfloat16 bits).

    Values are rounded to nearest, ties to even; NaN stays NaN.
    """
    if np.dtype(dtype) != np.uint16:
        with np.errstate(over="ignore"):
            return values.astype(dtype)
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))
    rounded = np.where(np.isnan(values), bits | np.uint32(0x400000), rounded)
    return (rounded >> np.uint32(16)).astype(np.uint16)


def from_storage(stored: npt.NDArray[Any]) -> Floats:
    """Convert float32, float16 or uint16 (bfloat16 bits) exactly to float32."""
    if stored.dtype != np.uint16:
        return stored.astype(np.float32)
    return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)


@kernel
def _store(
    keys: Floats,
    values: Floats,
    key_pool: int,
    value_pool: int,
    slots: npt.NDArray[np.int64],
    block_size: int,
    kind: int,
) -> None:
    """Store keys and values, float32 [num_tokens, num_kv_heads, head_dim], at slots.

    Args:
        key_pool: address of the pool's keys.
        value_pool: address of the pool's values.
        slots: int64 [num_tokens].
        kind: dtype of the pool: KIND_F32, KIND_F16 or KIND_BF16.
    """
    num_heads = keys.shape[1]
    head_dim = keys.shape[2]
    size = 4 if kind == KIND_F32 else 2
    for token in range(slots.size):
        block = slots[token] // block_size
        offset = slots[token] % block_size
        for head in range(num_heads):
            start = (block * num_heads + head) * head_dim * block_size
            key_at = key_pool + (start + offset) * size
            value_at = value_pool + (start + offset * head_dim) * size
            for dim in range(head_dim):
                store_scalar(key_at + dim * block_size * size, keys[token, head, dim], kind)
                store_scalar(value_at + dim * size, values[token, head, dim], kind)


def write_kv(
    keys: Floats, values: Floats, pool: KVPool, slot_mapping: npt.NDArray[np.int64]
) -> None:
    """Store keys and values in a pool.

    Args:
        keys: float32 [num_tokens, num_kv_heads, head_dim].
        values: float32 [num_tokens, num_kv_heads, head_dim].
        pool: KV of one layer, written.
        slot_mapping: int64 [num_tokens], block * block_size + offset; not checked.

    Raises:
        ConfigError: the shapes do not match the pool.
    """
    kind = storage_kind(pool)
    _, num_heads, head_dim, block_size = pool.keys.shape
    expected = (slot_mapping.size, num_heads, head_dim)
    if keys.shape != expected or values.shape != expected:
        raise ConfigError(
            f"keys {keys.shape} and values {values.shape} must have shape {expected} to match the "
            "slots and the pool"
        )
    _store(
        np.ascontiguousarray(keys, dtype=np.float32),
        np.ascontiguousarray(values, dtype=np.float32),
        pool.keys.ctypes.data,
        pool.values.ctypes.data,
        np.ascontiguousarray(slot_mapping, dtype=np.int64),
        block_size,
        kind,
    )


@kernel
def _copy(pool: npt.NDArray[np.uint8], ops: npt.NDArray[np.int64]) -> None:
    """Copy blocks in `pool`, uint8 [num_blocks, bytes]; `ops` is int64 [num_ops, 2] (src, dst)."""
    for op in range(ops.shape[0]):
        src = ops[op, 0]
        dst = ops[op, 1]
        for at in range(pool.shape[1]):
            pool[dst, at] = pool[src, at]


copy_entry = KernelEntry(_copy, array("uint8", 2), array("int64", 2))


def copy_blocks(pool: KVPool, ops: Iterable[tuple[int, int]]) -> None:
    """Copy whole blocks, (src, dst) pairs in order. Block ids are not checked."""
    pairs = np.array(list(ops), dtype=np.int64).reshape(-1, 2)
    if pairs.size:
        for array in pool:
            _copy(array.reshape(array.shape[0], -1).view(np.uint8), pairs)


@kernel
def _merge(v_a: Floats, s_a: Floats, v_b: Floats, s_b: Floats, out: Floats, lse: Floats) -> None:
    """Merge attention results like `merge_state`, with arrays flattened to [n, dim] and [n]."""
    nothing = np.float32(-np.inf)
    for row in range(s_a.size):
        top = max(s_a[row], s_b[row])
        base = np.float32(0.0) if top == nothing else top
        weight_a = exp_f32(s_a[row] - base)
        weight_b = exp_f32(s_b[row] - base)
        total = weight_a + weight_b
        lse[row] = base + np.float32(math.log(total))
        if weight_a > 0 and weight_b > 0:
            for dim in range(out.shape[1]):
                out[row, dim] = (v_a[row, dim] * weight_a + v_b[row, dim] * weight_b) / total
        else:
            for dim in range(out.shape[1]):
                out[row, dim] = (
                    v_a[row, dim]
                    if weight_a > 0
                    else (v_b[row, dim] if weight_b > 0 else np.float32(0.0))
                )


def merge_state(v_a: Floats, s_a: Floats, v_b: Floats, s_b: Floats) -> tuple[Floats, Floats]:
    """Merge attention results over two disjoint sets of keys.

    An lse of -inf marks an empty set, whose result is ignored. Two empty sets give 0 and -inf.

    Args:
        v_a: float32 [..., dim], result over the first set.
        s_a: float32 [...], log-sum-exp over the first set.
        v_b: float32 [..., dim], result over the second set.
        s_b: float32 [...], log-sum-exp over the second set.

    Returns:
        (v, lse) over the union, float32.
    """
    out = np.empty(v_a.shape, dtype=np.float32)
    lse = np.empty(s_a.shape, dtype=np.float32)
    rows = (-1, v_a.shape[-1])
    a, b = (np.ascontiguousarray(v, dtype=np.float32).reshape(rows) for v in (v_a, v_b))
    lse_a, lse_b = (np.ascontiguousarray(s, dtype=np.float32).reshape(-1) for s in (s_a, s_b))
    _merge(a, lse_a, b, lse_b, out.reshape(rows), lse.reshape(-1))
    return out, lse
