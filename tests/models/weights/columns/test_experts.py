"""gpt-oss's directories: which rows are whose, MXFP4 as transformers reads it, and what does not fit."""

import json
import logging

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from helpers.models.gpt_oss_files import save_gpt_oss
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.weights.columns.experts import ColumnExperts
from kvboost_edge.runners.native.runner import NativeRunner

Tensors = dict[str, np.ndarray]
LAYER = "model.layers.1.mlp.experts."
UP, DOWN = f"{LAYER}gate_up_proj", f"{LAYER}down_proj"


def _changed(directory, change, *, mxfp4):
    path = save_gpt_oss(directory, mxfp4=mxfp4) / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: np.ascontiguousarray(t) for name, t in tensors.items()}, path, metadata={"format": "pt"})
    return directory


def test_columns_take_turns(tmp_path):
    tensors = load_file(save_gpt_oss(tmp_path) / "model.safetensors")
    with ColumnExperts(tmp_path) as source:
        for part, which in (("gate", 0), ("up", 1)):
            name = f"{LAYER}4.{part}_proj"
            expected = tensors[UP][4].T[which::2]
            assert source.shape(f"{name}.weight") == expected.shape == (96, 64)
            np.testing.assert_array_equal(source.rows(f"{name}.weight"), expected)
            np.testing.assert_array_equal(source.rows(f"{name}.weight", 7, 80), expected[7:80])
            assert source.shape(f"{name}.bias") == (96,)
            np.testing.assert_array_equal(source.rows(f"{name}.bias", 3, 9), tensors[f"{UP}_bias"][4, which::2][3:9])
        np.testing.assert_array_equal(source.rows(f"{LAYER}2.down_proj.weight", 5, 6), tensors[DOWN][2].T[5:6])
        np.testing.assert_array_equal(source.rows(f"{LAYER}2.down_proj.bias"), tensors[f"{DOWN}_bias"][2])
        assert source.kind(f"{LAYER}2.down_proj.weight") is None
        assert not {name for name in source.names() if "gate_up" in name}
        with pytest.raises(ModelFormatError, match="rows of all experts"):
            source.stored_rows(f"{LAYER}2.down_proj.weight")


def test_two_experts_stay_while_their_rows_are_read_and_none_afterwards(tmp_path):
    save_gpt_oss(tmp_path)
    with ColumnExperts(tmp_path) as source:
        for expert in range(4):
            source.rows(f"{LAYER}{expert}.gate_proj.weight", 0, 8)
        assert source._expert.cache_info().currsize == 2
        source.rows(f"{LAYER}3.up_proj.weight", 0, 8)
        assert source._expert.cache_info().misses == 4
    assert source._expert.cache_info().currsize == 0


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path):
    """Codes and float16 scales hold transformers' own numbers, and so do the floats."""
    torch = pytest.importorskip("torch")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = load_file(save_gpt_oss(tmp_path, mxfp4=True) / "model.safetensors")
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
            for part, name, first, step in (("gate", UP, 0, 2), ("up", UP, 1, 2), ("down", DOWN, 0, 1)):
                tensor = f"{LAYER}{expert}.{part}_proj.weight"
                expected = whole[name][expert].T[first::step]
                assert (source.kind(tensor), source.type_of(tensor)) == ("int4t", "MXFP4")
                np.testing.assert_array_equal(source.rows(tensor), expected)
                stored = source.quant_rows(tensor, 5, 64)
                assert stored.table is not None
                scales = np.repeat(stored.scales.astype(np.float32), 32, axis=1)
                np.testing.assert_array_equal(stored.table[stored.codes] * scales, expected[5:64])


def _scales_shape(tensors):
    tensors[f"{DOWN}_scales"] = tensors[f"{DOWN}_scales"][:, :, :2]


def _scales_dtype(tensors):
    tensors[f"{DOWN}_scales"] = tensors[f"{DOWN}_scales"].astype(np.float32)


def _no_scales(tensors):
    del tensors[f"{UP}_scales"]


def _no_blocks(tensors):
    del tensors[f"{UP}_blocks"]


def _short_blocks(tensors):
    tensors[f"{UP}_blocks"] = tensors[f"{UP}_blocks"][..., :8]


def _large_scale(tensors):
    tensors[f"{DOWN}_scales"][2, 1, 0] = 144


def _bias_of_five(tensors):
    tensors[f"{DOWN}_bias"] = tensors[f"{DOWN}_bias"][:5]


def _bias_of_seven(tensors):
    tensors[f"{DOWN}_bias"] = np.concatenate([tensors[f"{DOWN}_bias"], tensors[f"{DOWN}_bias"][:1]])


def _short_bias(tensors):
    tensors[f"{UP}_bias"] = tensors[f"{UP}_bias"][:, :190]


def _odd_bias(tensors):
    tensors[f"{UP}_bias"] = tensors[f"{UP}_bias"][:, :191]


def _flat_bias(tensors):
    tensors[f"{UP}_bias"] = tensors[f"{UP}_bias"].reshape(-1)


def _no_bias(tensors):
    del tensors[f"{UP}_bias"]


def _twice(tensors):
    tensors[f"{LAYER}3.down_proj.weight"] = np.zeros((64, 96), np.float32)


def _no_router_bias(tensors):
    del tensors["model.layers.1.mlp.router.bias"]


def _no_sinks(tensors):
    del tensors["model.layers.2.self_attn.sinks"]


BAD = {
    "scales of another shape": (
        _scales_shape,
        True,
        r"down_proj_scales' has shape \(6, 64, 2\), expected \(6, 64, 3\)",
    ),
    "scales as floats": (_scales_dtype, True, "down_proj_scales' is F32 .* expected U8"),
    "no scales": (_no_scales, True, "lack tensor '.*gate_up_proj_scales'"),
    "no blocks": (_no_blocks, True, "gate_up_proj_scales' has no fellow"),
    "blocks of eight bytes": (_short_blocks, True, "has blocks of 8 bytes, expected 16"),
    "a scale above float16": (_large_scale, True, "down_proj_scales' has scales above 65504 .*'int4t' holds"),
    "biases of five": (_bias_of_five, False, r"lack tensor '.*experts\.5\.down_proj\.bias'"),
    "biases of seven": (_bias_of_seven, False, r"is of expert 6, and layers have 6"),
    "a short bias": (_short_bias, False, r"gate_proj\.bias' has shape \(95,\), expected \(96,\)"),
    "a bias of odd rows": (_odd_bias, False, "has 191 rows an expert, which are not 2 matrices"),
    "a bias of one dimension": (_flat_bias, False, r"gate_up_proj_bias' has shape \(1152,\), expected 2 dimensions"),
    "no bias": (_no_bias, True, r"lack tensor '.*experts\.0\.gate_proj\.bias'"),
    "no bias of the router": (_no_router_bias, False, r"lack tensor '.*mlp\.router\.bias'"),
    "an expert twice": (_twice, False, "is there a second time"),
    "no sinks": (_no_sinks, False, "lack tensor '.*sinks'"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused_by_name(name, tmp_path):
    change, mxfp4, message = BAD[name]
    _changed(tmp_path, change, mxfp4=mxfp4)
    with pytest.raises(ModelFormatError, match=message):
        NativeRunner.from_dir(tmp_path, weights="auto" if mxfp4 else "int8")


def test_a_scale_above_float16_is_taken_as_floats(tmp_path):
    _changed(tmp_path, _large_scale, mxfp4=True)
    with ColumnExperts(tmp_path) as source:
        assert source.rows(f"{LAYER}2.down_proj.weight", 1, 2)[0, :32].max() > 65504


def test_scales_below_float16_are_zeros_and_said_once(tmp_path, caplog):
    def small(tensors):
        tensors[f"{DOWN}_scales"][2, :2, 0] = 80

    _changed(tmp_path, small, mxfp4=True)
    name = f"{LAYER}2.down_proj.weight"
    with ColumnExperts(tmp_path) as source, caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert not source.quant_rows(name, 0, 2).scales[:, 0].any()
    assert [record.getMessage().count("which become 0") for record in caplog.records] == [1]


def test_the_summary_counts_weights(tmp_path):
    """Two of a byte of blocks; scales are no weights of the layer, but elements of the file."""
    save_gpt_oss(tmp_path, mxfp4=True)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.is_quantized
    assert checkpoint.format == "safetensors mxfp4"
    weights = 3 * 6 * (2 * 96 * 64 + 64 * 96)
    assert checkpoint.summary().dtypes["U8"] == weights + weights // 32


def test_another_method_is_refused_by_name(tmp_path):
    path = save_gpt_oss(tmp_path) / "config.json"
    config = {**json.loads(path.read_text()), "quantization_config": {"quant_method": "gptq", "bits": 4}}
    path.write_text(json.dumps(config))
    with pytest.raises(ModelFormatError, match="quant_method='gptq' is not read of model_type='gpt_oss'"):
        NativeRunner.from_dir(tmp_path, weights="auto")
