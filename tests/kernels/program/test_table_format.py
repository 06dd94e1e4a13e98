"""Matrices of int4t, whose codes are looked up in a table of their tile: results are those of the specification."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from helpers.kernels.block_weights import random_blocks, random_table_rows
from helpers.kernels.linear_driver import (
    PLAIN,
    Extra,
    Program,
    assert_gated_in_one,
    matrix_fields,
    panel_sizes,
    run_linear,
)
from kvboost_edge.errors import ConfigError
from kvboost_edge.kernels.linear.blocks import pack_blocks
from kvboost_edge.kernels.linear.panel import LARGEST_CELL
from kvboost_edge.kernels.linear.weights import NUMBERS, PackedRows, pack_codes, pack_rows, packed_sizes
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.reference import linear as reference
from kvboost_edge.kernels.reference.weights import unpack_rows

Floats = npt.NDArray[np.float32]
KIND = "int4t"
SHAPES = [(1, 16, 32), (2, 50, 100), (3, 33, 256), (5, 7, 31), (15, 130, 96), (16, 70, 1440)]


def _x(tokens: int, inputs: int) -> Floats:
    """The first group of the first token has codes of the largest magnitude."""
    x = np.random.default_rng(tokens).standard_normal((tokens, inputs)).astype(np.float32)
    x[0, :32] = 1
    return x


def _linear(x: Floats, rows: int, extra: Extra = PLAIN) -> tuple[Floats, PackedRows]:
    packed = random_table_rows(rows, x.shape[1])
    out, panel = run_linear(KIND, x, packed, rows, extra)
    expected = reference.pack_panel(x, KIND, panel_sizes(len(x), extra), fine=extra.fine)
    np.testing.assert_array_equal(panel[: expected.size], expected)
    return out, packed


def _oracle(x: Floats, packed: PackedRows, rows: int, *, fine: bool = False) -> Floats:
    codes = reference.unpack_table_codes(packed.codes, packed.minima, rows, x.shape[1])
    scales = reference.unpack_scales(packed.scales.view(np.float16), rows, x.shape[1])
    quantized, token_scales, _ = reference.quantize_rows(x, fine=fine)
    return reference.linear_int(quantized, token_scales, codes, scales)[:, :rows]


@pytest.mark.parametrize(("rows", "inputs"), [(16, 32), (37, 100)])
def test_packed_rows_are_scales_times_entries_of_the_table(rows: int, inputs: int) -> None:
    rng = np.random.default_rng(1)
    table = rng.permutation(256)[:16].astype(np.uint8).view(np.int8)
    codes = rng.integers(0, 16, (rows, inputs)).astype(np.uint8)
    scales = rng.standard_normal((rows, -(-inputs // 32))).astype(np.float16)
    packed = pack_codes(codes, scales, None, NUMBERS[KIND], table)
    assert tuple(array.size for array in packed[:3]) == packed_sizes(rows, inputs, NUMBERS[KIND])
    wide = scales.astype(np.float32).repeat(32, axis=1)[:, :inputs]
    np.testing.assert_array_equal(unpack_rows(packed, rows, inputs, KIND), wide * table[codes])


def test_tables_take_next_to_nothing() -> None:
    both = [sum(packed_sizes(9728, 2560, NUMBERS[kind])) for kind in (KIND, "int4")]
    assert both[0] / both[1] < 1.001
    assert both[1] == 9728 * 2560 * 0.5625


def test_codes_without_their_table_are_refused() -> None:
    codes, scales = np.zeros((16, 32), np.uint8), np.ones((16, 1), np.float16)
    table = np.zeros(16, np.int8)
    for kind, given in ((KIND, None), (KIND, table[:8]), ("int4", table)):
        with pytest.raises(ConfigError, match="table"):
            pack_codes(codes, scales, None, NUMBERS[kind], given)
    with pytest.raises(ConfigError, match="code 16 of weight kind 9 is above 15"):
        pack_codes(codes + np.uint8(16), scales, None, NUMBERS[KIND], table)
    with pytest.raises(ConfigError, match="with minima"):
        pack_codes(codes, scales, scales, NUMBERS[KIND], table)
    with pytest.raises(ConfigError, match="floats are not packed as weight kind 9"):
        pack_rows(np.ones((16, 32), np.float32), NUMBERS[KIND])


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_equals_the_specification(shape: tuple[int, int, int], fine: bool) -> None:
    tokens, rows, inputs = shape
    x = _x(tokens, inputs)
    out, packed = _linear(x, rows, Extra(fine=fine))
    expected = _oracle(x, packed, rows, fine=fine)
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=2e-6 * np.abs(expected).max())
    exact = x.astype(np.float64) @ unpack_rows(packed, rows, inputs, KIND).T.astype(np.float64)
    assert np.linalg.norm(out - exact) <= (1e-4 if fine else 2e-2) * np.linalg.norm(exact)


def test_integer_sums_are_exact_at_the_extremes() -> None:
    """One group with scales of one: the output is the integer sum itself, of bytes from -128 to 127."""
    rng = np.random.default_rng(1)
    x = rng.choice([-127, 127], (9, 32)).astype(np.float32)
    x[0] = 127
    table = np.array([-128, 127, *range(-7, 7)], np.int8)
    codes = rng.integers(0, 2, (64, 32)).astype(np.uint8)
    codes[0], codes[1] = 0, 1
    packed = pack_codes(codes, np.ones((64, 1), np.float16), None, NUMBERS[KIND], table)
    out, _ = run_linear(KIND, x, packed, 64, PLAIN)
    np.testing.assert_array_equal(out, x @ table[codes].astype(np.float32).T)


@pytest.mark.parametrize("fine", [False, True])
def test_a_token_is_the_same_in_any_batch_and_on_any_thread(fine: bool) -> None:
    x = _x(23, 200)
    alone = np.concatenate([_linear(row[None], 130, Extra(fine=fine))[0] for row in x])
    for threads in (1, 2):
        np.testing.assert_array_equal(_linear(x, 130, Extra(threads=threads, fine=fine))[0], alone)


@pytest.mark.parametrize("inputs", [32, 2880])
def test_codes_of_int4_give_the_bits_of_int4(inputs: int) -> None:
    """The table of Q4_0: the same integers, and the same epilogue."""
    x, rng = _x(11, inputs), np.random.default_rng(2)
    codes = rng.integers(0, 16, (40, inputs)).astype(np.uint8)
    scales = (0.01 * rng.standard_normal((40, inputs // 32))).astype(np.float16)
    other = run_linear("int4", x, pack_codes(codes, scales, None, NUMBERS["int4"]), 40, PLAIN)[0]
    table = np.arange(-8, 8, dtype=np.int8)
    out = run_linear(KIND, x, pack_codes(codes, scales, None, NUMBERS[KIND], table), 40, PLAIN)[0]
    np.testing.assert_array_equal(out, other)


def test_bias_residual_and_factor() -> None:
    x = _x(9, 256)
    bias, before = np.linspace(-1, 1, 40, dtype=np.float32), np.arange(360, dtype=np.float32).reshape(-1, 40)
    plain = _linear(x, 40)[0]
    exact = before + (plain + bias).astype(np.float64) * 0.25
    np.testing.assert_array_equal(_linear(x, 40, Extra(bias, before, 0.25))[0], exact.astype(np.float32))


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_does_not_become_a_number(fine: bool, bad: float) -> None:
    x = _x(9, 96)
    clean = _linear(x, 40, Extra(fine=fine))[0]
    x[4, 50] = bad
    out = run_linear(KIND, x, random_table_rows(40, 96), 40, Extra(fine=fine))[0]
    assert not np.isfinite(out[4]).any()
    np.testing.assert_array_equal(np.delete(out, 4, axis=0), np.delete(clean, 4, axis=0))


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("kinds", [(KIND, "q5k"), ("q4k", KIND), (KIND, "q6k")])
def test_it_reads_the_panels_of_block_formats(kinds: tuple[str, str], fine: bool) -> None:
    """Rows of one format, then of another, in one destination: each as it is alone."""
    tokens, rows, inputs = 11, 48, 512
    x = _x(tokens, inputs)
    packed = {
        kind: random_table_rows(rows, inputs)
        if kind == KIND
        else pack_blocks(random_blocks(kind, rows, 2), NUMBERS[kind])
        for kind in kinds
    }
    program = Program(tokens)
    out, panel = np.zeros((tokens, 2 * rows), np.float32), np.zeros(tokens * 16 * LARGEST_CELL, np.uint8)
    program.buffer(lt.B_ATTENDED, x)
    program.buffer(lt.B_PANEL, panel)
    program.buffer(lt.B_WIDE, out)
    source = {lt.F_SRC: lt.B_ATTENDED, lt.F_SRC_STEP: inputs, lt.F_COUNT: inputs, lt.F_FINE: int(fine)}
    program.add(lt.OP_QUANT, {**source, lt.F_QUANT: NUMBERS[kinds[0]], lt.F_PANEL: lt.B_PANEL})
    for index, (kind, one) in enumerate(packed.items()):
        matrix = {**matrix_fields(program, one), lt.F_KIND: NUMBERS[kind], lt.F_INPUTS: inputs, lt.F_UNIT: 2}
        target = {lt.F_DST: lt.B_WIDE, lt.F_DST_STEP: 2 * rows, lt.F_DST_FIRST: index * rows, lt.F_COUNT: rows}
        program.add(lt.OP_LINEAR, {**matrix, **target, lt.F_PANEL_IN: lt.B_PANEL, lt.F_FINE_IN: int(fine)})
    program.run(2)
    alone = [run_linear(kind, x, one, rows, Extra(fine=fine))[0] for kind, one in packed.items()]
    np.testing.assert_array_equal(out, np.concatenate(alone, axis=1))


@pytest.mark.parametrize("tokens", [1, 8, 15])
@pytest.mark.parametrize("reader", [KIND, "int4", "q6k"])
def test_gated_in_one_operation_is_the_three_apart(reader: str, tokens: int) -> None:
    """reader: of what comes out."""
    x = _x(tokens, 96)
    wide, packed = _linear(x, 2 * 256)
    assert_gated_in_one((KIND, reader), x, wide, packed)


def test_embedding_rows_are_the_stored_weights() -> None:
    packed = random_table_rows(50, 100)
    ids, out = np.array([49, 0, 17]), np.full((3, 128), np.nan, np.float32)
    program = Program(3)
    program.buffer(lt.B_TOKENS, ids)
    program.buffer(lt.B_HIDDEN, out)
    fields = {lt.F_DST: lt.B_HIDDEN, lt.F_DST_STEP: 128, lt.F_COUNT: 100, lt.F_KIND: NUMBERS[KIND]}
    program.add(lt.OP_EMBED, {**fields, **matrix_fields(program, packed)})
    program.run()
    np.testing.assert_array_equal(out[:, :100], unpack_rows(packed, 50, 100, KIND)[ids])
    np.testing.assert_array_equal(out[:, 100:], 0)
