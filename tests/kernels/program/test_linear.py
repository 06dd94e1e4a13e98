"""Matrices of every weight format against their specification: integer formats are exact, float
formats differ at most by the FMA.
"""

import numpy as np
import numpy.typing as npt
import pytest

from helpers.kernels.linear_driver import (
    PLAIN,
    Extra,
    Program,
    panel_sizes,
    run_linear,
)
from helpers.kernels.weight_formats import (
    FORMATS,
    INTEGERS,
    PACKED,
    in_blocks,
    kind_of,
    product,
    random_weights,
)
from kvboost_edge.kernels.linear import weight_formats as registry
from kvboost_edge.kernels.linear.panel import LARGEST_CELL
from kvboost_edge.kernels.linear.weights import pack_codes, packed_sizes
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.reference import linear as reference
from kvboost_edge.kernels.reference.weights import unpack_rows

Floats = npt.NDArray[np.float32]
SHAPES = [(1, 16, 32), (2, 50, 300), (3, 33, 64), (5, 7, 31), (15, 130, 96), (16, 70, 1500)]
"""Tokens, rows, and inputs before they are rounded up to blocks."""
PRECISIONS = [
    (kind, fine) for kind in FORMATS for fine in (False, True) if kind in INTEGERS or not fine
]
each_precision = pytest.mark.parametrize(("kind", "fine"), PRECISIONS)


def _tokens(kind, tokens, inputs):
    """Return random tokens. The first token's first group has codes of the largest magnitude."""
    x = (
        np.random.default_rng(tokens)
        .standard_normal((tokens, in_blocks(kind, inputs)))
        .astype(np.float32)
    )
    x[0, :32] = 1
    return x


def _linear(kind, x, rows, extra=PLAIN):
    """Quantize x [tokens, inputs] and multiply it by a matrix. Also return the packed weights."""
    packed = random_weights(kind, rows, x.shape[1])
    assert [array.size for array in packed[:3]] == list(packed_sizes(rows, x.shape[1], kind))
    out, panel = run_linear(kind, x, packed, rows, extra)
    if kind in INTEGERS:
        expected = reference.pack_panel(x, kind, panel_sizes(len(x), extra), fine=extra.fine)
        np.testing.assert_array_equal(panel[: expected.size], expected)
    return out, packed


@each_precision
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_equals_the_reference(kind, fine, shape):
    tokens, rows, inputs = shape
    x = _tokens(kind, tokens, inputs)
    out, packed = _linear(kind, x, rows, Extra(fine=fine))
    expected = product(kind, x, packed, rows, fine=fine)
    largest = 1 if kind in PACKED else np.abs(expected).max()  # weights of random blocks are large
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=2e-6 * largest)
    exact = x.astype(np.float64) @ unpack_rows(packed, rows, x.shape[1], kind).T.astype(np.float64)
    coarse = kind in INTEGERS and not fine
    assert np.linalg.norm(out - exact) <= (2e-2 if coarse else 1e-4) * np.linalg.norm(exact)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("int8", range(-128, 128)),
        ("int4", range(-8, 8)),
        ("int4-asym", range(16)),
        ("int4t", [-128, *range(-7, 7), 127]),
        ("int5", range(-16, 16)),
        ("int5-asym", range(32)),
        ("int2-g64", range(-1, 3)),
        ("int1-g128", (-1, 1)),
    ],
)
def test_integer_sums_are_exact_at_the_extremes(kind, values):
    """With one group and scales of one, the output is the integer sum itself. Codes are the
    smallest and largest values.
    """
    rng = np.random.default_rng(1)
    table = np.array(values)
    x = rng.choice([-127, 127], (9, 32)).astype(np.float32)
    x[0] = 127
    codes = rng.choice([0, len(table) - 1], (64, 32)).astype(np.uint8)
    codes[0] = 0
    codes[1] = len(table) - 1
    scales = np.ones((64, 1), np.float16)
    minima = np.zeros_like(scales) if kind.endswith("-asym") else None
    looked_up = table.astype(np.int8) if kind == "int4t" else None
    step = registry.FORMATS[kind].code_step
    packed = pack_codes(codes * np.uint8(step), scales, minima, kind, looked_up)
    out, _ = run_linear(kind, x, packed, 64, PLAIN)
    np.testing.assert_array_equal(out, x @ table[codes].T.astype(np.float32))


@pytest.mark.parametrize("inputs", [32, 2880])
def test_int4_by_table_lookup_equals_int4(inputs):
    """With the table of Q4_0, int4t has the same integers and the same epilogue."""
    x = _tokens("int4", 11, inputs)
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 16, (40, inputs)).astype(np.uint8)
    scales = (0.01 * rng.standard_normal((40, inputs // 32))).astype(np.float16)
    other = run_linear("int4", x, pack_codes(codes, scales, None, "int4"), 40, PLAIN)[0]
    packed = pack_codes(codes, scales, None, "int4t", np.arange(-8, 8, dtype=np.int8))
    np.testing.assert_array_equal(run_linear("int4t", x, packed, 40, PLAIN)[0], other)


@pytest.mark.parametrize("tokens", [1, 11])
@pytest.mark.parametrize("inputs", [32, 896])
@pytest.mark.parametrize("kind", ["int5", "int2-g64", "int2-g256", "int1-g128"])
def test_codes_of_fewer_bits_equal_int8(kind, inputs, tokens):
    """The weights are the same in both formats, hence the same integers and the same epilogue.
    Groups that share a scale equal groups with equal scales.
    """
    x = _tokens(kind, tokens, inputs)
    form = registry.FORMATS[kind]
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 1 << form.bits, (40, inputs)).astype(np.uint8) * form.code_step
    count = -(-inputs // form.scale_inputs)
    scales = (0.01 * rng.standard_normal((40, count))).astype(np.float16)
    each = scales.repeat(form.scale_groups, axis=1)[:, : inputs // 32]
    wide = pack_codes(codes + np.uint8(128 - form.offset), each, None, "int8")
    packed = pack_codes(codes, scales, None, kind)
    for fine in (False, True):
        found, other = (
            run_linear(name, x, of, 40, Extra(fine=fine))[0]
            for name, of in ((kind, packed), ("int8", wide))
        )
        np.testing.assert_array_equal(found, other)


@each_precision
def test_tokens_do_not_depend_on_batch_and_threads(kind, fine):
    x = _tokens(kind, 23, 300)
    alone = np.concatenate([_linear(kind, row[None], 130, Extra(fine=fine))[0] for row in x])
    for threads, tokens in ((1, 23), (2, 23), *((1, tokens) for tokens in range(2, 9))):
        out, _ = _linear(kind, x[:tokens], 130, Extra(threads=threads, fine=fine))
        np.testing.assert_array_equal(out, alone[:tokens])


@pytest.mark.parametrize("tokens", [3, 9])
@pytest.mark.parametrize("kind", FORMATS)
def test_bias_residual_and_factor_equal_the_reference(kind, tokens):
    x = _tokens(kind, tokens, 64)
    bias = np.linspace(-1, 1, 40, dtype=np.float32)
    before = np.arange(40 * tokens, dtype=np.float32).reshape(-1, 40)
    plain = _linear(kind, x, 40)[0]
    np.testing.assert_array_equal(_linear(kind, x, 40, Extra(bias=bias))[0], plain + bias)
    exact = before + (plain + bias).astype(np.float64) * 0.25
    np.testing.assert_array_equal(
        _linear(kind, x, 40, Extra(bias, before, 0.25))[0], exact.astype(np.float32)
    )


def test_zero_rows_and_tiny_values_quantize_to_zero():
    x = np.zeros((2, 64), np.float32)
    x[1, 40] = 1e-35
    np.testing.assert_array_equal(_linear("int8", x, 16)[0], 0)


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("kind", INTEGERS)
def test_non_finite_inputs_stay_non_finite(kind, fine):
    """The rows of those tokens are NaN or infinite. Other rows are unaffected."""
    x = _tokens(kind, 9, 96)
    clean = _linear(kind, x, 40, Extra(fine=fine))[0]
    bad = [1, 4, 6]
    x[bad, 50] = np.nan, np.inf, -np.inf
    packed = random_weights(kind, 40, x.shape[1])
    out = run_linear(kind, x, packed, 40, Extra(fine=fine))[0]
    assert not np.isfinite(out[bad]).any()
    np.testing.assert_array_equal(np.delete(out, bad, axis=0), np.delete(clean, bad, axis=0))


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize(
    "kinds",
    [
        ("q4k", "q6k"),
        ("int4t", "q5k"),
        ("q4k", "int4t"),
        ("int4t", "q6k"),
        ("q3k", "q6k"),
        ("q2k", "q3k"),
        ("q4k", "q2k"),
        ("iq3s", "q4k"),
        ("iq1m", "iq1s"),
        ("iq2xs", "q6k"),
        ("nvfp4", "q4k"),
    ],
)
def test_matrices_of_different_formats_share_a_panel(kinds, fine):
    """Rows of two formats are written to one destination, and each equals its separate result."""
    tokens = 11
    rows = 48
    inputs = 512
    x = _tokens("q4k", tokens, inputs)
    program = Program(tokens)
    out = np.zeros((tokens, 2 * rows), np.float32)
    panel = np.zeros(tokens * 16 * LARGEST_CELL, np.uint8)
    program.buffer(lt.B_ATTENDED, x)
    program.buffer(lt.B_PANEL, panel)
    program.buffer(lt.B_PROJECTED, out)
    source = lt.BufferRows(lt.B_ATTENDED, inputs)
    target = lt.PanelTarget(kind_of(kinds[0]), lt.B_PANEL, int(fine))
    program.ops.append(lt.QuantizeOp(source, inputs, target))
    for index, kind in enumerate(kinds):
        one = random_weights(kind, rows, inputs)
        matrix = program.matrix(kind, inputs, one, unit=2, fine=int(fine))
        to = lt.BufferRows(lt.B_PROJECTED, 2 * rows, index * rows)
        program.ops.append(lt.LinearOp(source, to, matrix, rows))
    program.run(2)
    alone = [_linear(kind, x, rows, Extra(fine=fine))[0] for kind in kinds]
    np.testing.assert_array_equal(out, np.concatenate(alone, axis=1))
