"""Spans from runs: chunk boundaries, the whole blocks between them, and runs that are too short."""

from hypothesis import given
from hypothesis import strategies as st

from kvboost_edge.config import RecomputeStrategy
from kvboost_edge.reuse.found_runs import Run, RunBlock
from kvboost_edge.reuse.recompute import Repair
from kvboost_edge.reuse.span_plan import plan_spans

SIZE = 16


def run_at(start, length, offset=0, delta=3):
    """Build a run that begins `offset` slots into its first block. Block ids count up from its
    position.
    """
    count = -(-(offset + length) // SIZE)
    pieces = [RunBlock(1000 + start + index, 0, SIZE) for index in range(count)]
    pieces[0] = pieces[0]._replace(valid_from=offset)
    pieces[-1] = pieces[-1]._replace(valid_to=offset + length - (count - 1) * SIZE)
    return Run(start, length, tuple(pieces), delta, start - delta)


def test_a_seam_follows_the_start_of_a_run():
    (span,) = plan_spans([run_at(40, 100, offset=5)], 32, SIZE, 16)
    assert (span.start, span.stop) == (64, 140)  # 40 + 16, and whole blocks after position 32
    assert span.first_position == 40 - 5 + 16
    assert span.block_ids[0] == 1041
    (bare,) = plan_spans([run_at(40, 100, offset=5)], 32, SIZE, 0)
    assert (bare.start, bare.stop) == (48, 140)


def test_the_first_block_of_a_prompt_is_in_no_span():
    (span,) = plan_spans([run_at(0, 90)], 0, SIZE, 0)
    assert span.start == SIZE


def test_runs_shorter_than_a_block_are_computed():
    assert plan_spans([run_at(32, 47)], 32, SIZE, 32) == []
    spans = plan_spans([run_at(32, 31), run_at(64, 40)], 32, SIZE, 16)
    assert [(span.start, span.stop) for span in spans] == [(80, 104)]


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 90), st.integers(0, 15)), max_size=6),
    st.integers(0, 40),
)
def test_spans_keep_block_alignment_within_their_runs(shapes, num_boundary_tokens):
    runs = []
    position = SIZE
    for gap, length, offset in shapes:
        runs.append(run_at(position + gap, length, offset))
        position = runs[-1].prompt_stop
    previous_stop = SIZE
    for span in plan_spans(runs, SIZE, SIZE, num_boundary_tokens):
        (run,) = (run for run in runs if run.prompt_stop == span.stop)
        assert (
            run.prompt_start + num_boundary_tokens
            <= span.start
            < run.prompt_start + num_boundary_tokens + 2 * SIZE
        )
        assert (span.start - previous_stop) % SIZE == 0
        assert 0 <= span.start - span.first_position < SIZE
        assert SIZE <= span.stop - span.start <= len(span.block_ids) * SIZE
        where = {
            run.prompt_start - run.pieces[0].valid_from + SIZE * i: one.block_id
            for i, one in enumerate(run.pieces)
        }
        assert [where[span.first_position + SIZE * i] for i in range(len(span.block_ids))] == list(
            span.block_ids
        )
        previous_stop = span.stop


def test_the_number_of_tested_repairs_is_bounded():
    """No tested repair recomputes more than was requested."""
    tested = set()
    for strategy in RecomputeStrategy:
        for overlap in range(0, 300, 3):
            for step in range(0, 101, 3):
                asked = Repair(strategy=strategy, overlap=overlap, ratio=step / 100)
                assert asked.tested.strategy is strategy
                assert asked.tested.overlap <= overlap
                assert asked.tested.ratio <= asked.ratio
                assert asked.tested.tested == asked.tested
                tested.add(asked.tested)
    assert len(tested) == 1 + 4 + 16 + 16
