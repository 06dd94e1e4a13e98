"""Matrices of q4k, q5k and q6k: their weights are those of the file, their results those of the specification."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType, quants

from helpers.kernels.block_weights import random_blocks
from helpers.kernels.linear_driver import (
    PLAIN,
    Extra,
    Program,
    assert_gated_in_one,
    matrix_fields,
    panel_sizes,
    run_linear,
)
from kvboost_edge.kernels.linear.blocks import pack_blocks
from kvboost_edge.kernels.linear.panel import LARGEST_CELL
from kvboost_edge.kernels.linear.weights import BLOCK_FORMATS, NUMBERS, PackedRows, packed_sizes
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.reference import linear as reference
from kvboost_edge.kernels.reference.weights import unpack_rows

Floats = npt.NDArray[np.float32]
TYPES = {"q4k": GGMLQuantizationType.Q4_K, "q5k": GGMLQuantizationType.Q5_K, "q6k": GGMLQuantizationType.Q6_K}
SHAPES = [(1, 16, 256), (2, 50, 512), (3, 33, 256), (5, 7, 768), (15, 130, 256)]


def _x(tokens: int, inputs: int) -> Floats:
    """The first group of the first token has codes of the largest magnitude."""
    x = np.random.default_rng(tokens).standard_normal((tokens, inputs)).astype(np.float32)
    x[0, :32] = 1
    return x


def _linear(kind: str, x: Floats, rows: int, extra: Extra = PLAIN) -> tuple[Floats, PackedRows]:
    packed = pack_blocks(random_blocks(kind, rows, x.shape[1] // 256), NUMBERS[kind])
    out, panel = run_linear(kind, x, packed, rows, extra)
    expected = reference.pack_panel(x, kind, panel_sizes(len(x), extra), fine=extra.fine)
    np.testing.assert_array_equal(panel[: expected.size], expected)
    return out, packed


def _oracle(kind: str, x: Floats, packed: PackedRows, rows: int, fine: bool) -> Floats:
    codes = reference.unpack_block_codes(packed.codes, rows, x.shape[1], kind)
    blocks = packed.minima.view(np.float16)
    scales, minima = reference.unpack_block_scales(packed.scales, blocks, rows, x.shape[1], kind)
    quantized, token_scales, _ = reference.quantize_rows(x, fine=fine)
    return reference.linear_int(quantized, token_scales, codes, scales, minima)[:, :rows]


@pytest.mark.parametrize("rows", [16, 37])
@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_weights_are_those_of_the_file_to_the_bit(kind: str, rows: int) -> None:
    raw = random_blocks(kind, rows, 3)
    packed = pack_blocks(raw, NUMBERS[kind])
    assert tuple(array.size for array in packed[:3]) == packed_sizes(rows, 768, NUMBERS[kind])
    expected = quants.dequantize(raw, TYPES[kind])
    np.testing.assert_array_equal(unpack_rows(packed, rows, 768, kind), expected)


@pytest.mark.parametrize(("kind", "most"), [("q4k", 1.028), ("q5k", 1.023), ("q6k", 1.0)])
def test_packed_sizes_are_nearly_the_files(kind: str, most: float) -> None:
    assert sum(packed_sizes(160, 2048, NUMBERS[kind])) <= most * random_blocks(kind, 160, 8).nbytes


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("kind", BLOCK_FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_equals_the_specification(kind: str, shape: tuple[int, int, int], fine: bool) -> None:
    tokens, rows, inputs = shape
    x = _x(tokens, inputs)
    out, packed = _linear(kind, x, rows, Extra(fine=fine))
    expected = _oracle(kind, x, packed, rows, fine)
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=2e-6 * np.abs(expected).max())
    exact = x.astype(np.float64) @ unpack_rows(packed, rows, inputs, kind).T.astype(np.float64)
    assert np.linalg.norm(out - exact) <= (1e-4 if fine else 2e-2) * np.linalg.norm(exact)


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_a_token_is_the_same_in_any_batch_and_on_any_thread(kind: str, fine: bool) -> None:
    x = _x(23, 512)
    alone = np.concatenate([_linear(kind, row[None], 130, Extra(fine=fine))[0] for row in x])
    for threads in (1, 2):
        np.testing.assert_array_equal(_linear(kind, x, 130, Extra(threads=threads, fine=fine))[0], alone)


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_bias_residual_and_factor(kind: str) -> None:
    x = _x(9, 256)
    bias, before = np.linspace(-1, 1, 40, dtype=np.float32), np.arange(360, dtype=np.float32).reshape(-1, 40)
    plain = _linear(kind, x, 40)[0]
    exact = before + (plain + bias).astype(np.float64) * 0.25
    np.testing.assert_array_equal(_linear(kind, x, 40, Extra(bias, before, 0.25))[0], exact.astype(np.float32))


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("kind", BLOCK_FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_does_not_become_a_number(kind: str, fine: bool, bad: float) -> None:
    x = _x(9, 256)
    clean = _linear(kind, x, 40, Extra(fine=fine))[0]
    x[4, 50] = bad
    packed = pack_blocks(random_blocks(kind, 40, 1), NUMBERS[kind])
    out = run_linear(kind, x, packed, 40, Extra(fine=fine))[0]
    assert not np.isfinite(out[4]).any()
    np.testing.assert_array_equal(np.delete(out, 4, axis=0), np.delete(clean, 4, axis=0))


@pytest.mark.parametrize("fine", [False, True])
def test_matrices_of_different_block_formats_read_one_panel(fine: bool) -> None:
    """Rows of q4k, then of q6k, in one destination: each as it is alone."""
    tokens, rows, inputs = 11, 48, 512
    x = _x(tokens, inputs)
    packed = {kind: pack_blocks(random_blocks(kind, rows, 2), NUMBERS[kind]) for kind in ("q4k", "q6k")}
    program = Program(tokens)
    out, panel = np.zeros((tokens, 2 * rows), np.float32), np.zeros(tokens * 16 * LARGEST_CELL, np.uint8)
    program.buffer(lt.B_ATTENDED, x)
    program.buffer(lt.B_PANEL, panel)
    program.buffer(lt.B_WIDE, out)
    source = {lt.F_SRC: lt.B_ATTENDED, lt.F_SRC_STEP: inputs, lt.F_COUNT: inputs, lt.F_FINE: int(fine)}
    program.add(lt.OP_QUANT, {**source, lt.F_QUANT: NUMBERS["q4k"], lt.F_PANEL: lt.B_PANEL})
    for index, (kind, one) in enumerate(packed.items()):
        matrix = {**matrix_fields(program, one), lt.F_KIND: NUMBERS[kind], lt.F_INPUTS: inputs, lt.F_UNIT: 2}
        target = {lt.F_DST: lt.B_WIDE, lt.F_DST_STEP: 2 * rows, lt.F_DST_FIRST: index * rows, lt.F_COUNT: rows}
        program.add(lt.OP_LINEAR, {**matrix, **target, lt.F_PANEL_IN: lt.B_PANEL, lt.F_FINE_IN: int(fine)})
    program.run(2)
    alone = [_linear(kind, x, rows, Extra(fine=fine))[0] for kind in packed]
    np.testing.assert_array_equal(out, np.concatenate(alone, axis=1))


@pytest.mark.parametrize("tokens", [1, 8, 15])
@pytest.mark.parametrize("kinds", [("q4k", "q6k"), ("q5k", "q4k"), ("q6k", "q5k"), ("q4k", "int8")])
def test_gated_in_one_operation_is_the_three_apart(kinds: tuple[str, str], tokens: int) -> None:
    """kinds: of the gate and up matrix, and of the reader of what comes out."""
    x = _x(tokens, 256)
    wide, packed = _linear(kinds[0], x, 2 * 256)
    assert_gated_in_one(kinds, x, wide, packed)


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_embedding_rows_are_the_stored_weights(kind: str) -> None:
    raw = random_blocks(kind, 50, 3)
    ids, out = np.array([49, 0, 17]), np.full((3, 768), np.nan, np.float32)
    program = Program(3)
    program.buffer(lt.B_TOKENS, ids)
    program.buffer(lt.B_HIDDEN, out)
    fields = {lt.F_DST: lt.B_HIDDEN, lt.F_DST_STEP: 768, lt.F_COUNT: 768, lt.F_KIND: NUMBERS[kind]}
    program.add(lt.OP_EMBED, {**fields, **matrix_fields(program, pack_blocks(raw, NUMBERS[kind]))})
    program.run()
    np.testing.assert_array_equal(out, quants.dequantize(raw[ids], TYPES[kind]))
