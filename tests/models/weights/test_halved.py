"""Rows of queries and keys whose RoPE rotates adjacent channels are read in the order of halves, in
every format.
"""

import numpy as np
import pytest

from helpers.gguf.writer import WIDE, save_gguf
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.gguf.file import read_gguf
from kvboost_edge.models.gguf.source import GgufSource
from kvboost_edge.models.weights.reordered import HalvedSource

QUERY, VALUE = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "qv")
# Stored order of the rows of one head of 64: the even rotated channels, then the odd ones.
WHOLE = [*range(0, 64, 2), *range(1, 64, 2)]
PART = [*range(0, 32, 2), *range(1, 32, 2), *range(32, 64)]


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1", "Q4_K", "IQ4_NL"])
@pytest.mark.parametrize(("family", "order"), [("ernie4_5", WHOLE), ("glm4", PART)])
def test_any_range_of_reordered_rows_is_read(family, order, kind, tmp_path):
    path = save_gguf(family, tmp_path, WIDE, kind=kind)
    places = np.array([64 * head + row for head in range(4) for row in order])
    with Checkpoint.open(path).open_source() as ours, GgufSource(read_gguf(path)) as files:
        assert ours.names() == files.names()
        assert (ours.type_of(QUERY), ours.kind(QUERY)) == (kind, files.kind(QUERY))
        stored = files.rows(QUERY)
        values = files.rows(VALUE)
        np.testing.assert_array_equal(ours.rows(QUERY), stored[places])
        np.testing.assert_array_equal(ours.rows(VALUE), values)
        for start, stop in ((0, 256), (5, 70), (127, 128)):
            np.testing.assert_array_equal(ours.rows(QUERY, start, stop), stored[places[start:stop]])
            if kind != "F32":
                found = ours.quant_rows(QUERY, start, stop)
                whole = files.quant_rows(QUERY, 0, 256)
                assert found.kind == whole.kind
                np.testing.assert_array_equal(found.codes, whole.codes[places[start:stop]])
                np.testing.assert_array_equal(found.scales, whole.scales[places[start:stop]])
                if whole.minima is not None:
                    assert found.minima is not None
                    np.testing.assert_array_equal(found.minima, whole.minima[places[start:stop]])
                assert found.table is whole.table


def test_partial_heads_are_refused(tmp_path):
    path = save_gguf("ernie4_5", tmp_path, WIDE)
    with HalvedSource(GgufSource(read_gguf(path)), 96, 48) as source:
        with pytest.raises(
            ModelFormatError,
            match=r"q_proj.weight' cannot be read: it has 256 rows, in heads of 96 rows",
        ):
            source.rows(QUERY)
        assert source.file_of(QUERY) == path
