"""BitNet checkpoints: rows equal the ternary values they were packed from, and unsupported layouts
are refused by name.
"""

import numpy as np
import pytest

from helpers.models.bitnet_files import LAYOUTS, make_bitnet
from helpers.models.specs import spec_of
from helpers.models.tensor_files import change_tensors, tensors_of
from helpers.models.tiny_models import save_tiny_model
from helpers.raising import assert_raises
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.packed.conversions import conversion_error

DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize("family", ["bitnet", "llama"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_equal_the_ternary_values(layout, family, tmp_path):
    save_tiny_model(family, tmp_path, num_hidden_layers=1)
    known = make_bitnet(tmp_path, layout)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.format == "safetensors bitnet"
    assert checkpoint.is_quantized
    with checkpoint.open_source() as source:
        assert not any(name.endswith("_scale") for name in source.names())
        for name, values in known.items():
            assert source.shape(name) == values.shape
            for start, stop in ((0, len(values)), (3, len(values) - 1), (len(values) // 4, 29)):
                np.testing.assert_array_equal(source.rows(name, start, stop), values[start:stop])
                rows = source.quant_rows(name, start, stop)
                signs = rows.codes.astype(np.int64) - 1
                np.testing.assert_array_equal(signs, np.sign(values[start:stop]))
                np.testing.assert_array_equal(rows.scales, np.float16(np.abs(values).max()))
            error = conversion_error(source, name, source.kind(name)).relative
            assert error == 0 if layout == "autobitlinear" else error <= 2**-11


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_summary_counts_weights(layout, tmp_path):
    save_tiny_model("bitnet", tmp_path)
    num_params = Checkpoint.open(tmp_path).summary().num_params
    known = make_bitnet(tmp_path, layout)
    scales = 0 if layout == "online" else len(known)
    assert Checkpoint.open(tmp_path).summary().num_params == num_params + scales


@pytest.mark.parametrize(
    ("layout", "settings", "message"),
    [
        ("bitlinear", {"linear_class": "linear"}, "linear_class='linear' is not supported"),
        ("bitlinear", {"use_rms_norm": True}, "use_rms_norm=True is not supported"),
        ("online", {"quantization_mode": "later"}, "quantization_mode='later' is not supported"),
        ("online", {"modules_to_not_convert": ["o_proj"]}, "modules_to_not_convert=.'o_proj'.*"),
    ],
)
def test_unsupported_settings_are_refused(layout, settings, message, tmp_path):
    save_tiny_model("bitnet", tmp_path)
    make_bitnet(tmp_path, layout, **settings)
    assert_raises(ModelFormatError, message, spec_of, tmp_path)
    assert_raises(ModelFormatError, message, Checkpoint.open(tmp_path).open_source)


def test_float_weights_of_experts_are_refused(tmp_path):
    save_tiny_model("qwen3_moe", tmp_path)
    make_bitnet(tmp_path, "online")
    assert_raises(ModelFormatError, "supported for dense models only", spec_of, tmp_path)


def test_packed_weights_are_required_unless_online(tmp_path):
    save_tiny_model("bitnet", tmp_path)
    floats = tensors_of(tmp_path)
    make_bitnet(tmp_path, "autobitlinear")
    change_tensors(tmp_path, {DOWN: floats[DOWN]})
    message = "down_proj.weight' has a scale, but is F32 instead of U8"
    assert_raises(ModelFormatError, message, Checkpoint.open(tmp_path).open_source)
    scales = [name for name in tensors_of(tmp_path) if name.endswith("_scale")]
    change_tensors(tmp_path, {**floats, **dict.fromkeys(scales)})
    message = "no tensor has a weight_scale.*quantization_mode='online'"
    assert_raises(ModelFormatError, message, Checkpoint.open(tmp_path).open_source)


@pytest.mark.parametrize(
    ("tensor", "values", "message"),
    [
        (DOWN, np.full((16, 96), 0xFF, np.uint8), "contains code 3"),
        (DOWN, np.zeros((16, 96, 1), np.uint8), "expected U8, 2 dimensions"),
        (DOWN + "_scale", np.ones(64, np.float32), r"has shape \(64,\), expected \(1,\)"),
        (DOWN + "_scale", np.zeros(1, np.float32), "is 0, expected a positive number"),
        (DOWN + "_scale", np.full(1, 1e6, np.float32), "a scale of 1e-06, which is outside"),
    ],
)
def test_damaged_tensors_are_named(tensor, values, message, tmp_path):
    save_tiny_model("bitnet", tmp_path)
    make_bitnet(tmp_path)
    change_tensors(tmp_path, {tensor: values})
    with (
        pytest.raises(ModelFormatError, match=f"down_proj.*{message}"),
        Checkpoint.open(tmp_path).open_source() as source,
    ):
        source.quant_rows(DOWN, 0, 64)


def test_missing_rows_are_named_before_loading(tmp_path):
    save_tiny_model("bitnet", tmp_path)
    make_bitnet(tmp_path)
    name = "model.layers.1.self_attn.q_proj.weight"
    change_tensors(tmp_path, {name: tensors_of(tmp_path)[name][:-1]})
    message = r"q_proj.weight' has shape \(60, 64\), but config.json gives \(64, 64\)"
    assert_raises(ModelFormatError, message, Checkpoint.open(tmp_path).summary)
