"""Reference logits of the random model: float64 NumPy with the same quantized weights.

The weights are read by the engine's reader, because the `gguf` package does not know all types.
The tests compare the two.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvboost_edge.models.gguf.blocks import dequantize
from kvboost_edge.models.gguf.file import read_gguf

__all__ = ["last_logits"]

Doubles = npt.NDArray[np.float64]
_EPS = 1e-6
_THETA = 1e6


def last_logits(path: Path, token_ids: list[int], heads: int, kv_heads: int) -> Doubles:
    """Return the logits of the last token, float64 [vocab]."""
    tensors = read_gguf(path).tensors

    def read(name: str) -> Doubles:
        tensor = tensors[name]
        count = tensor.stop - tensor.start
        data = np.fromfile(path, np.uint8, count, offset=tensor.start)
        values = dequantize(tensor.type, data.reshape(1, -1))
        return values.astype(np.float64).reshape(tensor.shape)

    table = read("token_embd.weight")
    hidden = table[token_ids]
    num_layers = sum(name.endswith(".attn_norm.weight") for name in tensors)
    for index in range(num_layers):
        at = f"blk.{index}."
        x = _norm(hidden, read(f"{at}attn_norm.weight"))
        q, k, v = (x @ read(f"{at}attn_{n}.weight").T for n in "qkv")
        if f"{at}attn_q_norm.weight" in tensors:  # Qwen3
            q, k = (
                _norm_heads(rows, read(f"{at}attn_{n}_norm.weight"))
                for n, rows in (("q", q), ("k", k))
            )
        else:  # Qwen2
            q, k, v = (
                rows + read(f"{at}attn_{n}.bias") for n, rows in (("q", q), ("k", k), ("v", v))
            )
        hidden = hidden + _attend(q, k, v, heads, kv_heads) @ read(f"{at}attn_output.weight").T
        x = _norm(hidden, read(f"{at}ffn_norm.weight"))
        gate = x @ read(f"{at}ffn_gate.weight").T
        up = x @ read(f"{at}ffn_up.weight").T
        hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ read(f"{at}ffn_down.weight").T
    return np.asarray(table @ _norm(hidden[-1:], read("output_norm.weight"))[0])


def _norm(x: Doubles, weight: Doubles) -> Doubles:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + _EPS) * weight)


def _norm_heads(x: Doubles, weight: Doubles) -> Doubles:
    return _norm(x.reshape(len(x), -1, len(weight)), weight).reshape(x.shape)


def _attend(q: Doubles, k: Doubles, v: Doubles, heads: int, kv_heads: int) -> Doubles:
    num_tokens = len(q)
    dim = q.shape[1] // heads
    queries = _rotate(q.reshape(num_tokens, heads, dim))
    keys = np.repeat(_rotate(k.reshape(num_tokens, kv_heads, dim)), heads // kv_heads, axis=1)
    values = np.repeat(v.reshape(num_tokens, kv_heads, dim), heads // kv_heads, axis=1)
    scores = np.einsum("qhd,khd->hqk", queries, keys) / np.sqrt(dim)
    scores[:, np.triu(np.ones((num_tokens, num_tokens), bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, values).reshape(num_tokens, heads * dim)


def _rotate(x: Doubles) -> Doubles:
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] * _THETA ** (-np.arange(half) / half)
    cos = np.cos(angles)[:, None]
    sin = np.sin(angles)[:, None]
    first = x[..., :half]
    second = x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
