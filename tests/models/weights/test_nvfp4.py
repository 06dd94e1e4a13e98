"""NVFP4 checkpoints: rows equal the values they were packed from, and unusable parts are refused by
name.
"""

import json

import numpy as np
import pytest

from helpers.distance import distance
from helpers.json_files import LEFT_OUT, change_json, read_json
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
    before = Checkpoint.open(tmp_path).summary()
    known = make_nvfp4(tmp_path, method)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.format == f"safetensors {method} NVFP4"
    assert checkpoint.is_quantized
    summary = checkpoint.summary()
    packed = sum(values.size for values in known.values())
    assert summary.num_params == before.num_params
    assert summary.dtypes == {"F32": before.num_params - packed, "U8": packed}
    assert summary.nbytes == 4 * (before.num_params - packed) + packed * 9 // 16 + 8 * len(known)
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


def test_a_float_among_joined_matrices_makes_all_of_them_int8(tmp_path):
    save_tiny_model("llama", tmp_path, **SHAPES)
    make_nvfp4(tmp_path, "modelopt", floats="model.layers.0.self_attn.v_proj")
    plan = {entry.name: entry.kind for entry in Checkpoint.open(tmp_path).plan("auto")}
    assert plan["layer0.qkv"] == "int8"
    assert plan["layer0.gate_up"] == plan["layer0.down"] == "nvfp4"


def _rotations(**apply):
    """Return a transform config of compressed-tensors with the places of each group."""
    groups = {
        name: {
            "type": "hadamard",
            "apply": [{"targets": ["Linear"], "location": place} for place in places],
        }
        for name, places in apply.items()
    }
    return {"config_groups": groups}


@pytest.mark.parametrize(
    ("transforms", "message"),
    [
        (_rotations(R1=["weight_input"], R4=["weight_input", "input"]), r"activations \(R4\)"),
        (_rotations(R3=["q_attn", "k_cache"], R4=["output"]), r"activations \(R3, R4\)"),
        ({"config_groups": {"v": {"type": "hadamard"}}}, r"activations \(v\)"),
    ],
)
def test_rotations_of_activations_are_refused_by_name(transforms, message, tmp_path):
    save_tiny_model("llama", tmp_path, **SHAPES)
    make_nvfp4(tmp_path, "compressed-tensors", transform_config=transforms)
    refusal = f"transform_config .* {message}, .*use a GGUF file or the float checkpoint"
    assert_raises(ModelFormatError, refusal, spec_of, tmp_path)
    assert_raises(ModelFormatError, refusal, Checkpoint.open(tmp_path).open_source)


@pytest.mark.parametrize(
    "transforms",
    [None, {}, {"config_groups": {}}, _rotations(R1=["weight_input", "weight_output"])],
)
def test_rotations_inside_the_weights_are_accepted(transforms, tmp_path):
    save_tiny_model("llama", tmp_path, **SHAPES)
    make_nvfp4(tmp_path, "compressed-tensors", transform_config=transforms)
    with Checkpoint.open(tmp_path).open_source() as source:
        assert source.kind(f"{DOWN}.weight") == "nvfp4"


@pytest.mark.parametrize("algorithm", ["W4A16_NVFP4", "NVFP4_W4A16"])
def test_weights_without_scales_of_activations_are_read(algorithm, tmp_path):
    save_tiny_model("llama", tmp_path, **SHAPES)
    known = make_nvfp4(tmp_path, "modelopt", quant_algo=algorithm)
    kept = {
        name: part for name, part in parts_of(tmp_path).items() if not name.endswith("input_scale")
    }
    write_parts(tmp_path, kept)
    spec_of(tmp_path)
    with Checkpoint.open(tmp_path).open_source() as source:
        for name, values in known.items():
            np.testing.assert_allclose(source.rows(name), values, rtol=2**-22)


def _move_settings(directory, **changes):
    """Move the quantization config to ModelOpt's file of earlier exports."""
    quantization = {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head"],
        **changes,
    }
    content = {"producer": {"name": "modelopt"}, "quantization": quantization}
    (directory / "hf_quant_config.json").write_text(json.dumps(content), encoding="utf-8")
    change_json(directory / "config.json", quantization_config=LEFT_OUT)


def test_the_settings_may_be_in_modelopts_own_file(tmp_path):
    save_tiny_model("llama", tmp_path, **SHAPES)
    known = make_nvfp4(tmp_path, "modelopt")
    _move_settings(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.is_quantized
    assert checkpoint.config["quantization_config"]["quant_method"] == "modelopt"
    with checkpoint.open_source() as source:
        assert {name for name in source.names() if source.kind(name) == "nvfp4"} == known.keys()
    assert checkpoint.format == "safetensors modelopt NVFP4"
    before = checkpoint.fingerprint()
    _move_settings(tmp_path, quant_algo="FP8")
    assert Checkpoint.open(tmp_path).fingerprint() != before
    assert Checkpoint.open(tmp_path).format == "safetensors modelopt FP8"
    assert_raises(
        ModelFormatError, "quant_algo='FP8' is not supported", Checkpoint.open(tmp_path).open_source
    )


@pytest.mark.parametrize("unquantized", [{"quant_algo": None}, None])
def test_modelopts_file_may_describe_float_weights(unquantized, tmp_path):
    save_tiny_model("llama", tmp_path, **SHAPES)
    if unquantized is not None:
        _move_settings(tmp_path, **unquantized)
    else:
        (tmp_path / "hf_quant_config.json").write_text("{}", encoding="utf-8")
    checkpoint = Checkpoint.open(tmp_path)
    assert not checkpoint.is_quantized
    assert checkpoint.format == "safetensors float32"


def test_damaged_settings_in_modelopts_file_are_refused(tmp_path):
    save_tiny_model("llama", tmp_path, **SHAPES)
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": 4}', encoding="utf-8")
    with pytest.raises(
        ModelFormatError, match=r"hf_quant_config.json: quantization must be an object, got int"
    ):
        _ = Checkpoint.open(tmp_path).config


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        (
            "modelopt",
            {"quant_algo": "FP8"},
            "quant_algo='FP8' is not supported; supported: 'NVFP4', 'W4A16_NVFP4', 'NVFP4_W4A16'",
        ),
        ("modelopt", {"quant_algo": "NVFP4_AWQ"}, "quant_algo='NVFP4_AWQ' is not supported"),
        (
            "modelopt",
            {
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {
                    "model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
                    "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
                    "model.layers.0.self_attn.o_proj": {"quant_algo": "FP8"},
                },
            },
            r"quant_algo='MIXED_PRECISION' is not supported \(its layers have FP8, NVFP4\); supp.*"
            "; use a GGUF file or the float checkpoint of this model",
        ),
        (
            "compressed-tensors",
            {
                "format": "mixed-precision",
                "config_groups": {
                    "group_0": {"format": "nvfp4-pack-quantized"},
                    "group_1": {"format": "float-quantized"},
                },
            },
            r"format='mixed-precision' .*\(its layers have float-quantized, nvfp4-pack-quantized\)"
            ".* use a GGUF file",
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


DAMAGED_FACTORS = [
    ("modelopt", "weight_scale_2", 0.0),
    ("modelopt", "weight_scale_2", -1.0),
    ("modelopt", "weight_scale_2", 2e35),  # the largest weight, 2688 times the factor, is infinite
    ("compressed-tensors", "weight_global_scale", 0.0),
    ("compressed-tensors", "weight_global_scale", -0.5),
    ("compressed-tensors", "weight_global_scale", 1e-39),
]


def _with_part(directory, method, part, dtype, values):
    save_tiny_model("llama", directory, **SHAPES)
    make_nvfp4(directory, method)
    write_parts(directory, {**parts_of(directory), f"{DOWN}.{part}": (dtype, values)})
    return Checkpoint.open(directory)


def _read(checkpoint):
    with checkpoint.open_source() as source:
        source.quant_rows(f"{DOWN}.weight", 0, 16)


@pytest.mark.parametrize("bits", [0x7F, 0xFF, 0x81])
def test_damaged_scales_are_found_before_and_at_packing(bits, tmp_path):
    scales = np.full((64, 6), bits, np.uint8)
    checkpoint = _with_part(tmp_path, "modelopt", "weight_scale", "F8_E4M3", scales)
    for check in (checkpoint.summary, lambda: _read(checkpoint)):
        with pytest.raises(ModelFormatError, match=rf"{DOWN}.weight_scale' .*negative or NaN sca"):
            check()


def test_the_first_damaged_scale_is_named(tmp_path):
    scales = np.full((64, 6), 0x7E, np.uint8)
    scales[0] = 0x80  # zeros with a sign
    scales[40, 3:] = (0x7F, 0x90, 0x7F)
    checkpoint = _with_part(tmp_path, "modelopt", "weight_scale", "F8_E4M3", scales)
    with pytest.raises(ModelFormatError, match="first at element 243 of 384"):
        checkpoint.summary()
    with checkpoint.open_source() as source:
        source.quant_rows(f"{DOWN}.weight", 0, 40)


def test_scales_are_checked_again_when_weights_become_nvfp4(tmp_path):
    """The result of a check of the same file is cached."""
    scales = np.full((64, 6), 0x7F, np.uint8)
    _with_part(tmp_path, "modelopt", "weight_scale", "F8_E4M3", scales)
    settings = read_json(tmp_path / "config.json")["quantization_config"]
    change_json(tmp_path / "config.json", quantization_config=LEFT_OUT)
    Checkpoint.open(tmp_path).summary()
    change_json(tmp_path / "config.json", quantization_config=settings)
    assert_raises(ModelFormatError, "NaN scales", Checkpoint.open(tmp_path).summary)


@pytest.mark.parametrize(("method", "part", "value"), DAMAGED_FACTORS)
def test_damaged_factors_are_found_before_and_at_packing(method, part, value, tmp_path):
    checkpoint = _with_part(tmp_path, method, part, "F32", np.full(1, value, np.float32))
    for check in (checkpoint.summary, lambda: _read(checkpoint)):
        with pytest.raises(ModelFormatError, match=rf"{DOWN}.{part}' is .*expected a positive"):
            check()


@pytest.mark.parametrize(
    ("part", "dtype", "values", "message"),
    [
        ("weight_scale", "F8_E4M3", np.ones((64, 5), np.uint8), r"\(64, 5\), expected \(64, 6\)"),
        ("weight_scale", "U8", np.ones((64, 6), np.uint8), "U8 .* expected F8_E4M3"),
        ("weight_scale_2", "F32", np.ones(2, np.float32), "expected one number"),
    ],
)
def test_mismatched_parts_are_refused_by_name(part, dtype, values, message, tmp_path):
    checkpoint = _with_part(tmp_path, "modelopt", part, dtype, values)
    with pytest.raises(ModelFormatError, match=rf"{DOWN}.{part}' .*{message}"):
        _read(checkpoint)


@pytest.mark.parametrize(
    "scales",
    [
        "mlp.experts.gate_up_proj_weight_scale",
        "mlp.experts.down_proj.weight_scale",
        "block_sparse_moe.input_linear.weight_scale",
    ],
)
def test_scales_of_all_experts_in_one_tensor_are_refused(scales, tmp_path):
    name = f"model.layers.0.{scales}"
    codes = name.removesuffix("_weight_scale").removesuffix(".weight_scale")
    save_tiny_model("llama", tmp_path, **SHAPES)
    make_nvfp4(tmp_path, "modelopt")
    fused = {
        codes: ("U8", np.ones((3, 8, 32), np.uint8)),
        name: ("F8_E4M3", np.ones((3, 8, 4), np.uint8)),
    }
    write_parts(tmp_path, {**parts_of(tmp_path), **fused})
    message = (
        f"model.safetensors: tensor {name!r} has the scales of all experts; NVFP4 experts must be "
        "stored one by one.* use a GGUF file or the float checkpoint"
    )
    assert_raises(ModelFormatError, message, Checkpoint.open(tmp_path).open_source)


def test_an_unsupported_number_of_inputs_is_refused_with_advice(tmp_path):
    checkpoint = _with_part(tmp_path, "modelopt", "weight", "U8", np.ones((64, 40), np.uint8))
    message = (
        f"model.safetensors: tensor '{DOWN}.weight' has 80 inputs; they must be a multiple of 32; "
        "use a GGUF file or the float checkpoint"
    )
    assert_raises(ModelFormatError, message, checkpoint.open_source)


def test_weights_that_are_floats_are_refused_with_the_directory(tmp_path):
    save_tiny_model("llama", tmp_path, **SHAPES)
    settings = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    change_json(tmp_path / "config.json", quantization_config=settings)
    message = (
        f"{tmp_path}: quantization_config declares NVFP4 weights, but no tensor is named "
        r"'\*.weight_scale'; .* remove quantization_config"
    )
    assert_raises(ModelFormatError, message, Checkpoint.open(tmp_path).open_source)
