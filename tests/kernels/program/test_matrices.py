"""The linear kernels against their NumPy specification: integers exactly, floats but for the oracle's fma."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from helpers.kernels.linear_driver import (
    PLAIN,
    Extra,
    Program,
    assert_gated_in_one,
    matrix_fields,
    panel_sizes,
    run_linear,
)
from kvboost_edge.kernels.attention.rope import RopeTable
from kvboost_edge.kernels.linear.weights import KINDS, QUANTIZED, PackedRows, pack_rows, packed_sizes
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.activations import ACT_RELU2, ACT_SILU
from kvboost_edge.kernels.reference import linear as reference
from kvboost_edge.kernels.reference.weights import unpack_rows

Floats = npt.NDArray[np.float32]
SHAPES = [(1, 16, 32), (2, 50, 100), (3, 33, 64), (5, 16, 31), (15, 130, 96), (16, 7, 1500)]


def _linear(kind: str, x: Floats, w: Floats, extra: Extra = PLAIN) -> tuple[Floats, PackedRows]:
    """x [tokens, inputs] through quantization and a matrix; also the packed weights."""
    packed = pack_rows(w, KINDS[kind])
    assert [array.size for array in packed[:3]] == list(packed_sizes(*w.shape, KINDS[kind]))
    out, panel = run_linear(kind, x, packed, len(w), extra)
    if kind in QUANTIZED:
        expected = reference.pack_panel(x, kind, panel_sizes(len(x), extra), fine=extra.fine)
        np.testing.assert_array_equal(panel[: expected.size], expected)
    return out, packed


def _oracle(kind: str, x: Floats, packed: PackedRows, rows: int, fine: bool = False) -> Floats:
    inputs = x.shape[1]
    if kind in ("f32", "bf16"):
        stored = packed.codes.view(np.float32 if kind == "f32" else np.uint16)
        return reference.linear_float(x, reference.unpack_floats(stored, rows, inputs))
    codes = reference.unpack_codes(packed.codes, rows, inputs, 8 if kind == "int8" else 4)
    scales = reference.unpack_scales(packed.scales.view(np.float16), rows, inputs)
    minima = None
    if kind == "int4-asym":
        codes, minima = codes + 8, reference.unpack_scales(packed.minima.view(np.float16), rows, inputs)
    quantized, token_scales, _ = reference.quantize_rows(x, fine=fine)
    return reference.linear_int(quantized, token_scales, codes, scales, minima)[:, :rows]


def _data(tokens: int, rows: int, inputs: int) -> tuple[Floats, Floats]:
    rng = np.random.default_rng(tokens * 1000 + rows)
    x, w = rng.standard_normal((tokens, inputs)), rng.standard_normal((rows, inputs))
    return x.astype(np.float32), w.astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_equals_the_specification(kind: str, shape: tuple[int, int, int]) -> None:
    x, w = _data(*shape)
    out, packed = _linear(kind, x, w)
    np.testing.assert_allclose(out, _oracle(kind, x, packed, len(w)), rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("shape", SHAPES)
def test_fine_codes_equal_the_specification(kind: str, shape: tuple[int, int, int]) -> None:
    x, w = _data(*shape)
    out, packed = _linear(kind, x, w, Extra(fine=True))
    np.testing.assert_allclose(out, _oracle(kind, x, packed, len(w), fine=True), rtol=1e-6, atol=2e-6)
    exact = x.astype(np.float64) @ unpack_rows(packed, len(w), x.shape[1], kind).T
    assert np.linalg.norm(out - exact) <= 1e-4 * np.linalg.norm(exact)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_integer_sums_are_exact_at_the_extremes(kind: str) -> None:
    """One group with scales of one: the output is the integer sum itself."""
    rng = np.random.default_rng(1)
    top = 127 if kind == "int8" else 7
    w = rng.choice([-top, top], (64, 32)).astype(np.float32)
    x = rng.choice([-127, 127], (9, 32)).astype(np.float32)
    w[0], w[1], x[0] = top, -top, 127
    out, packed = _linear(kind, x, w)
    signed = reference.unpack_codes(packed.codes, 64, 32, 8 if kind == "int8" else 4)
    quantized, _, _ = reference.quantize_rows(x)
    sums = reference.group_sums(quantized, signed)[:, :, 0]
    row_scales = reference.unpack_scales(packed.scales.view(np.float16), 64, 32)[:, 0]
    np.testing.assert_array_equal(out, sums * row_scales)


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_the_same_in_any_batch_and_on_any_thread(kind: str, fine: bool) -> None:
    x, w = _data(23, 130, 200)
    alone = np.concatenate([_linear(kind, row[None], w, Extra(fine=fine))[0] for row in x])
    for threads in (1, 2):
        np.testing.assert_array_equal(_linear(kind, x, w, Extra(threads=threads, fine=fine))[0], alone)


@pytest.mark.parametrize("tokens", [3, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_bias_residual_and_factor(kind: str, tokens: int) -> None:
    x, w = _data(tokens, 40, 64)
    bias, before = np.linspace(-1, 1, 40, dtype=np.float32), np.arange(40 * tokens, dtype=np.float32).reshape(-1, 40)
    plain = _linear(kind, x, w)[0]
    np.testing.assert_array_equal(_linear(kind, x, w, Extra(bias=bias))[0], plain + bias)
    exact = before + (plain + bias).astype(np.float64) * 0.25
    np.testing.assert_array_equal(_linear(kind, x, w, Extra(bias, before, 0.25))[0], exact.astype(np.float32))


def test_zero_rows_and_tiny_values_quantize_to_zero() -> None:
    x = np.zeros((2, 64), np.float32)
    x[1, 40] = 1e-35
    out, _ = _linear("int8", x, np.ones((16, 64), np.float32))
    np.testing.assert_array_equal(out, 0)


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_does_not_become_a_number(kind: str, fine: bool, bad: float) -> None:
    """The rows of that token are NaN or infinite; those of others are as without it."""
    x, w = _data(9, 40, 96)
    clean = _linear(kind, x, w, Extra(fine=fine))[0]
    x[4, 50] = bad
    packed = pack_rows(w, KINDS[kind])
    out = run_linear(kind, x, packed, len(w), Extra(fine=fine))[0]
    assert not np.isfinite(out[4]).any()
    np.testing.assert_array_equal(np.delete(out, 4, axis=0), np.delete(clean, 4, axis=0))


@pytest.mark.parametrize("gelu", [False, True])
def test_activation(gelu: bool) -> None:
    rng = np.random.default_rng(3)
    both = (8 * rng.standard_normal((3, 2 * 1100))).astype(np.float32)
    both[0, :4] = [-200, 200, 0, -88]
    program = Program(3)
    wide, out = np.zeros((3, 2304), np.float32), np.full((3, 1120), np.nan, np.float32)
    wide[:, :2200] = both
    program.buffer(lt.B_WIDE, wide)
    program.buffer(lt.B_NORMED, out)
    fields = {lt.F_SRC: lt.B_WIDE, lt.F_SRC_STEP: 2304, lt.F_DST: lt.B_NORMED, lt.F_DST_STEP: 1120}
    program.add(lt.OP_ACT, {**fields, lt.F_COUNT: 1100, lt.F_ACT: int(gelu)})
    program.run()
    expected = reference.activate_rows(both[:, :1100], both[:, 1100:], gelu=gelu)
    np.testing.assert_allclose(out[:, :1100], expected, rtol=2e-6, atol=1e-5)
    np.testing.assert_array_equal(out[:, 1100:], 0)


def test_the_activation_without_a_gate() -> None:
    """What is read as the way up has no meaning, NaN or not; a NaN of its own stays."""
    x = (8 * np.random.default_rng(4).standard_normal((3, 1120))).astype(np.float32)
    x[0, :4], x[2, 7] = [-200, 200, 0, -1e-30], np.nan
    program, out = Program(3), np.full((3, 1120), np.nan, np.float32)
    program.buffer(lt.B_WIDE, x)
    program.buffer(lt.B_BESIDE, np.full((3, 1120), np.nan, np.float32))
    program.buffer(lt.B_NORMED, out)
    fields = {lt.F_SRC: lt.B_WIDE, lt.F_SRC_STEP: 1120, lt.F_DST: lt.B_NORMED, lt.F_DST_STEP: 1120}
    by = {lt.F_BY: lt.B_BESIDE, lt.F_BY_STEP: 1120}
    program.add(lt.OP_ACT, {**fields, **by, lt.F_COUNT: 1100, lt.F_ACT: ACT_RELU2})
    program.run()
    np.testing.assert_array_equal(out[:, :1100], reference.squared_rows(x[:, :1100]))
    np.testing.assert_array_equal(out[:, 1100:], 0)


@pytest.mark.parametrize("act", [ACT_SILU, ACT_RELU2])
@pytest.mark.parametrize("tokens", [1, 3, 8, 15])
@pytest.mark.parametrize("kinds", [("int4", "int4"), ("int8", "int4-asym"), ("int4-asym", "int8")])
def test_gated_in_one_operation_is_the_three_apart(kinds: tuple[str, str], tokens: int, act: int) -> None:
    """kinds: of the gate and up matrix, or of up alone, and of the reader of what comes out."""
    inner, hidden, parts = 96, 64, 1 if act == ACT_RELU2 else 2
    x, w = _data(tokens, parts * inner, hidden)
    bias = np.linspace(-1, 1, parts * inner, dtype=np.float32)
    wide, packed = _linear(kinds[0], x, w, Extra(bias=bias))
    assert_gated_in_one(kinds, x, wide, packed, bias, act)


@pytest.mark.parametrize("kind", KINDS)
def test_embedding_rows_are_the_stored_weights(kind: str) -> None:
    _, w = _data(1, 50, 100)
    packed = pack_rows(w, KINDS[kind])
    ids, out = np.array([49, 0, 17]), np.full((3, 128), np.nan, np.float32)
    program = Program(3)
    program.buffer(lt.B_TOKENS, ids)
    program.buffer(lt.B_HIDDEN, out)
    fields = {lt.F_DST: lt.B_HIDDEN, lt.F_DST_STEP: 128, lt.F_COUNT: 100, lt.F_KIND: KINDS[kind]}
    program.add(lt.OP_EMBED, {**fields, **matrix_fields(program, packed)}, {lt.P_FACTOR: 2.0})
    program.run()
    np.testing.assert_allclose(out[:, :100], 2 * unpack_rows(packed, 50, 100, kind)[ids], rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(out[:, 100:], 0)


@pytest.mark.parametrize("count", [64, 80, 90])
def test_norm(count: int) -> None:
    rng = np.random.default_rng(4)
    x, weight = rng.standard_normal((2, 96)).astype(np.float32), rng.standard_normal(96).astype(np.float32)
    out = np.full((2, 96), np.nan, np.float32)
    program = Program(2)
    program.buffer(lt.B_HIDDEN, x)
    program.buffer(lt.B_NORMED, out)
    fields = {lt.F_SRC: lt.B_HIDDEN, lt.F_SRC_STEP: 96, lt.F_DST: lt.B_NORMED, lt.F_DST_STEP: 96}
    program.add(lt.OP_NORM, {**fields, lt.F_COUNT: count, lt.F_WEIGHT: weight.ctypes.data}, {lt.P_EPS: 1e-6})
    program.run()
    expected = reference.norm_rows(x[:, :count], weight[:count], 1e-6)
    np.testing.assert_allclose(out[:, :count], expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(out[:, count:], 0)


def test_rope_splits_and_rotates() -> None:
    rng = np.random.default_rng(5)
    heads, kv_heads, dim, half = 4, 2, 20, 6
    row = (heads + 2 * kv_heads) * dim
    x, positions = rng.standard_normal((3, row)).astype(np.float32), np.array([0, 7, 1500])
    table = RopeTable(1 / 1000 ** (np.arange(half) / half).astype(np.float32))
    table.cover(1501)
    out = [np.empty((3, n, dim), np.float32) for n in (heads, kv_heads, kv_heads)]
    program = Program(3)
    program.buffer(lt.B_WIDE, x)
    program.buffer(lt.B_POSITIONS, positions)
    for number, array in zip((lt.B_QUERY, lt.B_KEY, lt.B_VALUE), out, strict=True):
        program.buffer(number, array)
    program.buffer(lt.B_TABLES, table.cos)
    program.buffer(lt.B_TABLES + 1, table.sin)
    fields = {lt.F_SRC: lt.B_WIDE, lt.F_SRC_STEP: row, lt.F_TABLE: lt.B_TABLES, lt.F_HALF: half}
    program.add(lt.OP_ROPE, {**fields, lt.F_HEADS: heads, lt.F_KV_HEADS: kv_heads, lt.F_DIM: dim})
    program.run()
    split = np.split(x.reshape(3, -1, dim), [heads, heads + kv_heads], axis=1)
    cos, sin = table.cos[positions], table.sin[positions]
    for array, source, turned in zip(out, split, (True, True, False), strict=True):
        for head in range(array.shape[1]):
            expected = reference.rotate(source[:, head], cos, sin) if turned else source[:, head]
            np.testing.assert_allclose(array[:, head], expected, rtol=1e-6, atol=1e-6)


def test_rope_rows_do_not_depend_on_how_the_table_grew() -> None:
    frequencies = np.array([1.0, 0.01], np.float32)
    at_once, slowly = RopeTable(frequencies, 1.5), RopeTable(frequencies, 1.5)
    at_once.cover(3000)
    for positions in (1, 5, 1025, 3000):
        slowly.cover(positions)
    np.testing.assert_array_equal(at_once.cos, slowly.cos)
    np.testing.assert_array_equal(at_once.sin, slowly.sin)
