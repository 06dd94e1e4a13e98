"""Gate and up projection, activation and quantization in one operation, for every weight format."""

from itertools import product

import numpy as np
import numpy.typing as npt
import pytest

from helpers.kernels.linear_driver import Extra, Program, run_linear
from helpers.kernels.weight_formats import in_blocks, kind_of, random_weights
from kvboost_edge.kernels.linear.panel import LARGEST_CELL
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.activations import ACT_RELU2, ACT_SILU

Floats = npt.NDArray[np.float32]
# Formats of the matrix, and of the matrix that reads the result.
KINDS = [
    ("int4", "int4"),
    ("int8", "int4-asym"),
    ("int4-asym", "int8"),
    ("q4k", "q6k"),
    ("q5k", "q4k"),
    ("q6k", "q5k"),
    ("q3k", "q3k"),
    ("q2k", "q2k"),
    ("iq2xxs", "iq3s"),
    ("iq3xxs", "iq1m"),
    ("iq1s", "iq2s"),
    ("iq2xs", "int8"),
    ("nvfp4", "nvfp4"),
    ("q4k", "int8"),
    ("int5", "int8"),
    ("int5-asym", "int5"),
    ("q4k", "int5-asym"),
    ("int2-g64", "int1-g128"),
    ("int1-g128", "int2-g256"),
    ("int2-g256", "q6k"),
    ("int4t", "int4t"),
    ("int4t", "int4"),
    ("int4t", "q6k"),
]
EVERY_TIME = [(ACT_SILU, 1), (ACT_RELU2, 3), (ACT_SILU, 8), (ACT_RELU2, 15)]


@pytest.mark.parametrize(
    ("act", "tokens"),
    [
        pytest.param(*case, marks=[] if case in EVERY_TIME else pytest.mark.full)
        for case in product((ACT_SILU, ACT_RELU2), (1, 3, 8, 15))
    ],
)
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_the_fused_gated_operation_equals_separate_ones(kinds, act, tokens):
    """For the activation without a gate, the matrix has only the up projection."""
    hidden = in_blocks(kinds[0], 64)
    inner = in_blocks(kinds[1], 96)
    parts = 1 if act == ACT_RELU2 else 2
    x = np.random.default_rng(tokens).standard_normal((tokens, hidden)).astype(np.float32)
    packed = random_weights(kinds[0], parts * inner, hidden)
    bias = np.linspace(-1, 1, parts * inner, dtype=np.float32)
    wide, _ = run_linear(kinds[0], x, packed, parts * inner, Extra(bias=bias))
    program = Program(tokens)
    groups = max(-(-hidden // 32), -(-inner // 32))
    apart, panel, together = (np.zeros(tokens * groups * LARGEST_CELL, np.uint8) for _ in range(3))
    program.buffer(lt.B_ATTENDED, x)
    program.buffer(lt.B_PANEL, panel)
    program.buffer(lt.B_INNER, together)
    program.buffer(lt.B_PROJECTED, np.ascontiguousarray(wide))
    program.buffer(lt.B_NORMED, np.zeros((tokens, inner), np.float32))
    program.buffer(lt.B_LOGITS, apart)
    first, second = (kind_of(kind) for kind in kinds)
    source = lt.BufferRows(lt.B_ATTENDED, hidden)
    matrix = program.matrix(kinds[0], hidden, packed, unit=2, bias=bias.ctypes.data)
    ways = lt.BufferRows(lt.B_PROJECTED, parts * inner)
    by = ways if parts == 1 else lt.BufferRows()
    normed = lt.BufferRows(lt.B_NORMED, inner)
    alone = lt.PanelTarget(second, lt.B_LOGITS)
    program.ops += [
        lt.QuantizeOp(source, hidden, lt.PanelTarget(first, lt.B_PANEL)),
        lt.ActivateOp(ways, normed, inner, act, by, alone),
        lt.GatedOp(matrix, lt.InnerChannels(inner, act, second), lt.B_INNER),
    ]
    program.run(2)
    assert apart.any()
    np.testing.assert_array_equal(together, apart)
