"""NVFP4 checkpoints: rows equal the values they were packed from, and unusable parts are refused by
name.
"""

import numpy as np
import pytest

from helpers.distance import distance
from helpers.models.nvfp4_files import SETTINGS, make_nvfp4, parts_of, write_parts
from helpers.models.specs import spec_of
from helpers.models.tiny_models import save_tiny_model
from helpers.oracles.bit_cases import logits_in_any_pass
from helpers.raising import assert_raises
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.packed.conversions import conversion_error

SHAPES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
DOWN = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize("method", SETTINGS)
def test_rows_equal_the_quantized_values(method, tmp_path):
    save_tiny_model("llama", tmp_path, **SHAPES)
    num_params = Checkpoint.open(tmp_path).summary().num_params
    known = make_nvfp4(tmp_path, method)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.format == f"safetensors {method}"
    assert checkpoint.is_quantized
    scales = sum(values.size // 16 + 2 for values in known.values())
    assert checkpoint.summary().num_params == num_params + scales
    with checkpoint.open_source() as source:
        assert not any("scale" in name or "packed" in name for name in source.names())
        for name, values in known.items():
            assert source.shape(name) == values.shape
            assert (source.kind(name), source.type_of(name)) == ("nvfp4", "NVFP4")
            for start, stop in ((0, len(values)), (3, 20)):
                found = source.rows(name, start, stop)
                np.testing.assert_allclose(found, values[start:stop], rtol=2**-22)
            assert conversion_error(source, name, "nvfp4").relative == 0
    assert distance(*logits_in_any_pass(tmp_path)) <= 5e-2


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        (
            "modelopt",
            {"quant_algo": "FP8"},
            "quant_algo='FP8' is not supported; supported: 'NVFP4'",
        ),
        ("compressed-tensors", {"format": "mixed-precision"}, "format='mixed-precision' is not"),
    ],
)
def test_other_formats_of_these_methods_are_refused(method, settings, message, tmp_path):
    save_tiny_model("llama", tmp_path, **SHAPES)
    make_nvfp4(tmp_path, method, **settings)
    assert_raises(ModelFormatError, message, spec_of, tmp_path)
    assert_raises(ModelFormatError, message, Checkpoint.open(tmp_path).open_source)


@pytest.mark.parametrize("method", SETTINGS)
def test_scales_of_activations_may_be_infinite(method, tmp_path):
    save_tiny_model("llama", tmp_path, **SHAPES)
    make_nvfp4(tmp_path, method)
    unused = {
        f"{DOWN}.input_scale": np.float32(np.inf),
        f"{DOWN}.input_global_scale": np.full(1, np.inf, np.float32),
        "model.layers.0.self_attn.k_proj.k_scale": np.float32(np.nan),
        "model.layers.0.self_attn.v_proj.v_scale": np.float32(np.inf),
    }
    changed = {name: ("F32", values) for name, values in unused.items()}
    write_parts(tmp_path, {**parts_of(tmp_path), **changed})
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.summary()
    with checkpoint.open_source() as source:
        assert not source.names() & unused.keys()


@pytest.mark.parametrize(
    ("part", "dtype", "values", "message"),
    [
        ("weight_scale", "F8_E4M3", np.full((64, 6), 0x7F, np.uint8), "negative or NaN scales"),
        ("weight_scale", "F8_E4M3", np.full((64, 6), 0x81, np.uint8), "negative or NaN scales"),
        ("weight_scale", "F8_E4M3", np.ones((64, 5), np.uint8), r"\(64, 5\), expected \(64, 6\)"),
        ("weight_scale", "U8", np.ones((64, 6), np.uint8), "U8 .* expected F8_E4M3"),
        ("weight_scale_2", "F32", np.ones(2, np.float32), "expected one number"),
        ("weight_scale_2", "F32", np.zeros(1, np.float32), "is 0, expected a positive number"),
    ],
)
def test_damaged_parts_are_refused_by_name(part, dtype, values, message, tmp_path):
    save_tiny_model("llama", tmp_path, **SHAPES)
    make_nvfp4(tmp_path, "modelopt")
    write_parts(tmp_path, {**parts_of(tmp_path), f"{DOWN}.{part}": (dtype, values)})
    checkpoint = Checkpoint.open(tmp_path)
    with (
        pytest.raises(ModelFormatError, match=rf"{DOWN}.{part}' .*{message}"),
        checkpoint.open_source() as source,
    ):
        source.quant_rows(f"{DOWN}.weight", 0, 16)
