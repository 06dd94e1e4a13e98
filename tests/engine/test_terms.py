"""Request options of a server: tenants, salts, priorities, deadlines and prompt log probabilities;
and the engine's state.
"""

import math
import threading
import time

import numpy as np
import pytest

from helpers.clocks import give_clock
from helpers.engine.fake_runner import (
    POISON,
    Bench,
    checked,
    fake_engine,
    hold_passes,
    runner_of,
    token_logits,
)
from helpers.raising import assert_raises
from kvboost_edge.config import EngineConfig, GenerationMode, RecomputeStrategy
from kvboost_edge.engine import core
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.engine.stats import block_details, paged_stats
from kvboost_edge.errors import CapacityError, RequestError
from kvboost_edge.reuse.recompute import Repair

PROMPT = list(range(60, 100))


@pytest.fixture
def engine():
    with fake_engine() as engine:
        yield engine
        assert engine.paged_stats()["used_blocks"] == 0


def cached(engine, **terms):
    result = checked(engine, PROMPT, 2, **terms)
    return result.cached_tokens, result.miss_reason


def test_tenants_and_salts_share_nothing(engine):
    """RELIABILITY 18: neither hits nor the reasons for misses reveal to one tenant what another
    cached.
    """
    for terms in (
        {},
        {"tenant": "a"},
        {"tenant": "b"},
        {"cache_salt": "a"},
        {"tenant": "a", "cache_salt": "x"},
        {"tenant": "a", "cache_salt": "y"},
        {"tenant": "b", "cache_salt": "x"},
    ):
        assert cached(engine, **terms) == (0, "first_seen"), terms
        assert cached(engine, **terms) == (32, "tail"), terms
    assert cached(engine, tenant="") == (32, "tail"), "an empty tenant must equal no tenant"


def test_warm_belongs_to_its_tenant_and_salt(engine):
    assert engine.warm(PROMPT, tenant="a", cache_salt="s").chunks_stored == 1
    assert cached(engine, tenant="a", cache_salt="s") == (32, "tail")
    assert cached(engine, tenant="a") == (0, "first_seen")


def test_miss_reasons_are_reported():
    with fake_engine(num_blocks=6) as engine:
        assert cached(engine) == (0, "first_seen")
        engine.generate([7] * 90, 2)
        assert cached(engine)[1] == "evicted"
        engine.reset_cache()
        assert cached(engine) == (0, "evicted"), "a reset must evict the cached blocks"
        assert engine.generate([1, 2, 3], 2).miss_reason == "tail"
        assert engine.generate([5] * 33, 2).miss_reason == "first_seen"
        assert engine.generate([5] * 33, 2).miss_reason == "", (
            "a prompt without a miss must have no miss reason"
        )
        assert engine.generate([5] * 32, 2).miss_reason == ""
        assert engine.generate(PROMPT, 2, "baseline").miss_reason == "bypassed"
        assert engine.generate([5] * 33, 2, prompt_logprobs=0).miss_reason == "bypassed"


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"tenant": 3}, "tenant=3 must be a string"),
        ({"tenant": "x" * 1025}, "tenant has 1025 characters"),
        ({"cache_salt": ""}, "cache_salt='' must have"),
        ({"cache_salt": b"x"}, "cache_salt=b'x' must be a string"),
        ({"priority": 1.5}, r"priority=1\.5 must be an integer"),
        ({"priority": True}, "priority=True must be an integer"),
        ({"priority": 2**31}, r"priority=2147483648 must be in"),
        ({"deadline": math.nan}, "deadline=nan must be finite"),
        ({"deadline": math.inf}, "deadline=inf must be finite"),
        ({"deadline": "soon"}, "deadline='soon' must be a number"),
        ({"prompt_logprobs": -1}, r"prompt_logprobs=-1 must be in 0\.\.100"),
        ({"prompt_logprobs": 101}, "prompt_logprobs=101"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_invalid_terms_are_refused(engine, terms, message):
    for call in (
        engine.submit,
        engine.check,
        engine.stream,
        lambda p, **o: engine.generate_batch([p], **o),
    ):
        assert_raises(RequestError, message, call, PROMPT, **terms)


def test_check_raises_the_errors_of_submit_and_admits_nothing(engine):
    assert engine.check(PROMPT, max_new_tokens=5, tenant="a") == 40
    assert_raises(RequestError, "the prompt is empty", engine.check, [])
    assert_raises(RequestError, "unknown sampling option", engine.check, PROMPT, temprature=1)
    with fake_engine(num_blocks=2) as small, pytest.raises(CapacityError, match="needs 7 blocks"):
        small.check(PROMPT)
    assert (engine.num_running(), engine.num_waiting(), engine.waiting_tokens()) == (0, 0, 0)


def test_lower_priority_numbers_run_first():
    bench = Bench(64, max_num_seqs=1)
    order = []
    handles = [bench.submit([i] * 20, 3, priority=p) for i, p in enumerate((0, 5, -1, 5, 0))]
    while not all(handle.done for handle in handles):
        bench.step()
        order += [i for i, handle in enumerate(handles) if handle.done and i not in order]
    assert order == [2, 0, 4, 1, 3]
    for handle in handles:
        bench.answer(handle)


def test_the_lowest_priority_number_gets_the_token_budget():
    bench = Bench(64, max_batch_tokens=16)
    slow = bench.submit([1] * 200, 1, priority=1)
    bench.step()
    quick = bench.submit([2] * 64, 1, priority=0)
    for _ in range(4):
        bench.step()
    assert quick.done
    assert not slow.done
    bench.run()


def test_the_highest_priority_number_is_preempted():
    bench = Bench(6, max_num_seqs=2)
    first = bench.submit([1] * 30, 50, priority=1)
    second = bench.submit([2] * 30, 50, priority=0)
    bench.run()
    assert (first.result(0).preemptions > 0, second.result(0).preemptions) == (True, 0)
    for handle in (first, second):
        bench.answer(handle)


def test_a_request_ends_with_partial_output_at_its_deadline(monkeypatch):
    """A request that is new, waiting, prefilling or decoding ends within one step. Its blocks are
    freed, and others continue.
    """
    now = [100.0]
    give_clock(monkeypatch, lambda: now[0], core)
    for steps in range(12):
        bench = Bench(6, max_num_seqs=2, max_batch_tokens=16)
        timed = [bench.submit([i] * 30, 40, deadline=now[0] + 5) for i in range(3)]
        other = bench.submit([9] * 20, 10, deadline=now[0] + 500)
        for _ in range(steps):
            bench.step()
        assert not any(handle.done for handle in timed)
        now[0] += 5
        bench.step()
        for handle in timed:
            assert bench.answer(handle).finish_reason == "timeout"
        bench.run()
        bench.answer(other)
        assert bench.manager.used_block_count == 0
        bench.manager.check_invariants([])
    assert timed[0].result(0).generated_tokens > 0


def test_a_deadline_in_the_past_computes_nothing(engine):
    result = engine.generate(PROMPT, 5, deadline=time.monotonic() - 1)
    assert (result.finish_reason, result.generated_tokens, result.miss_reason) == (
        "timeout",
        0,
        "not_started",
    )
    assert runner_of(engine).computed == 0


def test_deadlines_of_ended_requests_are_dropped():
    bench = Bench()
    for _ in range(300):
        bench.ask([1, 2], 1, deadline=time.monotonic() + 1000)
    assert len(bench.core._deadlines) < 100


def logprob(token_ids, token):
    logits = token_logits(token_ids).astype(np.float64)
    return float(logits[token] - logits.max() - np.log(np.exp(logits - logits.max()).sum()))


@pytest.mark.parametrize("budget", [1, 7, 64])
def test_prompt_logprobs_do_not_depend_on_chunking_or_cache(budget):
    """The values are the same for any contents of the cache, any chunking, and after preemptions."""
    prompts = [[i, *range(30 + 9 * i)] for i in range(3)]
    bench = Bench(6, max_num_seqs=3, max_batch_tokens=budget)
    for _ in range(2):
        handles = [bench.submit(prompt, 20, prompt_logprobs=2) for prompt in prompts]
        bench.run()
        for prompt, handle in zip(prompts, handles, strict=True):
            result = bench.answer(handle)
            assert result.cached_tokens == 0
            entries = result.prompt_logprobs
            assert handle.prompt_logprobs == entries
            assert entries[0] is None
            assert [entry.token_id for entry in entries[1:] if entry] == prompt[1:]
            for at, entry in enumerate(entries[1:], 1):
                assert entry.logprob == pytest.approx(logprob(prompt[:at], prompt[at]))
                assert len(entry.top) == 2
    assert bench.scheduler.num_preemptions > 0


def test_prompt_logprobs_limit_the_rows_per_pass():
    bench = Bench(64, max_batch_tokens=400)
    rows = []
    bench.runner.on_forward = lambda batch: rows.append(len(batch.logit_rows))
    bench.ask(list(range(250)), 3, prompt_logprobs=0)
    assert sum(rows) == 252
    assert max(rows) == 64


def test_max_new_tokens_0_only_computes_the_prompt(engine):
    result = engine.generate(PROMPT, 0)
    assert (result.output_token_ids, result.output_text, result.finish_reason) == ((), "", "length")
    assert engine.generate(PROMPT, 2).cached_tokens == 32
    scored = engine.generate(PROMPT, 0, prompt_logprobs=0)
    assert scored.prompt_logprobs is not None
    assert len(scored.prompt_logprobs) == 40
    whole = engine.generate([3] * 400, 0)
    assert (whole.prompt_tokens, whole.generated_tokens) == (400, 0), (
        "a prompt may fill the context"
    )
    assert_raises(RequestError, "401 tokens are more", engine.generate, [3] * 401, 0)


def test_running_and_waiting_counts_of_a_busy_engine():
    with fake_engine(max_num_seqs=2) as engine:
        go = threading.Event()
        hold_passes(engine, go)
        with engine._core.lock:  # the first pass begins when all of them are queued
            handles = [engine.submit([i] * 20, max_new_tokens=4) for i in range(5)]
        while engine.num_running() < 2:
            assert engine.is_alive()
        handles.append(engine.submit([9] * 20, max_new_tokens=4))  # while the pass runs
        assert (engine.num_running(), engine.num_waiting(), engine.waiting_tokens()) == (2, 4, 80)
        stats = engine.paged_stats()
        assert (stats["num_running"], stats["num_waiting"]) == (2, 4)
        details = engine.block_details()
        assert [detail.state for detail in details] == engine.block_map()
        assert (
            sum(detail.refs for detail in details)
            == sum(detail.state == 2 for detail in details)
            == 4
        )
        go.set()
        for handle in handles:
            handle.result(30)
        assert (engine.num_running(), engine.num_waiting(), engine.waiting_tokens()) == (0, 0, 0)


def stored_tokens(bench):
    """Count the slots with KV in blocks that are published or that sequences hold."""
    manager = bench.manager
    held = {block for one in bench.scheduler.running for block in one.blocks.block_ids}
    cached = {block for block in range(manager.num_blocks) if manager.has_entry(block)}
    return int((bench.parts.backend.tokens[[*held | cached]] != POISON).sum())


@pytest.mark.parametrize("mode", GenerationMode)
def test_tokens_held_counts_each_stored_token_once(mode):
    bench = Bench(40, max_batch_tokens=30)
    # Other strategies score reused text, which stores KV of tokens that are not computed yet.
    reuses = mode is GenerationMode.CHUNK_KV_REUSE
    repair = Repair(strategy=RecomputeStrategy.NONE) if reuses else None
    text = list(range(100, 164))
    bench.ask([*range(30), *text], 2, terms={"max_draft_tokens": 0})
    for prompt in ([*range(60), *text], [*range(20), *text, 9], [*range(40)], [*range(40)]):
        bench.submit(prompt, 20, mode, repair=repair, terms={"max_draft_tokens": 0})
    had_spans = []
    while bench.step():
        tiering, times = bench.core.tiering, bench.core.step_times
        stats = paged_stats(bench.parts, bench.scheduler, EngineConfig(), tiering, times, 0)
        assert stats["tokens_held"] == stored_tokens(bench)
        had_spans.append(any(one.blocks.spans for one in bench.scheduler.running))
    assert any(had_spans) == reuses
    assert len(had_spans) > 20


def test_block_details_report_tokens_and_references():
    bench = Bench(8, max_batch_tokens=64)
    bench.ask(list(range(40)), 8)
    bench.submit(list(range(40)), 8)
    bench.step()
    details = block_details(bench.parts, bench.scheduler, 100)
    assert len(details) == 8
    table = bench.scheduler.running[0].table
    assert [details[block][1:] for block in table.block_ids] == [(16, 1), (16, 1), (8, 1)]
    assert len(block_details(bench.parts, bench.scheduler, 3)) == 3
    bench.run()


def test_block_details_of_an_idle_engine_report_the_tokens_of_pinned_blocks():
    bench = Bench(8)
    bench.ask(list(range(40)), 2, pin=True)
    bench.ask(list(range(100, 120)), 2)
    details = block_details(bench.parts, bench.scheduler, 8)
    assert sorted(details) == [(0, 0, 0)] * 5 + [(1, 16, 0)] + [(2, 16, 1)] * 2


def test_terms_are_given_as_an_object_or_by_field(engine):
    engine.submit(PROMPT, terms=Terms(tenant="a"), max_new_tokens=1).result()
    assert engine.submit(PROMPT, tenant="a", max_new_tokens=1).result().cached_tokens
    assert (
        not engine.submit(PROMPT, terms=Terms(tenant="b"), max_new_tokens=1).result().cached_tokens
    )
    with pytest.raises(RequestError, match="terms='a' must be a Terms object"):
        engine.submit(PROMPT, terms="a", max_new_tokens=1)
    with pytest.raises(
        RequestError, match=r"terms= and priority are both given; set the fields in"
    ):
        engine.submit(PROMPT, terms=Terms(tenant="a"), priority=2, max_new_tokens=1)
