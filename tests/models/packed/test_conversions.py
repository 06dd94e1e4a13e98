"""Log messages about tensors that a packed format does not represent exactly."""

import logging
import re

import numpy as np
import pytest

from helpers.distance import distance
from helpers.gguf.writer import q4_k_m, write_gguf
from helpers.models.specs import spec_of
from helpers.models.tiny_models import save_tiny_model
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.gguf.blocks import BLOCKS
from kvboost_edge.models.packed.conversions import conversion_error, log_conversions
from kvboost_edge.models.packed.pack_plan import STORED, pack_plan
from kvboost_edge.models.weights.safetensors_source import SafetensorsSource

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_tiny_model("llama", tmp_path_factory.mktemp("conversions"), **WIDE)


def _lines(path, weights, caplog):
    caplog.clear()
    with (
        caplog.at_level(logging.INFO, "kvboost_edge"),
        Checkpoint.open(path).open_source() as source,
    ):
        log_conversions(pack_plan(spec_of(path), weights, source), source)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    "kind",
    [
        "Q4_0",
        "Q4_1",
        "Q5_0",
        "Q5_1",
        "Q8_0",
        "Q4_K",
        "Q6_K",
        "Q2_K",
        "Q3_K",
        "IQ3_S",
        "IQ4_NL",
        "IQ4_XS",
        "MXFP4",
        "NVFP4",
    ],
)
def test_exact_formats_have_no_error(kind, model_dir, tmp_path):
    path = write_gguf(model_dir, tmp_path / "m.gguf", kind=kind)
    with Checkpoint.open(path).open_source() as source:
        own = BLOCKS[kind].kind
        assert own is not None
        found = conversion_error(source, QUERY, own)
        assert (found.type, found.kind, found.relative == 0) == (kind, own, BLOCKS[kind].exact)
        assert found.relative < 0.02
        assert conversion_error(source, QUERY, "f32").relative == 0
        assert 0.03 < conversion_error(source, QUERY, "int4").relative < 0.15 or own == "int4"


def test_reported_errors_equal_the_packed_weights(model_dir):
    """For a float tensor, the reported error equals that of rounding in NumPy."""
    with SafetensorsSource(model_dir) as source:
        rows = source.rows(QUERY)
        groups = rows.reshape(len(rows), -1, 32)
        scales = (
            (np.abs(groups).max(axis=2, keepdims=True) / 127).astype(np.float16).astype(np.float32)
        )
        rounded = np.clip(np.round(groups / scales), -127, 127) * scales
        expected = distance(rounded, groups)
        assert conversion_error(source, QUERY, "int8").relative == pytest.approx(expected, rel=0.1)


def test_a_tensor_converted_to_the_format_of_a_wider_one_is_named(model_dir, tmp_path, caplog):
    def mixed(name):
        return (
            "Q8_0" if "attn_v" in name or name in ("token_embd.weight", "output.weight") else "Q4_1"
        )

    path = write_gguf(model_dir, tmp_path / "m.gguf", kind=mixed)
    (line,) = _lines(path, STORED, caplog)
    # Queries and keys of two layers are packed with the values. The other matrices of Q4_1 are
    # exact.
    found = re.fullmatch(
        r"Q4_1: 4 tensors are converted to int8 with a relative error of (\S+) "
        r"\(measured on model\.layers\.0\.self_attn\.q_proj\.weight\)",
        line,
    )
    assert found is not None, line
    assert 1e-3 < float(found[1]) < 1e-2


def test_requested_conversions_are_named(model_dir, tmp_path, caplog):
    path = write_gguf(model_dir, tmp_path / "m.gguf", kind="Q8_0")
    assert _lines(path, STORED, caplog) == []
    (line,) = _lines(path, "int4", caplog)
    assert line.startswith("Q8_0: 14 tensors are converted to int4 with a relative error of 0.")
    (line,) = _lines(path, "int4-asym", caplog)
    assert line.startswith(
        "Q8_0: 14 tensors are converted to int4-asym with a relative error of 0."
    )
    (line,) = _lines(write_gguf(model_dir, tmp_path / "n.gguf", kind="Q4_0"), "int4-asym", caplog)
    assert line.startswith(
        "Q4_0: 2 tensors are converted to int8 without loss, which takes 1.06 bytes per weight "
        "instead of 0.56 (such as model.embed"
    )
    floats = write_gguf(model_dir, tmp_path / "f.gguf", kind="F16")
    assert _lines(floats, "int8", caplog) == []  # the error of packing a float checkpoint


def test_lossless_conversions_that_grow_are_named(model_dir, tmp_path, caplog):
    path = write_gguf(model_dir, tmp_path / "m.gguf", kind="TQ1_0")
    (line,) = _lines(path, STORED, caplog)
    assert re.fullmatch(
        r"TQ1_0: 16 tensors are converted to int2-g256 without loss, which takes 0\.26 bytes per "
        r"weight instead of 0\.21 \(such as \S+\)",
        line,
    ), line
    exact = ("Q2_K", "Q3_K", "IQ1_S", "IQ1_M", "IQ2_XS", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q5_K")
    narrow = ("Q1_0", "Q2_0", "Q2_0_g128", "TQ2_0")
    for number, kind in enumerate((*exact, *narrow, "IQ4_NL", "NVFP4", q4_k_m)):
        path = write_gguf(model_dir, tmp_path / f"{number}.gguf", kind=kind)
        assert not _lines(path, STORED, caplog)


def test_the_error_of_iq4_xs_comes_from_its_scales(model_dir, tmp_path, caplog):
    (line,) = _lines(write_gguf(model_dir, tmp_path / "m.gguf", kind="IQ4_XS"), STORED, caplog)
    found = re.fullmatch(
        r"IQ4_XS: 16 tensors are converted to int4t with a relative error of (\S+) "
        r"\(measured on \S+\)",
        line,
    )
    assert found is not None, line
    assert 1e-5 < float(found[1]) < 2**-11
