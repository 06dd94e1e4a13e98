"""A tiny model end to end against float64 arithmetic in NumPy, on exactly the weights that the
format represents.

The tests need no torch, so they also check emulated ARM processors.
"""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from helpers.distance import distance
from helpers.models.tiny_checkpoints import save_tiny_checkpoint
from kvboost_edge import CPUPagedEngine
from kvboost_edge.kernels.linear.weights import pack_rows
from kvboost_edge.kernels.reference.weights import unpack_rows

FAMILIES = ("llama", "qwen2", "qwen3")
PROMPT = "the quick brown fox jumps over the lazy dog and then it sleeps"
NEW = 12
# (weights, kv_cache_bits) -> relative L2 error of the logits. Quantized formats have 8-bit
# activations, and the models are made sensitive.
LIMITS = {
    ("f32", 16): 1e-5,
    ("bf16", 16): 2e-3,
    ("int8", 16): 2e-2,
    ("int4", 16): 2e-2,
    ("int4-asym", 16): 2e-2,
    ("int8", 8): 3e-2,
}


class Exact:
    """The model in float64, with its matrices as `weights` stores them."""

    def __init__(self, directory, weights):
        self.config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        self.tensors = {
            name: self._stored(name, value, weights)
            for name, value in load_file(directory / "model.safetensors").items()
        }

    @staticmethod
    def _stored(name, value, weights):
        if value.ndim == 2:
            outer = name.startswith(("model.embed", "lm_head"))
            kind = "int8" if outer and weights.startswith("int4") else weights
            value = unpack_rows(pack_rows(value, kind), *value.shape, kind)
        return value.astype(np.float64)

    def norm(self, x, name):
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"])
        return x / scale * self.tensors[f"{name}.weight"]

    def linear(self, x, name):
        return x @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", 0.0)

    def heads(self, x, layer, name):
        """Return [heads, tokens, dim] of queries, keys or values; queries and keys are rotated."""
        dim = (
            self.config.get("head_dim")
            or self.config["hidden_size"] // self.config["num_attention_heads"]
        )
        rows = self.linear(x, f"{layer}self_attn.{name}_proj").reshape(len(x), -1, dim)
        if f"{layer}self_attn.{name}_norm.weight" in self.tensors:
            rows = self.norm(rows, f"{layer}self_attn.{name}_norm")
        if name != "v":
            angles = np.arange(len(x))[:, None, None] * self.config["rope_theta"] ** (
                -np.arange(0, dim, 2) / dim
            )
            low = rows[..., : dim // 2]
            high = rows[..., dim // 2 :]
            cos = np.cos(angles)
            sin = np.sin(angles)
            rows = np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)
        return rows.transpose(1, 0, 2)

    def logits(self, ids):
        x = self.tensors["model.embed_tokens.weight"][ids]
        for index in range(self.config["num_hidden_layers"]):
            layer = f"model.layers.{index}."
            normed = self.norm(x, f"{layer}input_layernorm")
            q, k, v = (self.heads(normed, layer, name) for name in "qkv")
            k, v = (each.repeat(len(q) // len(k), axis=0) for each in (k, v))
            scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
            scores = np.where(np.tri(len(ids), dtype=bool), scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            attended = (weights / weights.sum(-1, keepdims=True)) @ v
            x = x + self.linear(
                attended.transpose(1, 0, 2).reshape(len(ids), -1), f"{layer}self_attn.o_proj"
            )
            normed = self.norm(x, f"{layer}post_attention_layernorm")
            gate = self.linear(normed, f"{layer}mlp.gate_proj")
            x = x + self.linear(
                gate / (1 + np.exp(-gate)) * self.linear(normed, f"{layer}mlp.up_proj"),
                f"{layer}mlp.down_proj",
            )
        return self.linear(self.norm(x, "model.norm"), "lm_head")


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request, tmp_path_factory):
    return save_tiny_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize(("weights", "bits"), LIMITS, ids=str)
@pytest.mark.some(3)
def test_logits_and_greedy_tokens_equal_numpy(directory, weights, bits):
    options = {"runner": "native", "backend": "cpu", "num_blocks": 32, "num_threads": 2}
    with CPUPagedEngine.from_pretrained(
        str(directory), weights=weights, kv_cache_bits=bits, **options
    ) as engine:
        exact = Exact(directory, weights)
        ids = engine.tokenizer.encode(PROMPT)
        logits = engine.logits(ids)
        assert distance(logits, exact.logits(ids)) <= LIMITS[weights, bits]
        result = engine.generate(PROMPT, max_new_tokens=NEW, temperature=0.0, ignore_eos=True)
        output = list(result.output_token_ids)
        assert len(output) == NEW
        rows = exact.logits([*ids, *output])[len(ids) - 1 : -1]
        # Greedy: no token of the exact model is better by more than rounding can change the
        # difference of two logits.
        slack = 0.0 if weights == "f32" else 2 * LIMITS[weights, bits] * float(np.abs(rows).max())
        assert (rows.max(-1) - rows[np.arange(NEW), output] <= slack).all()
        report = engine.verify_correctness([PROMPT], max_new_tokens=8)
        assert [check.problem for check in report.checks] == [None]
        assert report.checks[0].max_logit_difference == 0.0
