"""gpt-oss directories: the rows of each expert, MXFP4 as transformers reads it, and mismatches."""

import logging

import numpy as np
import pytest

from helpers.json_files import change_json
from helpers.models.gpt_oss_files import save_gpt_oss
from helpers.models.tensor_files import change_tensors, tensors_of
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.weights.stacked_experts import ColumnExperts
from kvboost_edge.runners.native.runner import NativeRunner

LAYER = "model.layers.1.mlp.experts."
UP = f"{LAYER}gate_up_proj"
DOWN = f"{LAYER}down_proj"


def _changed(directory, name, change, *, mxfp4):
    """Save a model with one tensor changed by `change`, or removed if it is None."""
    stored = tensors_of(save_gpt_oss(directory, mxfp4=mxfp4)).get(name)
    change_tensors(directory, {name: change and change(stored)})


def test_interleaved_gate_and_up_columns_are_separated(tmp_path):
    tensors = tensors_of(save_gpt_oss(tmp_path))
    with ColumnExperts(tmp_path) as source:
        for part, which in (("gate", 0), ("up", 1)):
            name = f"{LAYER}4.{part}_proj"
            expected = tensors[UP][4].T[which::2]
            assert source.shape(f"{name}.weight") == expected.shape == (96, 64)
            np.testing.assert_array_equal(source.rows(f"{name}.weight"), expected)
            np.testing.assert_array_equal(source.rows(f"{name}.weight", 7, 80), expected[7:80])
            assert source.shape(f"{name}.bias") == (96,)
            np.testing.assert_array_equal(
                source.rows(f"{name}.bias", 3, 9), tensors[f"{UP}_bias"][4, which::2][3:9]
            )
        np.testing.assert_array_equal(
            source.rows(f"{LAYER}2.down_proj.weight", 5, 6), tensors[DOWN][2].T[5:6]
        )
        np.testing.assert_array_equal(
            source.rows(f"{LAYER}2.down_proj.bias"), tensors[f"{DOWN}_bias"][2]
        )
        assert source.kind(f"{LAYER}2.down_proj.weight") is None
        assert not {name for name in source.names() if "gate_up" in name}
        with pytest.raises(ModelFormatError, match="contains all experts"):
            source.stored_rows(f"{LAYER}2.down_proj.weight")


def test_at_most_two_experts_are_held_while_reading(tmp_path):
    save_gpt_oss(tmp_path)
    with ColumnExperts(tmp_path) as source:
        for expert in range(4):
            source.rows(f"{LAYER}{expert}.gate_proj.weight", 0, 8)
        assert source._expert.cache_info().currsize == 2
        source.rows(f"{LAYER}3.up_proj.weight", 0, 8)
        assert source._expert.cache_info().misses == 4
    assert source._expert.cache_info().currsize == 0


def test_mxfp4_equals_transformers(tmp_path):
    """Codes and float16 scales give exactly transformers' values, and so do the floats."""
    torch = pytest.importorskip("torch")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = tensors_of(save_gpt_oss(tmp_path, mxfp4=True))
    whole = {
        name: convert_moe_packed_tensors(
            torch.from_numpy(tensors[f"{name}_blocks"]),
            torch.from_numpy(tensors[f"{name}_scales"]),
            dtype=torch.float32,
        ).numpy()
        for name in (UP, DOWN)
    }
    with ColumnExperts(tmp_path) as source:
        for expert in range(6):
            for part, name, first, step in (
                ("gate", UP, 0, 2),
                ("up", UP, 1, 2),
                ("down", DOWN, 0, 1),
            ):
                tensor = f"{LAYER}{expert}.{part}_proj.weight"
                expected = whole[name][expert].T[first::step]
                assert (source.kind(tensor), source.type_of(tensor)) == ("int4t", "MXFP4")
                np.testing.assert_array_equal(source.rows(tensor), expected)
                stored = source.quant_rows(tensor, 5, 64)
                assert stored.table is not None
                scales = np.repeat(stored.scales.astype(np.float32), 32, axis=1)
                np.testing.assert_array_equal(stored.table[stored.codes] * scales, expected[5:64])


def _large(scales):
    scales[2, 1, 0] = 144
    return scales


def _one_more(bias):
    return np.concatenate([bias, bias[:1]])


# Whether experts are MXFP4, the tensor, its change (None removes it), and the message.
BAD = {
    "scales of another shape": (
        True,
        f"{DOWN}_scales",
        lambda scales: scales[:, :, :2],
        r"down_proj_scales' has shape \(6, 64, 2\), expected \(6, 64, 3\)",
    ),
    "scales as floats": (
        True,
        f"{DOWN}_scales",
        np.float32,
        "down_proj_scales' is F32 .* expected U8",
    ),
    "no scales": (True, f"{UP}_scales", None, "lack tensor '.*gate_up_proj_scales'"),
    "no blocks": (True, f"{UP}_blocks", None, "gate_up_proj_scales' has no matching"),
    "blocks of eight bytes": (
        True,
        f"{UP}_blocks",
        lambda blocks: blocks[..., :8],
        "contains blocks of 8 bytes, expected 16",
    ),
    "a scale above float16": (
        True,
        f"{DOWN}_scales",
        _large,
        "down_proj_scales' has scales above 65504, the limit of 'int4t'",
    ),
    "biases of five": (
        False,
        f"{DOWN}_bias",
        lambda bias: bias[:5],
        r"lack tensor '.*experts\.5\.down_proj\.bias'",
    ),
    "biases of seven": (
        False,
        f"{DOWN}_bias",
        _one_more,
        r"belongs to expert 6, but the layers have",
    ),
    "a short bias": (
        False,
        f"{UP}_bias",
        lambda bias: bias[:, :190],
        r"gate_proj\.bias' has shape \(95,\), expected \(96,\)",
    ),
    "a bias of odd rows": (
        False,
        f"{UP}_bias",
        lambda bias: bias[:, :191],
        "has 191 rows per expert, which cannot be divided into 2 matrices",
    ),
    "a bias of one dimension": (
        False,
        f"{UP}_bias",
        np.ravel,
        r"gate_up_proj_bias' has shape \(1152,\), expected 2 dimensions",
    ),
    "no bias": (True, f"{UP}_bias", None, r"lack tensor '.*experts\.0\.gate_proj\.bias'"),
    "no bias of the router": (
        False,
        "model.layers.1.mlp.router.bias",
        None,
        r"lack tensor '.*mlp\.router\.bias'",
    ),
    "an expert twice": (
        False,
        f"{LAYER}3.down_proj.weight",
        lambda _: np.zeros((64, 96), np.float32),
        "also appears",
    ),
    "no sinks": (False, "model.layers.2.self_attn.sinks", None, "lack tensor '.*sinks'"),
}


@pytest.mark.parametrize("name", BAD)
def test_mismatched_tensors_are_refused_by_name(name, tmp_path):
    mxfp4, tensor, change, message = BAD[name]
    _changed(tmp_path, tensor, change, mxfp4=mxfp4)
    with pytest.raises(ModelFormatError, match=message):
        NativeRunner.from_dir(tmp_path, weights="auto" if mxfp4 else "int8")


def test_a_scale_above_float16_is_read_as_floats(tmp_path):
    _changed(tmp_path, f"{DOWN}_scales", _large, mxfp4=True)
    with ColumnExperts(tmp_path) as source:
        assert source.rows(f"{LAYER}2.down_proj.weight", 1, 2)[0, :32].max() > 65504


def test_scales_below_float16_become_zero_and_are_logged_once(tmp_path, caplog):
    def small(scales):
        scales[2, :2, 0] = 80
        return scales

    _changed(tmp_path, f"{DOWN}_scales", small, mxfp4=True)
    name = f"{LAYER}2.down_proj.weight"
    with ColumnExperts(tmp_path) as source, caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert not source.quant_rows(name, 0, 2).scales[:, 0].any()
    assert [record.getMessage().count("which become 0") for record in caplog.records] == [1]


def test_the_summary_counts_weights(tmp_path):
    """Each byte of a block is two weights. Scales are not weights of the layer, but elements of the
    file.
    """
    save_gpt_oss(tmp_path, mxfp4=True)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.is_quantized
    assert checkpoint.format == "safetensors mxfp4"
    weights = 3 * 6 * (2 * 96 * 64 + 64 * 96)
    assert checkpoint.summary().dtypes["U8"] == weights + weights // 32


def test_other_quantization_methods_are_refused_by_name(tmp_path):
    change_json(
        save_gpt_oss(tmp_path) / "config.json",
        quantization_config={"quant_method": "gptq", "bits": 4},
    )
    with pytest.raises(
        ModelFormatError, match="quant_method='gptq' is not supported for model_type='gpt_oss'"
    ):
        NativeRunner.from_dir(tmp_path, weights="auto")
