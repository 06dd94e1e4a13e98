"""AWQ and GPTQ checkpoints: rows equal the codes they were packed from, and unsupported layouts are
refused by name.
"""

import numpy as np
import pytest

from helpers.distance import distance
from helpers.json_files import change_json, read_json
from helpers.models.awq_gptq_files import quantize_dir
from helpers.models.specs import spec_of
from helpers.models.tensor_files import change_tensors
from helpers.models.tiny_models import save_tiny_model
from helpers.raising import assert_raises
from kvboost_edge import CPUPagedEngine
from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.memory.selection import model_traits
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.runners.choice import choose_runner

SHAPES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 32}
DOWN = "model.layers.0.mlp.down_proj"
CASES = [
    ("awq", 32, False, {"version": "gemm", "zero_point": True}),
    ("awq", 128, False, {"version": "gemm", "zero_point": True}),
    ("gptq", 64, False, {"desc_act": False, "sym": False}),
    ("gptq", 128, True, {"desc_act": False, "sym": True}),
    ("gptq", 32, False, {"desc_act": False, "checkpoint_format": "gptq_v2"}),
]


@pytest.mark.parametrize(("method", "group", "symmetric", "settings"), CASES)
def test_rows_equal_the_stored_codes(method, group, symmetric, settings, tmp_path):
    save_tiny_model("llama", tmp_path, **SHAPES)
    known = quantize_dir(tmp_path, method, group=group, symmetric=symmetric, **settings)
    with Checkpoint.open(tmp_path).open_source() as source:
        assert not any(name.endswith((".qweight", ".bias", ".g_idx")) for name in source.names())
        for module, (codes, scales, zeros) in known.items():
            name = f"{module}.weight"
            assert source.shape(name) == codes.shape
            assert source.kind(name) == ("int4" if symmetric else "int4-asym")
            for start, stop in ((0, codes.shape[0]), (3, 21)):
                rows = source.quant_rows(name, start, stop)
                times = group // 32
                groups = codes.shape[1] // 32
                np.testing.assert_array_equal(rows.codes, codes[start:stop])
                np.testing.assert_array_equal(
                    rows.scales, np.repeat(scales[start:stop], times, 1)[:, :groups]
                )
                wide = np.repeat(scales[start:stop].astype(np.float32), group, 1)[
                    :, : codes.shape[1]
                ]
                offset = np.repeat(zeros[start:stop], group, 1)[:, : codes.shape[1]]
                np.testing.assert_array_equal(
                    source.rows(name, start, stop), wide * (codes[start:stop] - offset)
                )
                if symmetric:
                    assert rows.minima is None
                else:
                    product = scales[start:stop].astype(np.float32) * zeros[start:stop]
                    expected = np.repeat(product.astype(np.float16), times, 1)[:, :groups]
                    np.testing.assert_array_equal(rows.minima, expected)
    assert Checkpoint.open(tmp_path).summary().dtypes["I32"] > sum(
        c.size for c, _, _ in known.values()
    )


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_the_engine_equals_the_dequantized_model(method, tmp_path):
    save_tiny_model("llama", tmp_path / "packed", **SHAPES)
    known = quantize_dir(
        tmp_path / "packed", method, group=32, symmetric=method == "gptq", desc_act=False
    )
    save_tiny_model("llama", tmp_path / "float", **SHAPES)
    floats = {}
    for module, (codes, scales, zeros) in known.items():
        wide = np.repeat(scales.astype(np.float32), 32, 1)
        floats[f"{module}.weight"] = (wide * (codes - np.repeat(zeros, 32, 1))).astype(np.float32)
    change_tensors(tmp_path / "float", floats)
    ids = list(range(40, 70))
    logits = []
    for name, weights in (
        ("packed", "auto"),
        ("packed", "int4-asym"),
        ("packed", "f32"),
        ("float", "f32"),
    ):
        with CPUPagedEngine.from_pretrained(
            tmp_path / name, weights=weights, runner="native", num_blocks=16, backend="cpu"
        ) as engine:
            logits.append(engine.logits(ids))
    stored, widened, unpacked, wanted = logits
    if method == "awq":
        np.testing.assert_array_equal(widened, stored)
    assert distance(widened, wanted) <= 2e-2
    np.testing.assert_array_equal(unpacked, wanted)
    assert distance(stored, wanted) <= 2e-2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 8}, "bits=8"),
        ({"group_size": -1}, "group_size=-1"),
        ({"group_size": 48}, "group_size=48"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "awq", "version": "gemv"}, "gemv"),
        ({"checkpoint_format": "marlin"}, "marlin"),
    ],
)
def test_unsupported_settings_are_refused(change, message, tmp_path):
    save_tiny_model("llama", tmp_path, **SHAPES)
    quantize_dir(tmp_path, "gptq", group=32, symmetric=True, **{"desc_act": False, **change})
    path = tmp_path / "config.json"
    change_json(path, quantization_config={**read_json(path)["quantization_config"], **change})
    assert_raises(ModelFormatError, message, spec_of, tmp_path)
    assert_raises(ModelFormatError, message, Checkpoint.open(tmp_path).open_source)
    traits = model_traits(Checkpoint.open(tmp_path))
    assert_raises(ModelFormatError, message, choose_runner, EngineConfig(runner="native"), traits)
    assert choose_runner(EngineConfig(runner="torch"), traits).name == "torch"


@pytest.mark.parametrize(
    ("part", "values", "message"),
    [
        ("g_idx", (np.arange(256) % 8).astype(np.int32), "act-order"),
        ("qzeros", np.full((8, 16), -1, dtype=np.int32), "ambiguous"),
        ("qzeros", np.zeros((7, 16), dtype=np.int32), "expected"),
        ("scales", np.ones((8, 128), dtype=np.float32), "F32"),
        ("qweight", np.zeros((32, 128), dtype=np.int64), "I64"),
        ("qweight", np.zeros((30, 128), dtype=np.int32), "down_proj"),
    ],
)
def test_damaged_parts_are_named(part, values, message, tmp_path):
    save_tiny_model("llama", tmp_path, **SHAPES)
    quantize_dir(tmp_path, "gptq", group=32, symmetric=True, desc_act=False)
    change_tensors(tmp_path, {f"{DOWN}.{part}": values})
    with (
        pytest.raises(ModelFormatError, match=message),
        Checkpoint.open(tmp_path).open_source() as source,
    ):
        source.kind(f"{DOWN}.weight")
