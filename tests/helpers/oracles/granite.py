"""Tiny Granite 4 with dense layers in float64 NumPy, on exactly the weights that a format
represents.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from helpers.oracles.hybrid import ExactHybrid
from kvboost_edge.kernels.reference.conv import conv_rows, silu_rows
from kvboost_edge.kernels.reference.gate import gated_rows
from kvboost_edge.kernels.reference.ssd import ssd_rows, ssd_steps

Doubles = npt.NDArray[np.float64]
_NO_LIMIT = (0.0, np.inf)


class ExactGranite(ExactHybrid):
    """A Granite 4 model with its multipliers, and with RoPE only if its config requests it."""

    def logits(self, ids: list[int]) -> Doubles:
        """Return logits, float64 [len(ids), vocabulary]."""
        config = self.config
        residual = self.config["residual_multiplier"]
        x = self.tensors["model.embed_tokens.weight"][ids] * config["embedding_multiplier"]
        for index, kind in enumerate(config["layer_types"]):
            layer = f"model.layers.{index}."
            mix = {"linear_attention": self._space, "full_attention": self._attention}[kind]
            x = x + residual * mix(self._norm(x, f"{layer}input_layernorm"), layer)
            x = x + residual * self._mlp(self._norm(x, f"{layer}post_attention_layernorm"), layer)
        head = "lm_head" if "lm_head.weight" in self.tensors else "model.embed_tokens"
        return self._linear(self._norm(x, "model.norm"), head) / config["logits_scaling"]

    def _stored(self, name: str, value: npt.NDArray[np.float32], weights: str) -> Doubles:
        """Return a tensor as the format represents it. The time steps, the last rows of a state
        space's input projection, are floats in all formats.
        """
        if not name.endswith("mamba.in_proj.weight"):
            return super()._stored(name, value, weights)
        heads = self.config["mamba_n_heads"]
        return np.concatenate(
            [super()._stored(name, value[:-heads], weights), value[-heads:].astype(np.float64)]
        )

    def _mlp(self, x: Doubles, layer: str) -> Doubles:
        gate, up = np.split(self._linear(x, f"{layer}shared_mlp.input_linear"), 2, axis=1)
        return self._linear(silu_rows(gate) * up, f"{layer}shared_mlp.output_linear")

    def _space(self, x: Doubles, layer: str) -> Doubles:
        layer = f"{layer}mamba."
        config = self.config
        count = len(x)
        heads, dim, groups = (config[f"mamba_{name}"] for name in ("n_heads", "d_head", "n_groups"))
        width = heads * dim
        state = config["mamba_d_state"]
        rows = self._linear(x, f"{layer}in_proj")
        z, mixed, steps = np.split(rows, [width, 2 * width + 2 * groups * state], axis=1)
        taps = self._taps(f"{layer}conv1d")
        sums, _ = conv_rows(mixed, np.zeros((len(taps) - 1, taps.shape[1])), taps)
        bias = self.tensors.get(f"{layer}conv1d.bias", np.zeros(taps.shape[1]))
        values, keys, queries = np.split(
            silu_rows(sums + bias), [width, width + groups * state], axis=1
        )
        keys, queries = (part.reshape(count, groups, state) for part in (keys, queries))
        decay, dt_bias, skip = (
            self.tensors[f"{layer}{name}"] for name in ("A_log", "dt_bias", "D")
        )
        done = ssd_steps(queries, keys, steps, -np.exp(decay), dt_bias, _NO_LIMIT)
        out, _ = ssd_rows(
            done, values.reshape(count, heads, dim), skip, np.zeros((heads, state, dim))
        )
        weight = self.tensors[f"{layer}norm.weight"]
        gated = gated_rows(out.reshape(count, width), z, weight, groups, self.eps, gate_first=True)
        return self._linear(gated.astype(np.float64), f"{layer}out_proj")

    def _attention(self, x: Doubles, layer: str) -> Doubles:
        layer = f"{layer}self_attn."
        config = self.config
        count = len(x)
        parts = (self._linear(x, f"{layer}{name}_proj") for name in "qkv")
        dim = config["hidden_size"] // config["num_attention_heads"]
        q, k, v = (part.reshape(count, -1, dim).transpose(1, 0, 2) for part in parts)
        if config["position_embedding_type"] == "rope":
            q, k = (self._turned(part.transpose(1, 0, 2)).transpose(1, 0, 2) for part in (q, k))
        k, v = (each.repeat(len(q) // len(k), axis=0) for each in (k, v))
        scores = q @ k.transpose(0, 2, 1) * config["attention_multiplier"]
        scores = np.where(np.tri(count, dtype=bool), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        out = (shares / shares.sum(-1, keepdims=True) @ v).transpose(1, 0, 2)
        return self._linear(out.reshape(count, -1), f"{layer}o_proj")
