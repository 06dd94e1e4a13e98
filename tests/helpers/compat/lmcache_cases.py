"""Helpers for the tests of LMCache's engine: KV whose values identify their origin, and engines
over every backend.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from helpers.tiers.redis_cases import SECRET
from kvboost_edge.compat.lmcache import LMCacheEngine, LMCacheEngineConfig, LMCacheEngineMetadata

LAYERS = 2
HEADS = 3
HEAD_SIZE = 4
BACKENDS = ("memory", "disk", "memory over disk", "redis")


def make_engine(
    backend: Any = "memory", chunk_size: int = 4, fmt: str = "vllm", **more: Any
) -> LMCacheEngine:
    """Make an engine over a backend, given as LMCacheEngineConfig takes it."""
    names = {
        name: more.pop(name) for name in ("model_name", "world_size", "worker_id") if name in more
    }
    metadata = LMCacheEngineMetadata(
        **{"model_name": "model", "world_size": 1, "worker_id": 0, "fmt": fmt, **names}
    )
    return LMCacheEngine(
        LMCacheEngineConfig(chunk_size, backend=backend, redis_secret=SECRET, **more), metadata
    )


def kv_of(
    tokens: Any, fmt: str = "vllm", dtype: Any = np.float32, salt: float = 0.0
) -> tuple[Any, ...]:
    """Return (k, v) of each layer. Every element is unique: it encodes token, position, layer, head
    and channel.
    """
    ids = np.asarray(tokens, np.float64)
    count = len(ids)
    rows = (ids * 100 + np.arange(count))[:, None, None] + salt
    cells = np.arange(HEADS * HEAD_SIZE).reshape(1, HEADS, HEAD_SIZE) / 16
    layers = []
    for layer in range(LAYERS):
        k, v = ((rows + cells + 1000 * layer + 500 * part).astype(dtype) for part in (0, 1))
        layers.append((k, v) if fmt == "vllm" else (k.transpose(1, 0, 2), v.transpose(1, 0, 2)))
    return tuple(layers)


def kv_slice(kv: Any, start: int, end: int, fmt: str = "vllm") -> tuple[Any, ...]:
    """Return the tokens [start, end) of the KV that `kv_of` made."""
    return tuple(
        tuple(a[start:end] if fmt == "vllm" else a[:, start:end] for a in pair) for pair in kv
    )


def num_tokens_of(kv: Any, fmt: str = "vllm") -> int:
    """Count the tokens in KV of either format; () holds none."""
    return kv[0][0].shape[0 if fmt == "vllm" else 1] if kv else 0


def equal(one: Any, other: Any) -> bool:
    """Return whether both have the same layers, types, shapes and bits."""
    flat = [[np.asarray(a) for pair in kv for a in pair] for kv in (one, other)]
    return len(flat[0]) == len(flat[1]) and all(
        a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        for a, b in zip(*flat, strict=True)
    )
