"""Tests of the benchmarks' random models: files as their original authors write them, with weights
of the wanted spread.
"""

import functools

import gguf
import numpy as np
import pytest

from benchmarks.data.hybrid_shapes import HYBRID_SHAPES
from benchmarks.data.k_blocks import (
    FEW_BITS,
    NARROW,
    more_bits,
    random_few_bits,
    random_mxfp4,
    random_narrow,
    random_nvfp4,
    random_q4_0,
    random_q4_k,
    random_q6_k,
    random_q8_0,
)
from benchmarks.data.mixture_shapes import MIXTURE_SHAPES
from benchmarks.data.random_model import write_gguf
from benchmarks.data.shapes import SHAPES, Shape
from benchmarks.quality.float64_qwen import last_logits
from helpers.gguf.types import TYPES, dequantized
from helpers.gguf.writer import gguf_tensors
from helpers.models.tiny_models import save_tiny_model
from kvboost_edge import CPUPagedEngine
from kvboost_edge.models.gguf.file import read_gguf

QWEN2 = Shape(256, 8, 4, 2, 512, vocab=1024, context=4096)
QWEN3 = Shape(256, 8, 4, 2, 512, vocab=1024, context=4096, own_head_dim=128)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (random_q4_k, gguf.GGMLQuantizationType.Q4_K),
        (random_q6_k, gguf.GGMLQuantizationType.Q6_K),
        (random_q4_0, gguf.GGMLQuantizationType.Q4_0),
        (random_q8_0, gguf.GGMLQuantizationType.Q8_0),
        (random_mxfp4, gguf.GGMLQuantizationType.MXFP4),
        (random_nvfp4, gguf.GGMLQuantizationType.NVFP4),
        *(
            (functools.partial(random_few_bits, kind=kind), gguf.GGMLQuantizationType[kind])
            for kind in FEW_BITS
        ),
    ],
)
def test_random_blocks_have_the_wanted_spread(make, kind):
    values = gguf.quants.dequantize(make(np.random.default_rng(0), 64, 512, 0.05), kind)
    assert values.shape == (64, 512)
    assert values.std() == pytest.approx(0.05, rel=0.05)
    assert abs(values.mean()) < 0.005


@pytest.mark.parametrize("kind", NARROW)
def test_ternary_blocks_have_three_weights_of_the_wanted_spread(kind):
    number, _, weights, nbytes, _ = NARROW[kind]
    assert TYPES[kind] == (number, weights, nbytes)
    values = dequantized(kind, random_narrow(np.random.default_rng(0), 64, 512, 0.05, kind))
    assert values.shape == (64, 512)
    assert values.std() == pytest.approx(0.05, rel=0.05)
    assert abs(values.mean()) < 0.005
    assert len(np.unique(values)) == (2 if kind == "Q1_0" else 3)


@pytest.mark.parametrize("kind", [*NARROW, *FEW_BITS, "NVFP4"])
def test_files_of_models_with_few_bits_are_read(tmp_path, kind):
    path = tmp_path / "model.gguf"
    write_gguf(path, QWEN3, kind)
    kinds = {name: tensor.type for name, tensor in read_gguf(path).tensors.items()}
    assert kinds["blk.0.ffn_up.weight"] == kind
    ends = kind if kind in ("Q1_0", "Q2_0") else "Q6_K"
    assert kinds["token_embd.weight"] == ends


def test_a_mixture_has_q6_k_where_it_pays(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, QWEN3, "Q4_K_M")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert kinds["token_embd.weight"] == "Q6_K"
    for layer in range(QWEN3.layers):
        expected = "Q6_K" if more_bits(layer, QWEN3.layers) else "Q4_K"
        assert {kinds[f"blk.{layer}.{name}.weight"] for name in ("attn_v", "ffn_down")} == {
            expected
        }
        assert {kinds[f"blk.{layer}.{name}.weight"] for name in ("attn_q", "attn_k", "ffn_up")} == {
            "Q4_K"
        }
    assert [layer for layer in range(8) if more_bits(layer, 8)] == [0, 3, 6, 7]


@pytest.mark.parametrize("shape", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
@pytest.mark.parametrize("quant", ["Q4_0", "Q4_K_M", "Q2_0"])
@pytest.mark.some(3)
def test_the_engine_is_close_to_float64_on_the_file(tmp_path, shape, quant):
    path = tmp_path / "model.gguf"
    write_gguf(path, shape, quant)
    tokens = np.random.default_rng(1).integers(300, shape.vocab, 24).tolist()
    exact = last_logits(path, tokens, shape.heads, shape.kv_heads)
    with CPUPagedEngine.from_pretrained(str(path), num_blocks=16) as engine:
        got = engine.logits(tokens, start=23)[0]
    # Rounding activations to 8 bits gives 0.015 to 0.021, depending on the last bits of attention.
    assert np.linalg.norm(got - exact) / np.linalg.norm(exact) < 0.025


LAYERED = {**HYBRID_SHAPES, **MIXTURE_SHAPES}


@pytest.mark.parametrize("name", [name for name in LAYERED if name.endswith("-tiny")])
@pytest.mark.some(3)
def test_files_of_states_and_experts_are_read_and_computed(tmp_path, name):
    path = tmp_path / "model.gguf"
    shape = LAYERED[name]
    write_gguf(path, shape, "MXFP4" if name.startswith("gpt-oss") else "Q4_0")
    tokens = np.random.default_rng(1).integers(300, shape.vocab, 40).tolist()
    with CPUPagedEngine.from_pretrained(str(path), num_blocks=16) as engine:
        stats = engine.paged_stats()
        assert stats["runner"] == "native"
        assert (stats["draft_weight_bytes"] > 0) == ("-head-" in name)
        logits = engine.logits(tokens, start=39)[0]
    assert 0.05 < logits.std() < 50


@pytest.mark.parametrize(
    ("name", "family"), [("nemotron-h-tiny", "nemotron_h"), ("falcon-h1-tiny", "falcon_h1")]
)
def test_tensors_are_called_and_shaped_as_in_files_of_the_converter(tmp_path, name, family):
    """The expected tensors come from a transformers model with the sizes of the shape."""
    shape = HYBRID_SHAPES[name]
    kinds = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
    own = (
        {
            "layers_block_type": [kinds[kind] for kind in shape.kinds],
            "mamba_num_heads": shape.value_heads,
            "mamba_head_dim": shape.value_dim,
            "n_groups": shape.groups,
            "ssm_state_size": shape.state_dim,
        }
        if family == "nemotron_h"
        else {
            "mamba_n_heads": shape.value_heads,
            "mamba_d_head": shape.value_dim,
            "mamba_n_groups": shape.groups,
            "mamba_d_ssm": shape.value_heads * shape.value_dim,
            "mamba_d_state": shape.state_dim,
        }
    )
    sizes = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.wide,
        "vocab_size": shape.vocab,
        "head_dim": shape.head_dim,
    }
    expected = gguf_tensors(save_tiny_model(family, tmp_path, **sizes, **own))
    assert dict(shape.tensors()) == {found: values.shape for found, values in expected.items()}


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("lfm2-tiny", 2),
        ("granite-4-tiny", 3),
        ("nemotron-h-tiny", 3),
        ("gemma-4-moe-tiny", 3),
        ("gemma-4-tiny", 5),
    ],
)
@pytest.mark.some(2)
def test_a_shape_is_cut_to_its_first_layers(tmp_path, name, layers):
    path = tmp_path / "model.gguf"
    shape = {**SHAPES, **LAYERED}[name]
    write_gguf(path, shape.cut(layers), "Q8_0")
    reader = gguf.GGUFReader(path)
    kept = {
        tensor.name: tensor.shape.tolist()
        for tensor in reader.tensors
        if tensor.name.startswith("blk.")
    }
    assert {int(found.split(".")[1]) for found in kept} == set(range(layers))
    with CPUPagedEngine.from_pretrained(str(path), num_blocks=16) as engine:
        assert np.isfinite(engine.logits([300, 301])).all()
    if name.startswith("gemma"):
        with pytest.raises(ValueError, match="multiple of"):
            shape.cut(layers - 1)


@pytest.mark.parametrize("name", ["embedding-tiny", "embeddinggemma-tiny"])
def test_files_of_embedding_models_define_their_pooling(tmp_path, name):
    shape = SHAPES[name]
    path = tmp_path / "model.gguf"
    write_gguf(path, shape, "Q8_0")
    tokens = np.random.default_rng(1).integers(300, shape.vocab, (3, 90)).tolist()
    with CPUPagedEngine.from_pretrained(str(path), num_blocks=32) as engine:
        vectors = engine.embed(tokens)
        assert engine.pooling.kind == {1: "mean", 3: "last"}[shape.pooling]
        assert engine.embedding_size == shape.hidden
    assert vectors.std() > 0.01
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
