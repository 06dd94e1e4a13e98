"""MiniCPM, which transformers lacks, against a float64 decoder written from its description."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from helpers.distance import distance
from helpers.gguf.writer import write_gguf
from helpers.models.tiny_checkpoints import save_tiny_checkpoint
from helpers.random_ids import random_ids
from helpers.runners.logits import native_logits
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.config.architectures import check_model_compatibility
from kvboost_edge.models.config.spec import describe_model

PROMPT = random_ids(61, 7)
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.2 * i for i in range(8)],
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 96,
}
VARIANTS = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "longrope": {"rope_scaling": LONGROPE},
}


def _norm(x, weight, eps):
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps) * weight


def _turned(x, config):
    """Apply RoPE to [tokens, heads, dim] in pairs (i, i + dim / 2)."""
    half = x.shape[-1] // 2
    frequencies = config["rope_theta"] ** (-np.arange(half) / half)
    factor = 1.0
    rope = config.get("rope_scaling")
    if rope:
        frequencies = frequencies / np.array(rope["short_factor"])
        old = rope["original_max_position_embeddings"]
        factor = np.sqrt(1 + np.log(config["max_position_embeddings"] / old) / np.log(old))
    angles = np.arange(len(x))[:, None, None] * frequencies
    cos = np.cos(angles) * factor
    sin = np.sin(angles) * factor
    first = x[..., :half]
    second = x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def _attended(x, layer, config):
    heads = config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
    count = len(x)
    q, k, v = (
        (x @ layer[f"self_attn.{name}_proj"].T).reshape(count, number, -1)
        for name, number in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    q = _turned(q, config)
    k = _turned(k, config)
    k, v = (np.repeat(part, heads // kv_heads, axis=1) for part in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
    scores[:, np.triu(np.ones((count, count), dtype=bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v).reshape(count, -1) @ layer["self_attn.o_proj"].T


def _oracle(model_dir):
    """Return the logits [tokens, vocabulary] of PROMPT.

    MiniCPM multiplies the embeddings by scale_emb and the output of each half of a layer by
    scale_depth / sqrt(layers), and divides the last hidden state by hidden_size / dim_model_base
    before the head.
    """
    config = json.loads((model_dir / "config.json").read_text())
    tensors = {
        n: t.astype(np.float64) for n, t in load_file(model_dir / "model.safetensors").items()
    }
    eps = config["rms_norm_eps"]
    layers = config["num_hidden_layers"]
    hidden = tensors["model.embed_tokens.weight"][PROMPT] * config["scale_emb"]
    step = config["scale_depth"] / np.sqrt(layers)
    for index in range(layers):
        prefix = f"model.layers.{index}."
        layer = {
            n.removeprefix(prefix).removesuffix(".weight"): t
            for n, t in tensors.items()
            if n.startswith(prefix)
        }
        hidden = hidden + step * _attended(
            _norm(hidden, layer["input_layernorm"], eps), layer, config
        )
        x = _norm(hidden, layer["post_attention_layernorm"], eps)
        gate = x @ layer["mlp.gate_proj"].T
        inner = gate / (1 + np.exp(-gate)) * (x @ layer["mlp.up_proj"].T)
        hidden = hidden + step * (inner @ layer["mlp.down_proj"].T)
    last = _norm(hidden, tensors["model.norm.weight"], eps) / (
        config["hidden_size"] / config["dim_model_base"]
    )
    head = tensors[
        "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    ]
    return last @ head.T


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_the_numpy_reference(name, tmp_path):
    path = save_tiny_checkpoint("minicpm", tmp_path, **VARIANTS[name])
    exact = _oracle(path)
    for weights, limit in (("f32", 1e-4), ("int8", 5e-2)):
        assert distance(native_logits(path, weights, PROMPT), exact) <= limit


@pytest.mark.parametrize("name", VARIANTS)
def test_a_gguf_file_equals_safetensors(name, tmp_path):
    whole = {
        "rope_scaling": {**LONGROPE, "original_max_position_embeddings": 512}
    }  # one range, as in MiniCPM 4
    path = save_tiny_checkpoint(
        "minicpm", tmp_path, **(whole if name == "longrope" else VARIANTS[name])
    )
    gguf = write_gguf(path, tmp_path / "m.gguf")
    ours, theirs = (describe_model(Checkpoint.open(each).config) for each in (gguf, path))
    for field in (
        "embedding_factor",
        "residual_factor",
        "logit_factor",
        "softmax_scale",
        "tied",
        "max_context",
    ):
        assert getattr(ours, field) == pytest.approx(getattr(theirs, field), rel=1e-7), field
    np.testing.assert_allclose(ours.ropes[0].frequencies, theirs.ropes[0].frequencies, rtol=2e-7)
    assert ours.ropes[0].factor == pytest.approx(theirs.ropes[0].factor, rel=1e-7)
    found, expected = (native_logits(each, "f32", PROMPT) for each in (gguf, path))
    assert distance(found, expected) <= 1e-5


def test_rope_range_long_enables_the_longest_context(tmp_path):
    path = save_tiny_checkpoint("minicpm", tmp_path, rope_scaling=LONGROPE)
    assert describe_model(Checkpoint.open(path).config).max_context == 96
    assert describe_model(Checkpoint.open(path, rope_range="long").config).max_context == 512


def test_remote_code_is_not_needed_and_variants_are_refused(tmp_path):
    path = save_tiny_checkpoint(
        "minicpm", tmp_path, auto_map={"AutoModelForCausalLM": "modeling_minicpm.MiniCPM"}
    )
    config = dict(Checkpoint.open(path).config)
    assert check_model_compatibility(config).supported
    for change, message in (
        ({"num_experts": 8}, "num_experts=8"),
        ({"sparse_config": {"dense_len": 8192}}, "sparse_config="),
        ({"scale_depth": 0.0}, "scale_depth=0.0"),
        ({"model_type": "minicpm3"}, "minicpm3"),
    ):
        with pytest.raises(ModelFormatError, match=message):
            describe_model({**config, **change})
