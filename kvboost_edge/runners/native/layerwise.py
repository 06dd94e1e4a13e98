"""Attention layer by layer, for backends whose kernels a program cannot call."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.backends.base import AttentionParams, Backend
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.models.config.spec import ModelSpec
from kvboost_edge.runners.native.buffers import ProgramBuffers
from kvboost_edge.runners.native.pass_texts import PassTexts

__all__ = ["attend_layer"]

Floats = npt.NDArray[np.float32]


def attend_layer(
    backend: Backend | PassTexts,
    spec: ModelSpec,
    layer: int,
    buffers: ProgramBuffers,
    num_tokens: int,
    prepared: Any,
    params: AttentionParams,
) -> Floats:
    """Store a layer's KV, unless it shares another layer's, and compute its attention.

    Returns:
        The attention output, float32 [num_tokens, padded size].
    """
    own = spec.layers[layer]
    query = buffers.rows(lt.B_QUERY, num_tokens, spec.num_heads, own.head_dim)
    if own.owns_kv:
        both = (lt.B_KEY, lt.B_VALUE)
        key, value = (buffers.rows(b, num_tokens, own.num_kv_heads, own.head_dim) for b in both)
        backend.write_kv(own.kv, key, value, prepared)
    out, _ = backend.attention(own.kv, query, prepared, params)
    rows: Floats = np.ascontiguousarray(out, dtype=np.float32).reshape(len(query), -1)
    width = buffers.sizes.attended[layer]
    if rows.shape[1] == width:
        return rows
    padded = np.zeros((len(query), width), dtype=np.float32)
    padded[:, : rows.shape[1]] = rows
    return padded
