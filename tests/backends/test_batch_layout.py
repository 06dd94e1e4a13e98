"""Block ids are checked only where sequences have tokens, in narrow and wide tables."""

import numpy as np
import pytest

from kvboost_edge.backends.base import BatchLayout
from kvboost_edge.backends.batch_layout import check_layout
from kvboost_edge.errors import ConfigError

BLOCK = 16
BLOCKS = 40
LENGTHS = (1, 16, 17, 500)  # 1, 1, 2 and 32 blocks


def layout_of(width):
    """Build a decode step whose table entries without tokens are invalid block ids."""
    tables = np.full((len(LENGTHS), width), 1 << 30, np.int32)
    for row, length in zip(tables, LENGTHS, strict=True):
        row[: -(-length // BLOCK)] = np.arange(-(-length // BLOCK))
    slots = np.arange(len(LENGTHS), dtype=np.int64)
    return BatchLayout(
        np.arange(len(LENGTHS) + 1, dtype=np.int32), np.array(LENGTHS, np.int32), tables, slots
    )


@pytest.mark.parametrize("width", [32, 33, 500])
@pytest.mark.parametrize("wrong", [-1, BLOCKS])
def test_blocks_outside_the_pool_are_refused(width, wrong):
    layout = layout_of(width)
    check_layout(layout, BLOCK, BLOCKS)
    for sequence, length in enumerate(LENGTHS):
        for index in {0, (length - 1) // BLOCK}:
            layout.block_tables[sequence, index], held = wrong, layout.block_tables[sequence, index]
            with pytest.raises(
                ConfigError, match=rf"block id {wrong} must be in the pool's 0\.\.{BLOCKS - 1}"
            ):
                check_layout(layout, BLOCK, BLOCKS)
            layout.block_tables[sequence, index] = held
    check_layout(layout, BLOCK, BLOCKS)


@pytest.mark.parametrize("lengths", [(), (0,)])
def test_sequences_without_tokens_need_no_blocks(lengths):
    tables = np.full((len(lengths), 500), -1, np.int32)
    nothing = np.zeros(len(lengths) + 1, np.int32)
    check_layout(
        BatchLayout(nothing, np.array(lengths, np.int32), tables, np.empty(0, np.int64)),
        BLOCK,
        BLOCKS,
    )
