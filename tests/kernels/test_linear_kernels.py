"""The linear kernels against their NumPy specification: integers exactly, floats but for the oracle's fma."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvboost_edge.kernels import linear_program as lp
from kvboost_edge.kernels import reference_linear as reference
from kvboost_edge.kernels.quant_weights import KINDS, pack_rows, packed_sizes
from kvboost_edge.kernels.rope import RopeTable
from kvboost_edge.kernels.team import KernelTeam

Floats = npt.NDArray[np.float32]
SHAPES = [(1, 16, 32), (2, 50, 100), (3, 33, 64), (5, 16, 31), (15, 130, 96), (16, 7, 1500)]


class Program:
    """One or more operations over buffers of this test."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.buffers = np.zeros(lp.B_TABLES + 2, np.int64)
        self.arrays: list[npt.NDArray[np.generic]] = []
        self.ops: list[npt.NDArray[np.int64]] = []
        self.params: list[Floats] = []

    def buffer(self, number: int, array: npt.NDArray[np.generic]) -> None:
        self.arrays.append(array)
        self.buffers[number] = array.ctypes.data

    def add(self, code: int, fields: dict[int, int], params: dict[int, float] | None = None) -> None:
        row = np.zeros(lp.NUM_FIELDS, np.int64)
        row[lp.F_GATHER] = -1
        row[lp.F_OP] = code
        floats = np.zeros(lp.NUM_PARAMS, np.float32)
        floats[lp.P_FACTOR] = 1.0
        for field, value in fields.items():
            row[field] = value
        for field, number in (params or {}).items():
            floats[field] = number
        self.ops.append(row)
        self.params.append(floats)

    def run(self, threads: int = 1) -> None:
        count = len(self.ops)
        counters = np.zeros(lp.COUNTERS_PER_OP * (count + 1), np.int64)
        job = lp.ProgramJob(np.array(self.ops), np.array(self.params), self.buffers, counters, 0, count, self.tokens)
        team = KernelTeam(threads)
        team.run(lp.run_program, job, counters, lp.COUNTERS_PER_OP * count, threads)
        team.close()


def _linear(
    kind: str,
    x: Floats,
    w: Floats,
    *,
    bias: Floats | None = None,
    add: Floats | None = None,
    factor: float = 1.0,
    threads: int = 1,
) -> tuple[Floats, npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """x [tokens, inputs] through quantization and a matrix; also the packed weights."""
    (tokens, inputs), rows = x.shape, len(w)
    groups, padded = -(-inputs // 32), -(-rows // 16) * 16
    codes, scales = pack_rows(w, KINDS[kind])
    assert (codes.size, scales.size) == packed_sizes(rows, inputs, KINDS[kind])
    program = Program(tokens)
    wide = np.zeros((tokens, groups * 32), np.float32)
    wide[:, :inputs] = x
    out = np.full((tokens, padded), np.nan, np.float32)
    if add is not None:
        out[:, :rows] = add
    biases = np.zeros(padded, np.float32)
    if bias is not None:
        biases[:rows] = bias
    program.buffer(lp.B_ATTENDED, wide)
    program.buffer(lp.B_CODES, np.zeros((tokens, groups * 32), np.int8))
    program.buffer(lp.B_SCALES, np.zeros((tokens, groups), np.float32))
    program.buffer(lp.B_SUMS, np.zeros((tokens, groups), np.int32))
    program.buffer(lp.B_WIDE, out)
    source = {lp.F_SRC: lp.B_ATTENDED, lp.F_SRC_STEP: groups * 32}
    program.add(lp.OP_QUANT, {**source, lp.F_COUNT: inputs, lp.F_QUANT: 1})
    weights = {lp.F_WEIGHT: codes.ctypes.data, lp.F_SCALE: scales.ctypes.data, lp.F_KIND: KINDS[kind], lp.F_UNIT: 2}
    target = {lp.F_DST: lp.B_WIDE, lp.F_DST_STEP: padded, lp.F_COUNT: rows, lp.F_INPUTS: inputs}
    extra = {lp.F_BIAS: 0 if bias is None else biases.ctypes.data, lp.F_ADD: int(add is not None)}
    program.add(lp.OP_LINEAR, {**source, **weights, **target, **extra}, {lp.P_FACTOR: factor})
    program.run(threads)
    expected = reference.quantize_rows(x)
    for array, oracle in zip(program.arrays[1:4], expected, strict=True):
        np.testing.assert_array_equal(array, oracle)
    return out[:, :rows], codes, scales


def _oracle(kind: str, x: Floats, codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8], rows: int) -> Floats:
    inputs = x.shape[1]
    if kind in ("f32", "bf16"):
        stored = codes.view(np.float32 if kind == "f32" else np.uint16)
        return reference.linear_float(x, reference.unpack_floats(stored, rows, inputs))
    signed = reference.unpack_codes(codes, rows, inputs, 8 if kind == "int8" else 4)
    quantized, token_scales, _ = reference.quantize_rows(x)
    wide = reference.unpack_scales(scales.view(np.float16), rows, inputs)
    return reference.linear_int(quantized, token_scales, signed, wide)[:, :rows]


def _data(tokens: int, rows: int, inputs: int) -> tuple[Floats, Floats]:
    rng = np.random.default_rng(tokens * 1000 + rows)
    x, w = rng.standard_normal((tokens, inputs)), rng.standard_normal((rows, inputs))
    return x.astype(np.float32), w.astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_equals_the_specification(kind: str, shape: tuple[int, int, int]) -> None:
    x, w = _data(*shape)
    out, codes, scales = _linear(kind, x, w)
    np.testing.assert_allclose(out, _oracle(kind, x, codes, scales, len(w)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_integer_sums_are_exact_at_the_extremes(kind: str) -> None:
    """One group with scales of one: the output is the integer sum itself."""
    rng = np.random.default_rng(1)
    top = 127 if kind == "int8" else 7
    w = rng.choice([-top, top], (64, 32)).astype(np.float32)
    x = rng.choice([-127, 127], (9, 32)).astype(np.float32)
    w[0], w[1], x[0] = top, -top, 127
    out, codes, scales = _linear(kind, x, w)
    signed = reference.unpack_codes(codes, 64, 32, 8 if kind == "int8" else 4)
    quantized, _, _ = reference.quantize_rows(x)
    sums = reference.group_sums(quantized, signed)[:, :, 0]
    row_scales = reference.unpack_scales(scales.view(np.float16), 64, 32)[:, 0]
    np.testing.assert_array_equal(out, sums * row_scales)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_the_same_in_any_batch_and_on_any_thread(kind: str) -> None:
    x, w = _data(15, 130, 200)
    alone = np.concatenate([_linear(kind, row[None], w)[0] for row in x])
    for threads in (1, 2, 3):
        np.testing.assert_array_equal(_linear(kind, x, w, threads=threads)[0], alone)


@pytest.mark.parametrize("kind", KINDS)
def test_bias_residual_and_factor(kind: str) -> None:
    x, w = _data(3, 40, 64)
    bias, before = np.linspace(-1, 1, 40, dtype=np.float32), np.arange(120, dtype=np.float32).reshape(3, 40)
    plain = _linear(kind, x, w)[0]
    np.testing.assert_array_equal(_linear(kind, x, w, bias=bias)[0], plain + bias)
    exact = before + (plain + bias).astype(np.float64) * 0.25
    np.testing.assert_array_equal(_linear(kind, x, w, bias=bias, add=before, factor=0.25)[0], exact.astype(np.float32))


def test_weights_survive_packing_within_half_a_step() -> None:
    _, w = _data(1, 50, 100)
    for bits, step in ((8, 1 / 127), (4, 1 / 7)):
        codes, scales = pack_rows(w, KINDS[f"int{bits}"])
        wide = reference.unpack_scales(scales.view(np.float16), 50, 100).repeat(32, axis=1)
        back = (reference.unpack_codes(codes, 50, 100, bits) * wide)[:50, :100]
        assert np.abs(back - w).max() <= np.abs(w).max() * step * (0.51 if bits == 8 else 1.4)
        assert not np.any((reference.unpack_codes(codes, 50, 100, bits) * wide)[50:])


def test_zero_rows_and_tiny_values_quantize_to_zero() -> None:
    x = np.zeros((2, 64), np.float32)
    x[1, 40] = 1e-35
    out, _, _ = _linear("int8", x, np.ones((16, 64), np.float32))
    np.testing.assert_array_equal(out, 0)


@pytest.mark.parametrize("gelu", [False, True])
def test_activation(gelu: bool) -> None:
    rng = np.random.default_rng(3)
    both = (8 * rng.standard_normal((3, 2 * 1100))).astype(np.float32)
    both[0, :4] = [-200, 200, 0, -88]
    program = Program(3)
    wide, out = np.zeros((3, 2304), np.float32), np.full((3, 1120), np.nan, np.float32)
    wide[:, :2200] = both
    program.buffer(lp.B_WIDE, wide)
    program.buffer(lp.B_NORMED, out)
    fields = {lp.F_SRC: lp.B_WIDE, lp.F_SRC_STEP: 2304, lp.F_DST: lp.B_NORMED, lp.F_DST_STEP: 1120}
    program.add(lp.OP_ACT, {**fields, lp.F_COUNT: 1100, lp.F_KIND: int(gelu)})
    program.run()
    expected = reference.activate_rows(both[:, :1100], both[:, 1100:], gelu=gelu)
    np.testing.assert_allclose(out[:, :1100], expected, rtol=2e-6, atol=1e-5)
    np.testing.assert_array_equal(out[:, 1100:], 0)


@pytest.mark.parametrize("count", [64, 80, 90])
def test_norm(count: int) -> None:
    rng = np.random.default_rng(4)
    x, weight = rng.standard_normal((2, 96)).astype(np.float32), rng.standard_normal(96).astype(np.float32)
    out = np.full((2, 96), np.nan, np.float32)
    program = Program(2)
    program.buffer(lp.B_HIDDEN, x)
    program.buffer(lp.B_NORMED, out)
    fields = {lp.F_SRC: lp.B_HIDDEN, lp.F_SRC_STEP: 96, lp.F_DST: lp.B_NORMED, lp.F_DST_STEP: 96}
    program.add(lp.OP_NORM, {**fields, lp.F_COUNT: count, lp.F_WEIGHT: weight.ctypes.data}, {lp.P_EPS: 1e-6})
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
    program.buffer(lp.B_WIDE, x)
    program.buffer(lp.B_POSITIONS, positions)
    for number, array in zip((lp.B_QUERY, lp.B_KEY, lp.B_VALUE), out, strict=True):
        program.buffer(number, array)
    program.buffer(lp.B_TABLES, table.cos)
    program.buffer(lp.B_TABLES + 1, table.sin)
    fields = {lp.F_SRC: lp.B_WIDE, lp.F_SRC_STEP: row, lp.F_TABLE: lp.B_TABLES, lp.F_HALF: half}
    program.add(lp.OP_ROPE, {**fields, lp.F_HEADS: heads, lp.F_KV_HEADS: kv_heads, lp.F_DIM: dim})
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
