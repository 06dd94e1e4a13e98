"""The weight report against the weights as the packed file holds them."""

from __future__ import annotations

import numpy as np
import pytest

from kvboost_edge.errors import ConfigError
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.locate import BUNDLED_MODEL, locate_model
from kvboost_edge.models.packed.report import weight_error


# Format, relative error at most and at least, bits per weight.
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
def test_report_of_the_bundled_model(weights: str, most: float, least: float, bits: float) -> None:
    seen: list[tuple[int, int]] = []
    report = weight_error(Checkpoint.open(locate_model(BUNDLED_MODEL)), weights, progress=lambda *at: seen.append(at))
    assert least <= report.relative <= most
    assert report.bits_per_weight == pytest.approx(bits, abs=0.05)
    assert len(report.matrices) == 1 + 4 * 6
    outer = {"int8"} if weights.startswith("int4") else set()
    assert {matrix.kind for matrix in report.matrices} == {weights} | outer
    assert report.worst.relative >= report.relative
    assert all(matrix.largest >= 0 and np.isfinite(matrix.relative) for matrix in report.matrices)
    assert seen[-1][0] == seen[-1][1] == sum(matrix.nbytes for matrix in report.matrices)
    assert report.nbytes > seen[-1][1]


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(ConfigError, match="int2"):
        weight_error(Checkpoint.open(locate_model(BUNDLED_MODEL)), "int2")
    with pytest.raises(ConfigError, match="auto"):
        weight_error(Checkpoint.open(locate_model(BUNDLED_MODEL)), "auto")
