"""Tiny LFM2 and Qwen3.5 in float64 NumPy, on exactly the weights that a format represents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from kvboost_edge.kernels.linear.weights import pack_rows
from kvboost_edge.kernels.reference.conv import conv_rows, silu_rows
from kvboost_edge.kernels.reference.scan import delta_rows, delta_steps
from kvboost_edge.kernels.reference.weights import unpack_rows

Doubles = npt.NDArray[np.float64]
_FLOATS = ("in_proj_a.weight", "in_proj_b.weight")  # gates, which are floats in all formats


class ExactHybrid:
    """A text model with dense layers, saved by transformers. `weights` is a format of the native
    runner.
    """

    def __init__(self, directory: Path, weights: str) -> None:
        self.config: dict[str, Any] = json.loads(
            (directory / "config.json").read_text(encoding="utf-8")
        )
        self.is_delta = self.config["model_type"] == "qwen3_5_text"
        self.eps = self.config["norm_eps" if "norm_eps" in self.config else "rms_norm_eps"]
        tensors = load_file(directory / "model.safetensors")
        self.tensors = {name: self._stored(name, value, weights) for name, value in tensors.items()}

    def _stored(self, name: str, value: npt.NDArray[np.float32], weights: str) -> Doubles:
        if value.ndim == 2 and not name.endswith(_FLOATS):
            outer = name.startswith(("model.embed", "lm_head"))
            kind = "int8" if outer and weights.startswith("int4") else weights
            value = unpack_rows(pack_rows(value, kind), *value.shape, kind)
        return value.astype(np.float64)

    def logits(self, ids: list[int]) -> Doubles:
        """Return logits, float64 [len(ids), vocabulary]."""
        x = self.tensors["model.embed_tokens.weight"][ids]
        in_norm = "input_layernorm"
        mlp_norm = "post_attention_layernorm"
        last = "model.norm"
        if not self.is_delta:
            in_norm = "operator_norm"
            mlp_norm = "ffn_norm"
            last = "model.embedding_norm"
        for index, kind in enumerate(self.config["layer_types"]):
            layer = f"model.layers.{index}."
            mix = {
                "conv": self._conv,
                "linear_attention": self._delta,
                "full_attention": self._attention,
            }[kind]
            x = x + mix(self._norm(x, layer + in_norm), layer)
            x = x + self._mlp(self._norm(x, layer + mlp_norm), layer)
        head = "lm_head" if "lm_head.weight" in self.tensors else "model.embed_tokens"
        return self._linear(self._norm(x, last), head)

    def _norm(self, x: Doubles, name: str, *, offset: float | None = None) -> Doubles:
        offset = float(self.is_delta) if offset is None else offset
        scale: Doubles = np.sqrt((x * x).mean(-1, keepdims=True) + self.eps)
        return x / scale * (self.tensors[f"{name}.weight"] + offset)

    def _linear(self, x: Doubles, name: str) -> Doubles:
        rows: Doubles = x @ self.tensors[f"{name}.weight"].T
        return rows

    def _mlp(self, x: Doubles, layer: str) -> Doubles:
        names = ("feed_forward.w1", "feed_forward.w3", "feed_forward.w2")
        if self.is_delta:
            names = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
        gate, up = (self._linear(x, layer + name) for name in names[:2])
        return self._linear(silu_rows(gate) * up, layer + names[2])

    def _taps(self, name: str) -> Doubles:
        """Return the weights of a convolution, [taps, channels], oldest first."""
        return self.tensors[f"{name}.weight"][:, 0].T

    def _conv(self, x: Doubles, layer: str) -> Doubles:
        b, c, inputs = np.split(self._linear(x, f"{layer}conv.in_proj"), 3, axis=1)
        taps = self._taps(f"{layer}conv.conv")
        sums, _ = conv_rows(b * inputs, np.zeros((len(taps) - 1, taps.shape[1])), taps)
        return self._linear(c * sums, f"{layer}conv.out_proj")

    def _delta(self, x: Doubles, layer: str) -> Doubles:
        layer = f"{layer}linear_attn."
        config = self.config
        count = len(x)
        heads = config["linear_num_key_heads"]
        dim = config["linear_key_head_dim"]
        of_values = (count, config["linear_num_value_heads"], config["linear_value_head_dim"])
        taps = self._taps(f"{layer}conv1d")
        sums, _ = conv_rows(
            self._linear(x, f"{layer}in_proj_qkv"), np.zeros((len(taps) - 1, taps.shape[1])), taps
        )
        mixed = silu_rows(sums)
        q, k = mixed[:, : 2 * heads * dim].reshape(count, 2, heads, dim).swapaxes(0, 1)
        gates = self._linear(x, f"{layer}in_proj_b"), self._linear(x, f"{layer}in_proj_a")
        steps = delta_steps(
            q, k, gates, -np.exp(self.tensors[f"{layer}A_log"]), self.tensors[f"{layer}dt_bias"]
        )
        state = np.zeros((of_values[1], dim, of_values[2]))
        out, _ = delta_rows(steps, mixed[:, 2 * heads * dim :].reshape(of_values), state)
        z = self._linear(x, f"{layer}in_proj_z").reshape(of_values)
        gated = self._norm(out, f"{layer}norm", offset=0.0) * silu_rows(z)
        return self._linear(gated.reshape(count, -1), f"{layer}out_proj")

    def _attention(self, x: Doubles, layer: str) -> Doubles:
        layer = f"{layer}self_attn."
        config = self.config
        count = len(x)
        heads = config["num_attention_heads"]
        dim = config.get("head_dim") or config["hidden_size"] // heads
        queries = self._linear(x, f"{layer}q_proj").reshape(count, heads, -1)
        gates = None
        if self.is_delta:
            queries, gates = queries[..., :dim], queries[..., dim:]
        keys, values = (
            self._linear(x, f"{layer}{name}_proj").reshape(count, -1, dim) for name in "kv"
        )
        norms = ("q_norm", "k_norm") if self.is_delta else ("q_layernorm", "k_layernorm")
        q, k = (
            self._turned(self._norm(r, layer + name))
            for r, name in zip((queries, keys), norms, strict=True)
        )
        q, k, v = (each.transpose(1, 0, 2) for each in (q, k, values))
        k, v = (each.repeat(heads // len(k), axis=0) for each in (k, v))
        scores = np.where(
            np.tri(count, dtype=bool), q @ k.transpose(0, 2, 1) / np.sqrt(dim), -np.inf
        )
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out = (weights / weights.sum(-1, keepdims=True) @ v).transpose(1, 0, 2)
        if gates is not None:
            out = out / (1 + np.exp(-gates))
        return self._linear(
            out.reshape(count, -1), f"{layer}{'o_proj' if self.is_delta else 'out_proj'}"
        )

    def _turned(self, x: Doubles) -> Doubles:
        """Apply RoPE to rows [tokens, heads, dim]."""
        rope = self.config["rope_parameters"]
        width = int(x.shape[-1] * rope.get("partial_rotary_factor", 1.0))
        angles = np.arange(len(x))[:, None, None] * rope["rope_theta"] ** (
            -np.arange(0, width, 2) / width
        )
        low = x[..., : width // 2]
        high = x[..., width // 2 : width]
        rest = x[..., width:]
        cos = np.cos(angles)
        sin = np.sin(angles)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin, rest], -1)
