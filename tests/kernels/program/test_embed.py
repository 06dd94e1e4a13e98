"""Embedding rows of every weight format."""

import numpy as np
import pytest

from helpers.kernels.linear_driver import Program
from helpers.kernels.weight_formats import FORMATS, in_blocks, random_weights
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.reference.weights import unpack_rows


@pytest.mark.parametrize("factor", [1.0, 3.0])
@pytest.mark.parametrize("kind", FORMATS)
def test_embedding_rows_equal_the_stored_weights(kind, factor):
    """Rows are equal to the bit, except for the FMA of minima."""
    inputs = in_blocks(kind, 300)
    width = -(-inputs // 32) * 32
    packed = random_weights(kind, 50, inputs)
    ids = np.array([49, 0, 17])
    out = np.full((3, width), np.nan, np.float32)
    program = Program(3)
    program.buffer(lt.B_TOKENS, ids)
    program.buffer(lt.B_HIDDEN, out)
    rows = lt.BufferRows(lt.B_HIDDEN, width)
    program.ops.append(lt.EmbedOp(rows, program.matrix(kind, inputs, packed), factor))
    program.run()
    expected = np.float32(factor) * unpack_rows(packed, 50, inputs, kind)[ids]
    off = 1e-6 if kind.endswith("-asym") else 0
    np.testing.assert_allclose(out[:, :inputs], expected, rtol=off, atol=off)
    np.testing.assert_array_equal(out[:, inputs:], 0)
