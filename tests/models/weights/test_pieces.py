"""Matrices that are stored as one and read as several: each piece has the rows of the whole, in
every storage format.
"""

import numpy as np
import pytest
from safetensors.numpy import save_file

from helpers.raising import assert_raises
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.families.ssm import MAMBA_KEYS, ssd_mixer, ssd_names
from kvboost_edge.models.weights.reordered import PieceSource, mixer_pieces
from kvboost_edge.models.weights.safetensors_source import SafetensorsSource
from kvboost_edge.models.weights.weight_source import QuantRows

SIZES = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
}
MIXER = ssd_mixer(SIZES, MAMBA_KEYS, "gated_before")
NAMES = ssd_names("mamba", MIXER, conv_bias=True)
PLACES = {
    "mamba.in_proj_z": (0, 64),
    "mamba.in_proj_xbc": (64, 256),
    "mamba.in_proj_dt": (256, 260),
}
STORED = "model.layers.0.mamba.in_proj.weight"
OTHER = "model.layers.0.mamba.out_proj.weight"
MATRIX = np.arange(260 * 8, dtype=np.float32).reshape(260, 8)


class Quantized(SafetensorsSource):
    """A source that returns codes instead of floats."""

    def kind(self, name):
        return "int8" if name == STORED else None

    def quant_rows(self, name, start, stop):
        assert name == STORED
        codes = np.arange(260 * 8).reshape(260, 8)[start:stop] % 251
        return QuantRows(
            "int8", codes.astype(np.uint8), np.arange(260, dtype=np.float16)[start:stop, None]
        )


@pytest.fixture
def source(tmp_path):
    save_file(
        {STORED: MATRIX, OTHER: MATRIX[:64]},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    return PieceSource(Quantized(tmp_path), NAMES.whole, mixer_pieces(MIXER, NAMES))


def piece_name(piece):
    return f"model.layers.0.{piece}.weight"


def test_pieces_cover_the_mixers_inputs(source):
    assert {*NAMES.inputs, *NAMES.gates} == set(PLACES)
    with source:
        assert source.names() == {OTHER, *map(piece_name, PLACES)}


@pytest.mark.parametrize("piece", PLACES)
def test_a_piece_is_a_range_of_rows(piece, source):
    (first, stop) = PLACES[piece]
    name = piece_name(piece)
    rows = stop - first
    with source:
        assert source.shape(name) == (rows, 8)
        assert (source.type_of(name), source.file_of(name).name) == ("F32", "model.safetensors")
        np.testing.assert_array_equal(source.rows(name), MATRIX[first:stop])
        np.testing.assert_array_equal(source.rows(name, 1, 3), MATRIX[first + 1 : first + 3])
        assert source.kind(name) == "int8"
        np.testing.assert_array_equal(
            source.quant_rows(name, 1, 4).scales[:, 0], np.arange(first + 1, first + 4)
        )
        stored = source.stored_rows(name)
        raw = np.fromfile(stored.path, np.float32, rows * 8, offset=stored.start).reshape(rows, 8)
        np.testing.assert_array_equal(raw, MATRIX[first:stop])
        for start, end in ((0, rows + 1), (-1, 2), (3, 2)):
            assert_raises(ModelFormatError, "are out of range", source.rows, name, start, end)
            assert_raises(ModelFormatError, "are out of range", source.quant_rows, name, start, end)


def test_other_tensors_are_unchanged(source):
    with source:
        assert (source.shape(OTHER), source.kind(OTHER)) == ((64, 8), None)
        np.testing.assert_array_equal(source.rows(OTHER, 2), MATRIX[2:64])
        assert source.stored_rows(OTHER).row_bytes == 32


def test_a_matrix_of_another_size_is_refused(source, tmp_path):
    more = mixer_pieces(MIXER._replace(value_heads=8), NAMES)
    with (
        source,
        PieceSource(Quantized(tmp_path), NAMES.whole, more) as wrong,
        pytest.raises(
            ModelFormatError, match=r"in_proj\.weight' has 260 rows, but the config gives 328"
        ),
    ):
        wrong.shape(piece_name("mamba.in_proj_dt"))
