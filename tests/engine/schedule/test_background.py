"""Background requests use only spare capacity. Other requests keep their steps, places, blocks and
prefixes.
"""

from __future__ import annotations

import random

import pytest

from helpers.engine.fake_runner import Bench, expected_tokens
from helpers.engine.paced_bench import Paced, machine
from kvboost_edge.config import BACKGROUND
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.engine.schedule.step_cost import StepShape
from kvboost_edge.errors import RequestError

SPARE = {"background": "spare_time"}
IDLE = {"background": "idle"}


def prompt_of(seed, count):
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(count)]


@pytest.mark.parametrize(("prompt", "num_lines"), [(20, 60), (400, 12)])
def test_background_lines_do_not_slow_down_a_stream(prompt, num_lines):
    bench = Paced(max_num_seqs=64)
    bench.streams(1)
    lines = [bench.submit(prompt_of(i, prompt), 40, terms=SPARE) for i in range(num_lines)]
    while not all(line.done for line in lines):
        bench.step()
    depth = max(shape.decode_depth for shape, _ in bench.steps)
    alone = machine(StepShape(1, depth / 4))
    late = [seconds for _, seconds in bench.steps if seconds > 1.75 * alone + 0.05]
    assert len(late) <= 0.01 * len(bench.steps)
    assert len(bench.steps) < num_lines * (40 + prompt), (
        "lines must be computed together, not one by one"
    )
    for line in lines:
        assert bench.answer(line).generated_tokens == 40


def test_idle_lines_run_only_without_others():
    bench = Paced(max_num_seqs=16)
    lines = [bench.submit(prompt_of(i, 100), 40, terms=IDLE) for i in range(3)]
    for _ in range(10):
        bench.step()
    assert bench.steps[-1][0].sequences == 3, (
        "all idle lines must run if there are no other requests"
    )
    stream = bench.stream(30)
    before = [line.progress().computed for line in lines]
    bench.step()
    bench.steps.clear()
    while not stream.done:
        bench.step()
    assert {shape.sequences for shape, _ in bench.steps[1:]} == {1}
    assert not any(line.done for line in lines)
    assert [line.progress().computed for line in lines] == before
    bench.run()
    for handle in (*lines, stream):
        bench.answer(handle)


@pytest.mark.parametrize("kind", BACKGROUND)
def test_a_request_preempts_a_background_sequence(kind):
    bench = Bench(max_num_seqs=2)
    lines = [bench.submit([i] * 20, 60, terms={"background": kind}) for i in range(2)]
    for _ in range(5):
        bench.step()
    handle = bench.submit([9] * 20, 1)
    for _ in range(2):
        bench.step()
    assert handle.done
    assert bench.scheduler.num_preemptions == 1
    bench.run()
    for one in (*lines, handle):
        bench.answer(one)


@pytest.mark.parametrize("kind", BACKGROUND)
def test_a_request_takes_blocks_of_background_sequences(kind):
    bench = Bench(12, max_num_seqs=4)
    lines = [bench.submit([i] * 40, 60, terms={"background": kind}) for i in range(2)]
    for _ in range(5):
        bench.step()
    handle = bench.submit([9] * 150, 1)
    for _ in range(4):
        bench.step()
    assert handle.done
    assert bench.scheduler.num_preemptions == 2
    bench.run()
    for one in (*lines, handle):
        bench.answer(one)


@pytest.mark.parametrize("kind", BACKGROUND)
def test_a_request_does_not_wait_for_a_background_prefix(kind):
    bench = Bench(64, max_batch_tokens=16)
    document = prompt_of(1, 200)
    line = bench.submit([*document, 1], 4, terms={"background": kind})
    for _ in range(4):
        bench.step()
    stream = bench.submit([3] * 4, 100)
    bench.step()
    handle = bench.submit([*document, 2], 4)
    for _ in range(16):
        bench.step()
    assert handle.done
    assert handle.result(0).cached_tokens >= 32, "the blocks computed by the line must be reused"
    assert not stream.done
    bench.run()
    for one in (line, stream, handle):
        bench.answer(one)


def test_a_line_does_not_wait_for_a_prefix_that_needs_an_idle_engine():
    bench = Bench(64, max_batch_tokens=16)
    document = prompt_of(1, 200)
    idle = [bench.submit([*document, i], 4, terms=IDLE) for i in range(2)]
    for _ in range(4):
        bench.step()
    stream = bench.submit([3] * 4, 100)
    bench.step()
    line = bench.submit([*document, 2], 4, terms=SPARE)
    while not line.done:
        bench.step()
    assert line.result(0).cached_tokens == 64, "the computed blocks must be reused"
    assert not stream.done
    assert bench.scheduler.num_preemptions == 1
    bench.run()
    for one in (*idle, stream, line):
        bench.answer(one)


@pytest.mark.parametrize("kind", BACKGROUND)
def test_requests_with_one_prefix_preempt_a_background_sequence_once(kind):
    bench = Bench(64, max_num_seqs=2, max_batch_tokens=16)
    line = bench.submit([3] * 20, 100, terms={"background": kind})
    for _ in range(5):
        bench.step()
    document = prompt_of(1, 300)
    asked = [bench.submit([*document, i], 4) for i in range(2)]
    while not all(one.done for one in asked):
        bench.step()
    assert bench.scheduler.num_preemptions == 1
    bench.run()
    for one in (line, *asked):
        bench.answer(one)


def test_background_lines_share_their_prefix():
    bench = Bench(64)
    document = prompt_of(1, 160)
    lines = [bench.submit([*document, i], 2, terms=SPARE) for i in range(8)]
    bench.run()
    assert bench.runner.computed < 160 + 8 * 20
    for line in lines:
        bench.answer(line)


def test_background_work_is_not_charged_to_its_tenant():
    bench = Bench(4000, max_num_seqs=2, max_batch_tokens=32, debug_checks=False)
    bench.check = lambda: None
    lines = [bench.submit(prompt_of(i, 60), 20, tenant="a", terms=SPARE) for i in range(40)]
    for _ in range(30):
        bench.step()
    others = {
        tenant: [bench.submit(prompt_of(tenant, 60), 20, tenant=tenant) for _ in range(3)]
        for tenant in "ab"
    }
    order = []
    while not all(one.done for handles in others.values() for one in handles):
        bench.step()
        order += [t for t, handles in others.items() if all(one.done for one in handles)]
    assert set(order) == {"a", "b"}
    assert max(map(order.count, "ab")) <= 12, "both tenants must end at about the same time"
    assert not all(line.done for line in lines)


def test_background_lines_run_after_every_priority():
    bench = Bench(64, max_num_seqs=1)
    lines = [bench.submit([i] * 10, 5, terms=SPARE) for i in range(6)]
    late = bench.submit([9] * 10, 5, priority=100)
    bench.step()
    while not late.done:
        bench.step()
    assert not any(line.done for line in lines), "background lines must run after every priority"


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < 7 else pytest.mark.full) for seed in range(20)]
)
@pytest.mark.some(4)
def test_random_mixes_equal_single_runs(seed):
    rng = random.Random(seed)
    bench = Bench(
        rng.choice((12, 20, 64)),
        max_num_seqs=rng.choice((1, 2, 5)),
        max_batch_tokens=rng.choice((4, 16, 64)),
        target_tpot=rng.choice((0.0, None)),
    )
    wanted = []
    for _ in range(30):
        prompt = [rng.randrange(3)] * rng.randrange(1, 60) + prompt_of(rng.random(), 3)
        count = rng.randrange(1, 30)
        kind = rng.choice((None, *BACKGROUND))
        handle = bench.submit(prompt, count, tenant=rng.choice("ab"), terms={"background": kind})
        wanted.append((handle, expected_tokens(prompt, count)))
        for _ in range(rng.randrange(4)):
            bench.step()
    bench.run()
    for handle, tokens in wanted:
        assert list(handle.result(0).output_token_ids) == tokens


def test_an_unknown_background_kind_is_refused():
    with pytest.raises(RequestError, match="background='later' is not one of"):
        Terms(background="later")
