"""gpt-oss in float64, written from its formulas, on exactly the weights that a packed format
represents.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvboost_edge.kernels.linear.weights import pack_rows
from kvboost_edge.kernels.reference.experts import (
    ExpertWeights,
    Routing,
    expert_rows,
    mixed_rows,
    route_rows,
)
from kvboost_edge.kernels.reference.weights import unpack_rows
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.config.spec import describe_model
from kvboost_edge.models.weights.weight_source import WeightSource

Floats = npt.NDArray[np.float64]


class GptOssOracle:
    """Float64 model of a gpt-oss directory. `weights` is a format of the native runner, or "auto"
    for a directory with MXFP4.
    """

    def __init__(self, directory: Path, weights: str) -> None:
        checkpoint = Checkpoint.open(directory)
        self.spec = describe_model(checkpoint.config)
        with checkpoint.open_source() as source:
            self.tensors = {name: _stored(source, name, weights) for name in source.names()}

    def logits(self, ids: list[int]) -> Floats:
        """Return logits, float64 [tokens, vocabulary]."""
        x = self.tensors["model.embed_tokens.weight"][ids]
        for index in range(len(self.spec.layers)):
            x = x + self._attended(self._norm(x, f"model.layers.{index}.input_layernorm"), index)
            x = self._mixed(x, index)
        return self._norm(x, "model.norm") @ self.tensors["lm_head.weight"].T

    def _norm(self, x: Floats, name: str) -> Floats:
        return (
            x
            / np.sqrt((x * x).mean(-1, keepdims=True) + self.spec.eps)
            * self.tensors[f"{name}.weight"]
        )

    def _linear(self, x: Floats, name: str) -> Floats:
        return x @ self.tensors[f"{name}.weight"].T + self.tensors[f"{name}.bias"]

    def _attended(self, x: Floats, index: int) -> Floats:
        spec = self.spec
        own = self.spec.layers[index]
        name = f"model.layers.{index}.self_attn."
        q, k, v = (
            self._linear(x, f"{name}{one}_proj")
            .reshape(len(x), -1, own.head_dim)
            .transpose(1, 0, 2)
            for one in "qkv"
        )
        q = self._turned(q)
        k = self._turned(k)
        k, v = (each.repeat(len(q) // len(k), axis=0) for each in (k, v))
        back = np.arange(len(x))[:, None] - np.arange(len(x))
        seen = (back >= 0) & (back < (own.window or len(x)))
        scores = np.where(seen, q @ k.transpose(0, 2, 1) * own.head_dim**-0.5, -np.inf)
        sinks = np.broadcast_to(self.tensors[f"{name}sinks"][:, None, None], (*scores.shape[:2], 1))
        both = np.concatenate([scores, sinks], axis=2)
        powers = np.exp(both - both.max(-1, keepdims=True))
        attended = (powers / powers.sum(-1, keepdims=True))[:, :, :-1] @ v
        return self._linear(
            attended.transpose(1, 0, 2).reshape(len(x), spec.num_heads * own.head_dim),
            f"{name}o_proj",
        )

    def _turned(self, rows: Floats) -> Floats:
        rope = self.spec.ropes[0]
        angles = np.arange(rows.shape[1])[:, None] * np.array(rope.frequencies)
        cos = np.cos(angles) * rope.factor
        sin = np.sin(angles) * rope.factor
        low, high = np.split(rows, 2, axis=2)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=2)

    def _mixed(self, x: Floats, index: int) -> Floats:
        experts = self.spec.experts
        name = f"model.layers.{index}."
        assert experts is not None
        normed = self._norm(x, f"{name}post_attention_layernorm")
        chosen, shares = route_rows(
            self._linear(normed, f"{name}mlp.router"), Routing(experts.used, "chosen")
        )

        def mlp(expert: int, rows: Floats) -> Floats:
            gate, up, down = (
                f"{name}mlp.experts.{expert}.{part}_proj." for part in ("gate", "up", "down")
            )
            both = [
                np.concatenate([self.tensors[f"{one}{what}"] for one in (gate, up)])
                for what in ("weight", "bias")
            ]
            own = ExpertWeights(
                both[0], self.tensors[f"{down}weight"], both[1], self.tensors[f"{down}bias"]
            )
            found: Floats = expert_rows(rows, own, _limited_swiglu)
            return found

        mixed: Floats = mixed_rows(normed, x, chosen, shares, mlp, experts.count)
        return mixed


def _limited_swiglu(gate: Floats, up: Floats) -> Floats:
    gate = np.minimum(gate, 7.0)
    up = np.clip(up, -7.0, 7.0)
    return (up + 1.0) * gate / (1.0 + np.exp(-1.702 * gate))


def _stored(source: WeightSource, name: str, weights: str) -> Floats:
    values = source.rows(name)
    if values.ndim == 1 or name.endswith("router.weight") or weights == "f32":
        return values.astype(np.float64)
    if weights == "auto" and source.kind(name) is not None:
        return values.astype(np.float64)
    kind = "int8" if weights == "auto" or name.startswith(("model.embed", "lm_head")) else weights
    return unpack_rows(pack_rows(values, kind), *values.shape, kind).astype(np.float64)
