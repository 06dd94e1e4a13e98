"""RoPE settings recovered from tables of cosines and sines, and tables that no settings produce."""

import numpy as np
import pytest

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.config.rope_kinds import rope_kind
from kvboost_edge.models.onnx.file import OnnxTensor
from kvboost_edge.models.onnx.rope_tables import rope_difference, rope_settings

POSITIONS = 4096
DIM = 64


def tables(folder, cosines, sines, kind=np.float32):
    """Write tables to separate files, with the data starting at byte 0."""
    found = []
    for name, values in (("cos", cosines), ("sin", sines)):
        data = values.astype(kind)
        (folder / name).write_bytes(data.tobytes())
        dtype = {np.float32: "F32", np.float16: "F16"}[kind]
        found.append(OnnxTensor(name, dtype, data.shape, folder / name, 0, data.nbytes))
    return found[0], found[1]


def of_kind(folder, rope, positions=POSITIONS, kind=np.float32):
    angles = np.arange(positions, dtype=np.float32)[:, None] * np.array(
        rope.frequencies, dtype=np.float32
    )
    return tables(folder, np.cos(angles) * rope.factor, np.sin(angles) * rope.factor, kind)


@pytest.mark.parametrize("theta", [1e3, 1e4, 123457.0, 5e5, 1e6, 1e7])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_rope_theta_is_recovered_from_tables(theta, dim, tmp_path):
    rope = rope_kind({"rope_theta": theta}, dim, POSITIONS)
    found = rope_settings(of_kind(tmp_path, rope), dim, POSITIONS)
    assert found["rope_type"] == "default"
    assert found["rope_theta"] == pytest.approx(theta, rel=1e-5)


@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
def test_rope_theta_is_recovered_from_half_precision(theta, tmp_path):
    rope = rope_kind({"rope_theta": theta}, DIM, POSITIONS)
    found = rope_settings(of_kind(tmp_path, rope, kind=np.float16), DIM, POSITIONS)
    assert found == {"rope_type": "default", "rope_theta": theta}


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ],
    ids=lambda settings: settings["rope_type"],
)
def test_scaled_rope_is_recovered(settings, tmp_path):
    rope = rope_kind(settings, DIM, POSITIONS)
    found = rope_kind(rope_settings(of_kind(tmp_path, rope), DIM, POSITIONS), DIM, POSITIONS)
    np.testing.assert_allclose(found.frequencies, rope.frequencies, rtol=2e-6)
    assert found.half == rope.half


def test_unsupported_scaled_rope_is_refused(tmp_path):
    """The tables include cosines with a factor (YaRN), frequencies that change at a position
    (longrope), and tables that are not RoPE at all.
    """
    rope = rope_kind({"rope_theta": 1e4}, DIM, POSITIONS)
    angles = np.arange(POSITIONS, dtype=np.float64)[:, None] * np.array(rope.frequencies)
    long = np.where(np.arange(POSITIONS)[:, None] < 2048, angles, angles / 4)
    noise = np.random.default_rng(0).standard_normal((2, POSITIONS, DIM // 2))
    for cosines, sines in (
        (1.2 * np.cos(angles), 1.2 * np.sin(angles)),
        (np.cos(long), np.sin(long)),
        (noise[0], noise[1]),
        (np.full_like(angles, np.nan), np.sin(angles)),
        (np.cos(angles)[:1], np.sin(angles)[:1]),
    ):
        with pytest.raises(ModelFormatError, match="rope"):
            rope_settings(tables(tmp_path, cosines, sines), DIM, POSITIONS)


def test_the_first_difference_is_named(tmp_path):
    rope = rope_kind({"rope_theta": 1e4}, DIM, POSITIONS)
    made = of_kind(tmp_path, rope)
    assert rope_difference(made, rope, POSITIONS) == ""
    other = rope_kind({"rope_theta": 1.01e4}, DIM, POSITIONS)
    assert "table 'cos' has" in rope_difference(
        made, other, POSITIONS
    ) or "table 'sin' has" in rope_difference(made, other, POSITIONS)
    assert "has 4096 positions" in rope_difference(made, rope, POSITIONS + 1)
    half = rope_kind({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, DIM, POSITIONS)
    assert "RoPE has 16 pairs" in rope_difference(made, half, POSITIONS)
