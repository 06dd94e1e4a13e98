"""Paged attention and KV storage in plain NumPy with float64 sums: the oracle of the kernels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.kernels.attention.paged import (
    AttentionOptions,
    Floats,
    KVPool,
    PagedBatch,
    QueryRotation,
)
from kvboost_edge.kernels.attention.storage import from_storage, to_storage
from kvboost_edge.kernels.reference.rope import turn_keys
from kvboost_edge.segments import Segments, deltas_of, entry_of

__all__ = ["copy_blocks", "gather_kv", "merge_state", "paged_attention", "write_kv"]

Doubles = npt.NDArray[np.float64]


def gather_kv(
    pool: KVPool,
    block_table: npt.NDArray[Any],
    start: int,
    stop: int,
    segments: Segments = None,
    sequence: int = 0,
) -> tuple[Doubles, Doubles]:
    """Return the keys and values of tokens [start, stop) of one sequence.

    Both are float64 [num_kv_heads, stop - start, head_dim].
    """
    entries, offsets = entry_of(segments, sequence, np.arange(start, stop), pool.keys.shape[3])
    blocks = np.asarray(block_table)[entries]
    keys = from_storage(pool.keys[blocks, :, :, offsets]).astype(np.float64)
    values = from_storage(pool.values[blocks, :, offsets, :]).astype(np.float64)
    return keys.transpose(1, 0, 2), values.transpose(1, 0, 2)


def paged_attention(
    queries: Floats,
    pool: KVPool,
    batch: PagedBatch,
    options: AttentionOptions,
    turning: QueryRotation | None = None,
) -> tuple[Floats, Floats]:
    """Compute attention of a flat batch over its sequences' blocks, one query row at a time.

    Args:
        queries: float32 [num_tokens, num_q_heads, head_dim].
        pool: KV of one layer.
        batch: query rows and block tables of each sequence.
        options: softmax scale, window, softcap, sinks; causal unless `ahead` is set.
        turning: RoPE tables that rotate keys of segments with a delta.

    Returns:
        (out, lse): float32 like `queries`, float32 [num_tokens, num_q_heads].
    """
    out = np.empty(queries.shape, dtype=np.float32)
    lse = np.empty(queries.shape[:2], dtype=np.float32)
    for sequence, seq_len in enumerate(batch.seq_lens):
        first = int(batch.cu_seqlens_q[sequence])
        stop = int(batch.cu_seqlens_q[sequence + 1])
        for row in range(first, stop):
            position = int(seq_len) - (stop - row)
            low = max(0, position - options.window + 1) if options.window > 0 else 0
            stop_key = min(position + 1 + options.ahead, int(seq_len))
            keys, values = gather_kv(
                pool, batch.block_tables[sequence], low, stop_key, batch.segments, sequence
            )
            if turning is not None:
                keys = turn_keys(
                    keys, deltas_of(batch.segments, sequence, np.arange(low, stop_key)), turning
                )
            out[row], lse[row] = _attend_row(queries[row].astype(np.float64), keys, values, options)
    return out, lse


def _attend_row(
    query: Doubles, keys: Doubles, values: Doubles, options: AttentionOptions
) -> tuple[Doubles, Doubles]:
    """Attend with one query [num_q_heads, head_dim] to KV [num_kv_heads, tokens, head_dim]."""
    grouped = query.reshape(keys.shape[0], -1, query.shape[1])
    scores = np.einsum("hgd,htd->hgt", grouped, keys) * options.softmax_scale
    if options.softcap > 0:
        scores = options.softcap * np.tanh(scores / options.softcap)
    scores = scores.reshape(query.shape[0], -1)
    top = scores.max(axis=1)
    if options.sinks is not None:
        top = np.maximum(top, options.sinks)
    weights = np.exp(scores - top[:, None])
    total = weights.sum(axis=1)
    if options.sinks is not None:
        total = total + np.exp(options.sinks - top)
    weights = (weights / total[:, None]).reshape(*grouped.shape[:2], -1)
    return np.einsum("hgt,htd->hgd", weights, values).reshape(query.shape), top + np.log(total)


def write_kv(
    keys: Floats, values: Floats, pool: KVPool, slot_mapping: npt.NDArray[np.int64]
) -> None:
    """Store float32 [num_tokens, num_kv_heads, head_dim] at slots, block * block_size + offset."""
    blocks, offsets = np.divmod(slot_mapping, pool.keys.shape[3])
    pool.keys[blocks, :, :, offsets] = to_storage(keys, pool.keys.dtype)
    pool.values[blocks, :, offsets, :] = to_storage(values, pool.values.dtype)


def copy_blocks(pool: KVPool, ops: Iterable[tuple[int, int]]) -> None:
    """Copy whole blocks, (src, dst) pairs in order."""
    for src, dst in ops:
        pool.keys[dst] = pool.keys[src]
        pool.values[dst] = pool.values[src]


def merge_state(v_a: Floats, s_a: Floats, v_b: Floats, s_b: Floats) -> tuple[Floats, Floats]:
    """Merge attention results over two disjoint sets of keys; see storage.py."""
    s_a64 = s_a.astype(np.float64)
    s_b64 = s_b.astype(np.float64)
    top = np.maximum(s_a64, s_b64)
    base = np.where(np.isneginf(top), 0.0, top)
    weight_a = np.exp(s_a64 - base)
    weight_b = np.exp(s_b64 - base)
    total = weight_a + weight_b
    scale = np.where(total > 0, total, 1.0)
    mixed = np.where(weight_a[..., None] > 0, v_a, 0.0) * (weight_a / scale)[..., None]
    mixed = mixed + np.where(weight_b[..., None] > 0, v_b, 0.0) * (weight_b / scale)[..., None]
    with np.errstate(divide="ignore"):
        lse = base + np.log(total)
    return mixed.astype(np.float32), lse.astype(np.float32)
