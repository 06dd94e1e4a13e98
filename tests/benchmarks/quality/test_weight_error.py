"""Tests of the weight report against the weights in the packed file."""

import numpy as np
import pytest

from benchmarks.quality.weight_error import weight_error
from helpers.gguf.writer import write_gguf
from helpers.models.tiny_models import save_tiny_model
from kvboost_edge.errors import ConfigError
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.locate import BUNDLED_MODEL, locate_model


# Format, maximum and minimum relative error, bits per weight.
@pytest.mark.parametrize(
    ("weights", "most", "least", "bits"),
    [
        ("f32", 0.0, 0.0, 32.0),
        ("bf16", 0.0018, 0.001, 16.0),
        ("int8", 0.0053, 0.004, 8.5),
        ("int4", 0.072, 0.06, 4.9),
        ("int4-asym", 0.065, 0.055, 5.3),
    ],
)
def test_report_of_the_bundled_model(weights, most, least, bits):
    seen = []
    report = weight_error(
        Checkpoint.open(locate_model(BUNDLED_MODEL)), weights, progress=lambda *at: seen.append(at)
    )
    assert least <= report.relative <= most
    assert report.bits_per_weight == pytest.approx(bits, abs=0.05)
    assert len(report.matrices) == 1 + 4 * 6
    outer = {"int8"} if weights.startswith("int4") else set()
    assert {matrix.kind for matrix in report.matrices} == {weights} | outer
    assert report.worst.relative >= report.relative
    assert all(matrix.largest >= 0 and np.isfinite(matrix.relative) for matrix in report.matrices)
    assert seen[-1][0] == seen[-1][1] == sum(matrix.nbytes for matrix in report.matrices)
    assert report.nbytes > seen[-1][1]


def test_unknown_formats_are_refused():
    with pytest.raises(ConfigError, match="int2"):
        weight_error(Checkpoint.open(locate_model(BUNDLED_MODEL)), "int2")
    with pytest.raises(ConfigError, match="auto"):
        weight_error(Checkpoint.open(locate_model(BUNDLED_MODEL)), "auto")


# Error of a file's own formats: none, or that of rounding.
@pytest.mark.parametrize(
    ("kind", "most"),
    [
        ("Q4_K", 0.0),
        ("Q3_K", 0.0),
        ("Q2_K", 0.0),
        ("IQ2_S", 0.0),
        ("IQ4_NL", 0.0),
        ("MXFP4", 0.0),
        ("IQ4_XS", 2**-11),
    ],
)
def test_report_of_a_quantized_file(kind, most, tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "head_dim": 64}
    path = write_gguf(
        save_tiny_model("llama", tmp_path / "model", **sizes), tmp_path / "m.gguf", kind=kind
    )
    report = weight_error(Checkpoint.open(path), "auto")
    assert report.relative <= most
    assert (report.relative > 0) == (most > 0)
