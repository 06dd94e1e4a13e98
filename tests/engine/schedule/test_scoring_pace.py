"""Scoring of reused spans within the limits of a step."""

import pytest

from helpers.engine.documents import BLEND, QUERY, REUSE, document
from helpers.engine.fake_runner import Bench
from helpers.engine.paced_bench import Paced, machine
from kvboost_edge.engine.schedule.step_cost import StepShape

SHARED = document(1, 160)


def reusing(bench, number, length=300, **options):
    """Submit a request whose prompt holds the cached document after `length` other tokens."""
    prompt = document(10 + number, length) + SHARED + [1, 2]
    return bench.submit(prompt, 2, REUSE, **{"repair": QUERY, **options})


def scored_in_step(bench):
    """Run a step and return the number of tokens that it scored."""
    before = bench.runner.probed
    bench.step()
    return bench.runner.probed - before


@pytest.mark.parametrize(("repair", "share"), [(QUERY, 2 / 3), (BLEND, 1.0)])
@pytest.mark.parametrize("count", [1, 4])
def test_streams_keep_their_pace_while_spans_are_scored(repair, share, count):
    """The fake model has a single layer, so that a CacheBlend score costs as much as a token."""
    bench = Paced(max_num_seqs=16)
    bench.ask(SHARED + document(2, 800), 1)
    bench.streams(4)
    handles = [reusing(bench, number, 1200, repair=repair) for number in range(count)]
    times = []
    while not all(handle.done for handle in handles):
        scored = scored_in_step(bench)
        shape, seconds = bench.steps[-1]
        assert shape.sequences >= 4, "each stream must get a token in every step"
        alone = machine(StepShape(shape.sequences, shape.decode_depth))
        if scored:
            seconds += share * machine(StepShape(tokens=scored, prompt_depth=scored * 700))
        times.append((scored, seconds, alone))
    assert sum(scored for scored, _, _ in times) > 1000 * count
    late = [one for one in times if one[1] > 2 * one[2] + 0.05]
    assert len(late) <= 0.01 * len(times)
    for handle in handles:
        assert bench.answer(handle).reused_span_tokens > 100


def test_a_step_scores_spans_of_one_request_and_at_most_max_batch_tokens():
    bench = Bench(300, max_batch_tokens=64)
    bench.ask(SHARED, 1)
    handles = [reusing(bench, number) for number in range(4)]
    while not all(handle.done for handle in handles):
        assert scored_in_step(bench) <= 64
    for handle in handles:
        assert bench.answer(handle).approximate


def test_idle_requests_are_not_scored_while_others_run():
    bench = Bench(300, max_batch_tokens=64)
    bench.ask(SHARED, 1)
    handle = reusing(bench, 0, terms={"background": "idle"})
    assert scored_in_step(bench)
    stream = bench.submit([5] * 20, 30)
    while not stream.done:
        assert not scored_in_step(bench)
    bench.run()
    assert bench.answer(handle).approximate


@pytest.mark.parametrize("ends", ["cancel", "deadline"])
def test_an_ending_request_is_not_scored(ends, monkeypatch):
    bench = Bench(300, max_batch_tokens=64)
    bench.ask(SHARED, 1)
    handle = reusing(bench, 0)
    assert scored_in_step(bench)
    build = bench.core._batch_of

    def end_after_planning(plan):
        assert plan.preparing is not None
        if ends == "cancel":
            handle.cancel()
        else:
            sequence, _ = plan.preparing
            monkeypatch.setattr(type(sequence.request.terms), "deadline", 0.0)
        return build(plan)

    monkeypatch.setattr(bench.core, "_batch_of", end_after_planning)
    assert scored_in_step(bench) == 0


def test_tenants_take_turns_in_scoring(monkeypatch):
    bench = Bench(600, max_batch_tokens=64)
    for tenant in "ab":
        bench.ask(SHARED, 1, tenant=tenant)
    handles = [reusing(bench, number, tenant=tenant) for number, tenant in enumerate("aaab")]
    turns = []
    look = bench.core._prober.look

    def note_tenant(sequence, limit):
        turns.append(sequence.tenant)
        look(sequence, limit)

    monkeypatch.setattr(bench.core._prober, "look", note_tenant)
    bench.run()
    assert turns[:6] == [b"a", b"b"] * 3
    for handle in handles:
        assert bench.answer(handle).approximate
