"""A running sequence whose table gets a second segment: reservation, batch building and the native
runner.
"""

import numpy as np
import pytest

from helpers.distance import distance
from helpers.engine.native_bench import BLOCK, Machine, NativeBench
from helpers.models.tiny_models import save_tiny_model
from kvboost_edge.kvcache.block_table import TableEntry, TableSegment
from kvboost_edge.segments import Segment

TOKENS = [(7 * index) % 61 + 1 for index in range(70)]


def test_a_segment_is_a_table_segment_with_its_sequence():
    assert Segment._fields == ("sequence", *TableSegment._fields)


def seamed_logits(machine, bits, cut, segment):
    """Return the logits of all tokens. The table continues with `segment` after the first `cut` of
    them.
    """
    bench = NativeBench(machine, bits=bits, max_batch_tokens=cut)
    handle, rows = bench.submit_logits(TOKENS)
    bench.step()
    (sequence,) = bench.scheduler.running
    assert sequence.num_computed_tokens == cut
    sequence.blocks.segments.append(segment)
    bench.run()
    handle.result(0)
    bench.assert_clean()
    return np.concatenate(rows)


@pytest.mark.parametrize(
    ("bits", "weights", "cut", "first_index", "tolerance"),
    [
        ((16, 16), "f32", 20, 2, 1e-5),  # inside a block, where the reserved blocks continue
        # After a block that serves no position. Borders change the last bits of attention, which
        # can round an 8-bit activation to its neighbour: for ten other prompts up to 1.2e-3.
        ((16, 16), "int8", 32, 3, 5e-3),
        ((8, 8), "f32", 32, 3, 2e-2),
    ],
)
def test_logits_do_not_depend_on_segment_borders(
    tmp_path, bits, weights, cut, first_index, tolerance
):
    machine = Machine(save_tiny_model("llama", tmp_path), weights)
    seamed = seamed_logits(machine, bits, cut, TableSegment(first_index, cut, cut, 0))
    plain = NativeBench(machine, bits=bits, max_batch_tokens=cut).logits(TOKENS)
    np.testing.assert_array_equal(seamed[:cut], plain[:cut])
    assert distance(seamed, plain) <= tolerance
    machine.close()


def test_blocks_after_a_segment_border_are_not_published(tmp_path):
    machine = Machine(save_tiny_model("llama", tmp_path))
    bench = NativeBench(machine, max_batch_tokens=20)
    handle, _ = bench.submit_logits(TOKENS)
    bench.step()
    (sequence,) = bench.scheduler.running
    sequence.blocks.segments.append(TableSegment(2, 20, 20, 0))
    entries = sequence.blocks.entries(BLOCK)
    assert entries[1] == TableEntry(sequence.blocks.block_ids[1], BLOCK, BLOCK, 20, 0)
    bench.run()
    handle.result(0)
    assert bench.manager.peek(TOKENS, sequence.request.root) == BLOCK
    machine.close()
