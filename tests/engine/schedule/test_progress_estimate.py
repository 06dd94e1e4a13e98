"""The progress of prompts and the time left, on a machine with prescribed step times."""

import asyncio
import random
import threading

import pytest

from helpers.engine.fake_runner import Bench, fake_engine, hold_passes
from kvboost_edge.config import GenerationMode
from kvboost_edge.engine.request.progress import Progress
from kvboost_edge.errors import KVBoostError

PER_TOKEN = 0.01


def flat(start, stop):
    """Return the seconds of the tokens at these positions, each of which takes the same time."""
    return PER_TOKEN * (stop - start)


def steep(start, stop):
    """Return the seconds if the token at position 1,000 takes twice as long as the first one."""
    return PER_TOKEN * sum(1 + position / 1000 for position in range(start, stop))


@pytest.fixture(autouse=True)
def no_memory(monkeypatch):
    """Progress estimates without a cache, so that each call examines all requests."""
    monkeypatch.setattr("kvboost_edge.engine.schedule.progress_estimate._BOARD_SECONDS", 0.0)


def timed(bench, cost=flat):
    """Replace the measured step times of a bench with `cost`."""
    estimate = bench.core._estimate
    observe = estimate.observe

    def told(plan, seconds):
        observe(plan, sum(cost(one.start, one.stop) for one in plan.work))

    estimate.observe = told
    return bench


def test_progress_is_reported_until_the_first_token():
    bench = timed(Bench(max_batch_tokens=64))
    handle = bench.submit(range(200), max_new_tokens=3)
    assert handle.progress() == Progress(200)
    seen = []
    while not handle.started(0):
        assert bench.step()
        seen.append(handle.progress())
    assert [one.computed for one in seen] == [64, 128, 192, 200]
    left = [one.seconds_left for one in seen]
    assert left == pytest.approx([flat(64, 200), flat(128, 200), flat(192, 200), 0])
    assert all(one.total == 200 and one.cached == 0 and one.elapsed > 0 for one in seen)
    bench.run()
    assert handle.progress() == seen[-1]
    assert handle.result().finish_reason == "length"


def test_cached_tokens_count_at_once():
    bench = timed(Bench(max_batch_tokens=32))
    bench.ask(range(100), max_new_tokens=1)
    handle = bench.submit([*range(90), *range(200, 250)], max_new_tokens=1)
    bench.step()
    first = handle.progress()
    assert (first.total, first.cached, first.computed) == (140, 80, 112)
    bench.run()
    assert handle.progress().cached == handle.result().cached_tokens == 80
    whole = bench.submit(range(100), max_new_tokens=1)
    bench.run()
    assert whole.progress()[:3] == (100, 96, 100)


def test_the_estimate_includes_the_cost_of_depth():
    bench = timed(Bench(num_blocks=600, max_batch_tokens=256), steep)
    bench.ask([number % 251 for number in range(4000)], max_new_tokens=1)
    handle = bench.submit([255 - number % 241 for number in range(6000)], max_new_tokens=1)
    for done in range(256, 6000, 256):
        bench.step()
        found = handle.progress()
        assert found.computed == done
        assert found.seconds_left == pytest.approx(steep(done, 6000), rel=0.1)


def test_one_slow_step_does_not_distort_the_estimate():
    slow = iter([1000.0])  # such as a step that compiled a kernel

    def cost(start, stop):
        return next(slow, flat(start, stop))

    bench = timed(Bench(max_batch_tokens=64), cost)
    handle = bench.submit(range(256), max_new_tokens=1)
    for _ in range(3):
        bench.step()
    assert handle.progress().seconds_left == pytest.approx(flat(192, 256))


def test_a_queued_requests_estimate_includes_the_queue():
    bench = timed(Bench(max_num_seqs=1, max_batch_tokens=50))
    first = bench.submit(range(100, 250), max_new_tokens=1)
    second = bench.submit(range(100), max_new_tokens=1)
    third = bench.submit(range(1, 121), max_new_tokens=1)
    bench.step()
    assert first.progress().seconds_left == pytest.approx(flat(0, 100))
    # Each request ends with its first token, so its place is free when the prompt is done.
    assert second.progress() == Progress(
        100, 0, 0, 0.0, pytest.approx(flat(0, 100) + flat(0, 100), rel=0.05)
    )
    before = third.progress()
    assert before == Progress(120, 0, 0, 0.0, pytest.approx(flat(0, 200) + flat(0, 120), rel=0.05))
    bench.step()
    after = third.progress()
    assert after.seconds_left is not None
    assert before.seconds_left is not None
    assert after.seconds_left == pytest.approx(before.seconds_left - flat(0, 50), rel=0.05)
    bench.run()


def test_a_queued_requests_estimate_includes_running_answers():
    bench = timed(Bench(max_num_seqs=1, max_batch_tokens=64))
    bench.ask(range(64), max_new_tokens=5)
    mean = bench.core._estimate._step_seconds
    bench.submit(range(1, 65), max_new_tokens=40)
    bench.step()
    handle = bench.submit(range(2, 66), max_new_tokens=1)
    left = handle.progress().seconds_left
    assert left is not None
    # Outputs had 5 tokens so far, and this one has 1. The estimate does not use its limit of 40.
    assert left == pytest.approx(flat(0, 64) + 4 * bench.core._estimate._step_seconds, rel=0.05)
    assert mean > 0
    bench.run()


def test_the_estimate_includes_concurrent_prompts():
    bench = timed(Bench(max_batch_tokens=64))
    long = bench.submit(range(250), max_new_tokens=1)
    bench.step()
    short = bench.submit(range(100, 164), max_new_tokens=1)
    bench.step()
    left = long.progress()
    rest = short.progress()
    assert (left.computed, rest.computed) == (64 + 16, 48)
    assert left.seconds_left == pytest.approx(
        flat(80, 250) + flat(48, 64)
    )  # the shorter one runs first
    assert rest.seconds_left == pytest.approx(
        flat(48, 64) * 4 / 3
    )  # all but the quarter that the first to arrive gets
    bench.run()


def test_progress_never_decreases_after_preemption():
    bench = timed(Bench(num_blocks=8, max_batch_tokens=3))
    first = bench.submit(range(40), max_new_tokens=60)
    second = bench.submit(range(100, 160), max_new_tokens=3)
    seen = []
    lost = 0
    while not (first.done and second.done):
        before = bench.scheduler.num_preemptions
        bench.step()
        seen.append(second.progress())
        lost += bench.scheduler.num_preemptions > before and not second.started(0)
    assert lost, "the request must be preempted before its first token"
    assert [one.computed for one in seen] == sorted(one.computed for one in seen)
    assert seen[-1].computed == 60
    assert second.result().preemptions
    assert first.result().finish_reason == second.result().finish_reason == "length"


def test_the_estimate_grows_after_preemption():
    bench = timed(Bench(max_batch_tokens=32))
    handle = bench.submit(range(200), max_new_tokens=1, mode=GenerationMode.BASELINE)
    for _ in range(4):
        bench.step()
    before = handle.progress()
    (sequence,) = bench.scheduler.running
    bench.scheduler._preempt(sequence)
    after = handle.progress()
    assert (before.computed, after.computed) == (128, 128)
    assert before.seconds_left == pytest.approx(flat(128, 200))
    assert after.seconds_left == pytest.approx(flat(0, 200))
    bench.run()
    assert handle.progress().computed == 200


def test_progress_of_an_ended_request_is_final():
    bench = timed(Bench(max_batch_tokens=32))
    cancelled = bench.submit(range(100), max_new_tokens=1)
    failed = bench.submit([*range(32), 7], max_new_tokens=1, mode=GenerationMode.BASELINE)
    bench.runner.nan_for = {7}
    bench.step()
    found = cancelled.progress()
    cancelled.cancel()
    bench.run()
    assert cancelled.started(0)
    assert cancelled.progress().computed == found.computed < 100
    assert failed.started(0)
    assert failed.progress().computed < 33
    with pytest.raises(KVBoostError, match="NaN"):
        failed.result()


def test_progress_of_a_request_without_output_ends_at_its_total():
    bench = timed(Bench(max_batch_tokens=32))
    handle, _ = bench.submit_logits(range(100))
    bench.run()
    assert handle.progress()[:3] == (100, 0, 100)
    assert handle.progress().seconds_left == 0


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.some(3)
def test_progress_only_grows_in_random_schedules(seed):
    rng = random.Random(seed)
    bench = timed(
        Bench(
            rng.choice((8, 12, 40)),
            max_num_seqs=rng.choice((1, 3, 8)),
            max_batch_tokens=rng.choice((5, 33)),
        )
    )
    stems = [[rng.randrange(256) for _ in range(48)] for _ in range(2)]
    handles = []
    for _ in range(12):
        prompt = rng.choice(stems) + [rng.randrange(256) for _ in range(rng.choice((1, 20, 50)))]
        options = {"priority": rng.randrange(2), "tenant": rng.choice(("a", "b"))}
        handles.append(bench.submit(prompt, rng.choice((1, 5, 25)), **options))
    last = [handle.progress() for handle in handles]
    while not all(handle.done for handle in handles):
        if rng.random() < 0.05:
            rng.choice(handles).cancel()
        bench.step()
        found = [handle.progress() for handle in handles]
        for old, new, handle in zip(last, found, handles, strict=True):
            assert new.total == old.total
            assert old.computed <= new.computed <= new.total
            assert new.cached <= new.computed
            assert new.seconds_left is None or new.seconds_left >= 0
            if handle.started(0) and not handle.done:
                assert (new.computed, new.seconds_left) == (new.total, 0)
        last = found
    for handle, progress in zip(handles, last, strict=True):
        result = handle.result()
        assert progress.cached == result.cached_tokens
        if result.generated_tokens:
            assert progress.computed == result.prompt_tokens


def test_waiting_for_the_first_token_ends_at_its_timeout():
    go = threading.Event()
    with fake_engine(max_batch_tokens=64) as engine:
        hold_passes(engine, go)
        handle = engine.submit(list(range(100)), max_new_tokens=2)
        assert not handle.started(0.01)
        assert not asyncio.run(handle.astarted(0.01))
        assert handle.progress().computed == 0
        threading.Timer(0.05, go.set).start()
        assert asyncio.run(handle.astarted(30))
        assert handle.started(0)
        assert handle.progress()[:3] == (100, 0, 100)
        assert handle.result().generated_tokens == 2


def test_cancelling_ends_the_wait_for_the_first_token():
    go = threading.Event()
    with fake_engine(max_batch_tokens=64) as engine:
        hold_passes(engine, go)
        handle = engine.submit(list(range(200)), max_new_tokens=2)
        handle.cancel()
        go.set()
        assert handle.started(30)
        assert handle.result().finish_reason == "cancelled"
