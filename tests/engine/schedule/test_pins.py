"""Pinned prompts: their lifetime, their owners, and the requests that they cause to be refused."""

import threading
import time

import pytest

from helpers.clocks import give_clock
from helpers.engine.fake_runner import (
    Bench,
    checked,
    expected_tokens,
    fake_engine,
    hold_passes,
    runner_of,
)
from helpers.raising import assert_raises
from kvboost_edge.engine import core
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.errors import CapacityError, ConfigError, RequestError

PROMPT = list(range(60, 100))  # two full blocks and a half


@pytest.fixture
def engine():
    with fake_engine(num_blocks=16) as engine:
        yield engine


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    give_clock(monkeypatch, lambda: now[0], core)
    return now


def flush(engine):
    """Run a request that needs all blocks that are not pinned."""
    free = engine.paged_stats()["free_blocks"]
    engine.generate([1] * (free * 16 - 8), 2)


def hits(engine, prompt=PROMPT, **terms):
    result = checked(engine, prompt, 2, **terms)
    return result.cached_tokens


def test_a_pinned_prompt_survives_a_flush(engine):
    assert engine.pin(PROMPT).chunks_stored == 1
    flush(engine)
    assert engine.reset_cache() > 0
    stats = engine.paged_stats()
    assert (stats["pinned_blocks"], stats["used_blocks"], stats["max_pinned_blocks"]) == (2, 2, 8)
    assert stats["pinned_bytes"] == 2 * stats["bytes_per_block"]
    assert hits(engine) == 32
    computed = runner_of(engine).computed
    assert engine.pin(PROMPT).chunks_stored == 1
    assert runner_of(engine).computed == computed + 8, (
        "only the part that is not cached must be computed"
    )
    assert (engine.unpin(PROMPT), engine.unpin(PROMPT)) == (2, 0)
    flush(engine)
    assert hits(engine) == 0
    assert engine.paged_stats()["used_blocks"] == 0


def test_pins_belong_to_their_tenant_and_salt(engine):
    engine.pin(PROMPT, tenant="a")
    engine.pin(PROMPT, tenant="a", cache_salt="s")
    for terms in ({}, {"tenant": "b"}, {"cache_salt": "s"}, {"tenant": "b", "cache_salt": "s"}):
        assert engine.unpin(PROMPT, **terms) == 0
    flush(engine)
    assert hits(engine, tenant="b") == 0
    assert hits(engine, tenant="a") == hits(engine, tenant="a", cache_salt="s") == 32
    assert engine.unpin(PROMPT, tenant="a") == engine.unpin(PROMPT, tenant="a", cache_salt="s") == 2


def test_warm_and_submit_can_pin(engine):
    engine.warm("x" * 40, pin=True)
    assert engine.unpin("x" * 40) == 2
    engine.submit(PROMPT, pin=True, max_new_tokens=30).result(30)
    assert engine.unpin(PROMPT) == 2, "the prompt must be pinned, not the generated tokens"


def test_a_pin_expires_while_the_engine_is_idle(clock):
    bench = Bench(16)
    for prompt, ttl in ((PROMPT, 5.0), ([7] * 32, None), ([8] * 32, 50.0)):
        bench.ask(prompt, 2, pin=True, ttl=ttl)
    assert bench.manager.pins.num_blocks == 6
    clock[0] += 5
    assert not bench.step(), "the engine must be idle"
    assert (bench.manager.pins.num_blocks, bench.manager.pins.next_end) == (4, 150.0)
    clock[0] += 1e6
    bench.step()
    assert bench.manager.pins.num_blocks == 2


def test_an_idle_engine_wakes_up_when_a_pin_expires(engine):
    engine.pin(PROMPT, ttl=0.05)
    give_up = time.monotonic() + 30
    while engine.paged_stats()["pinned_blocks"]:
        assert time.monotonic() < give_up
    assert engine.paged_stats()["cached_blocks"] == 2


def test_pins_beyond_the_limit_are_refused_before_prefill(engine):
    with pytest.raises(
        CapacityError,
        match=r"9 more blocks cannot be pinned: the limit is max_pinned_blocks=8 of the 16 ",
    ):
        engine.pin([1] * 144)
    assert_raises(
        RequestError,
        "the 15 tokens of it that other prompts can share do not fill",
        engine.pin,
        [1] * 15,
    )
    assert runner_of(engine).computed == 0
    engine.pin([2] * 96)
    assert_raises(CapacityError, "4 more blocks cannot be pinned", engine.pin, [3] * 64)
    assert engine.paged_stats()["pinned_blocks"] == 6
    assert hits(engine, [3] * 64) == 63, "the tokens must be cached, although they are not pinned"
    with (
        fake_engine(max_pinned_blocks=0) as other,
        pytest.raises(CapacityError, match="max_pinned_blocks=0"),
    ):
        other.pin(PROMPT)
    with pytest.raises(ConfigError, match=r"max_pinned_blocks=40 must be in 0\.\.32"):
        fake_engine(max_pinned_blocks=40)
    with pytest.raises(ConfigError, match="max_pinned_blocks=-1 must be at least 0"):
        fake_engine(max_pinned_blocks=-1)


def test_expected_reuse_counts_as_reuse():
    with fake_engine(num_blocks=16) as engine:
        flags = engine._parts.manager._uses.again
        engine.generate(PROMPT, 2)
        assert sum(flags) == 0
        engine.generate([7] * 40, 2, expect_reuse=True)
        assert sum(flags) == 2 + 1, "the two full blocks and the partial one must count as reused"


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"expect_reuse": "24h"}, "expect_reuse='24h' must be True or False"),
        ({"pin": 1}, "pin=1 must be True or False"),
        ({"ttl": 5}, "ttl=5 has no effect without a pin"),
        ({"pin": True, "ttl": 0}, r"ttl=0 must be in \(0, 1e\+09\]"),
        ({"pin": True, "ttl": float("nan")}, "ttl=nan must be in"),
        ({"pin": True, "ttl": float("inf")}, "ttl=inf must be in"),
        ({"pin": True, "ttl": "long"}, "ttl='long' must be a number"),
        ({"pins": ((16, 0),)}, "must be pairs of a token count"),
        ({"pins": ((-1, 5.0),)}, "must be pairs of a token count"),
        ({"pins": ((16, "long"),)}, "pins='long' must be a number"),
        ({"pins": ((16, 5.0),), "mode": "chunk_kv_reuse"}, "pin needs exact"),
    ],
    ids=repr,
)
def test_invalid_pin_options_are_refused(engine, terms, message):
    for call in (engine.submit, engine.check, engine.stream):
        assert_raises(RequestError, message, call, PROMPT, **terms)
    assert_raises(RequestError, "the prompt is empty", engine.unpin, [])


def test_a_request_that_fails_or_is_cancelled_pins_nothing(engine):
    runner_of(engine).nan_for = {PROMPT[-1]}
    assert_raises(Exception, "NaN", engine.pin, PROMPT)
    assert (
        engine.submit(PROMPT, pin=True, deadline=time.monotonic() - 1).result(30).finish_reason
        == "timeout"
    )
    assert engine.paged_stats()["pinned_blocks"] == 0


def test_pins_survive_preemption():
    """Half of the pool is pinned, and six requests share the other half."""
    bench = Bench(16, max_num_seqs=6)
    bench.ask([9] * 128, 1, pin=True)
    handles = [bench.submit([i] * 30, 50, tenant=str(i % 2)) for i in range(6)]
    bench.run()
    for handle in handles:
        bench.answer(handle)
    assert bench.scheduler.num_preemptions > 0
    assert bench.manager.pins.num_blocks == 8


# requests that only the pins keep from running


def test_a_request_larger_than_the_unpinned_pool_is_refused(engine):
    engine.pin([5] * 80)
    with pytest.raises(
        CapacityError,
        match=r"but only 11 of 16 in the pool are not pinned; lower max_new_tokens, unpin",
    ):
        engine.submit([1] * 180)
    assert hits(engine, [1] * 150) == 0


def test_pinned_blocks_of_the_prompt_count_as_available(engine):
    engine.pin([5] * 128)
    for prompt, served in (([5] * 128 + [6] * 110, 128), ([5] * 128, 127)):
        assert hits(engine, prompt) == served
    assert hits(engine, [5] * 128 + [6] * 100, mode="prefix_cache") == 224
    for options in ({"mode": "baseline"}, {"prompt_logprobs": 0}):
        with pytest.raises(CapacityError, match="8 of 16 in the pool are not pinned"):
            engine.submit([5] * 128 + [6] * 100, **options)
    with pytest.raises(CapacityError, match="8 of 16 in the pool are not pinned"):
        engine.submit([5] * 128 + [6] * 127, max_new_tokens=2)


def test_a_queued_request_is_refused_if_pins_grew():
    """The pins grow while the request waits. Nothing else runs, so no blocks would ever become
    free.
    """
    bench = Bench(16)
    bench.ask([3] * 128, 1)
    handle = bench.submit([1] * 200)
    bench.manager.pins.add([3] * 128, bench.parts.root)
    bench.run()
    assert_raises(CapacityError, "but only 8 of 16 in the pool are not pinned", handle.result, 0)
    later = bench.ask([2] * 20)
    assert later.generated_tokens == 8


@pytest.mark.parametrize("steps", [1, 2, 4, 20])
def test_a_running_request_ends_with_an_error_if_pins_grew(steps):
    bench = Bench(16, max_batch_tokens=32)
    bench.ask([3] * 96, 1)
    handle = bench.submit([1] * 100, 60)
    for _ in range(steps):
        bench.step()
    bench.manager.pins.add([3] * 96, bench.parts.root)
    other = bench.ask([1] * 100, 60)
    assert handle.result(0).generated_tokens == other.generated_tokens == 60, (
        "both requests must end normally in the remaining ten blocks"
    )
    late = bench.submit([2] * 100, 60)
    for _ in range(steps):
        bench.step()
    bench.manager.pins.add([1] * 32, bench.parts.root)
    bench.run()
    assert_raises(CapacityError, "but only 8 of 16 in the pool are not pinned", late.result, 0)


def test_unpinning_admits_a_waiting_request():
    bench = Bench(16)
    bench.ask([3] * 128, 1, pin=True)
    first = bench.submit([1] * 60, 60)
    bench.step()
    second = bench.submit([2] * 60, 20)
    bench.step()
    assert len(bench.scheduler.waiting) == 1
    assert bench.manager.pins.end([3] * 128, bench.parts.root) == 8
    bench.step()
    assert len(bench.scheduler.running) == 2
    bench.run()
    assert (first.result(0).generated_tokens, second.result(0).generated_tokens) == (60, 20)


def test_a_pin_may_be_removed_while_its_blocks_are_read():
    with fake_engine(num_blocks=16) as engine:
        engine.pin(PROMPT)
        go = threading.Event()
        hold_passes(engine, go)
        handle = engine.submit([*PROMPT, 1, 2], max_new_tokens=5)
        while not engine.num_running():
            assert engine.is_alive()
        assert engine.unpin(PROMPT) == 2
        go.set()
        assert list(handle.result(30).output_token_ids) == expected_tokens([*PROMPT, 1, 2], 5)
        assert engine.paged_stats()["used_blocks"] == 0


@pytest.mark.parametrize(
    ("prompt", "total"),
    [
        ([1] * 20, 8 * 16 + 1),
        # All eight pinned blocks are shared, and a copy of the last needs a block.
        ([*range(60, 188), 1], 15 * 16 + 1),
    ],
)
def test_without_a_limit_an_answer_fills_the_blocks_that_pins_leave(engine, prompt, total):
    assert engine.pin(list(range(60, 188))).chunks_stored == 1
    assert engine.paged_stats()["pinned_blocks"] == 8
    result = engine.generate(prompt, None, ignore_eos=True)
    assert (len(prompt) + result.generated_tokens, result.finish_reason) == (total, "length")
    assert list(result.output_token_ids) == expected_tokens(prompt, result.generated_tokens)


# several tenants


def pinned(engine, number, blocks, tenant):
    engine.submit(
        [number] * (blocks * 16), max_new_tokens=1, pin=True, tenant=tenant, pin_share=0.5
    ).result(30)


def test_a_tenant_cannot_pin_more_than_its_share(engine):
    pinned(engine, 1, 4, "a")
    assert_raises(CapacityError, "share of max_pinned_blocks is 4", pinned, engine, 2, 1, "a")
    pinned(engine, 3, 4, "b")
    assert engine.paged_stats()["pinned_blocks"] == 8
    with pytest.raises(CapacityError, match="5 more blocks cannot be pinned"):
        engine.check([1] * 80, max_new_tokens=1, pin=True, tenant="c", pin_share=0.5)
    for share in (0, 1.01, float("nan"), "half"):
        assert_raises(RequestError, "pin_share=", engine.check, PROMPT, pin_share=share)


def test_a_refusal_does_not_reveal_other_tenants_pins(engine):
    """The text for tenant b does not depend on how much tenant a has pinned. An owner that is alone
    reads the cause.
    """
    texts = []
    for number, blocks in ((1, 2), (2, 2)):
        pinned(engine, number, blocks, "a")
        with pytest.raises(CapacityError) as refused:
            engine.submit([5] * 250, max_new_tokens=1, tenant="b", pin_share=0.5)
        texts.append(str(refused.value))
        with pytest.raises(
            CapacityError,
            match=r"more than pinned prompts leave free \(max_pinned_blocks\); shorten the prompt",
        ):
            engine.submit([5] * 250, max_new_tokens=1, tenant="a", pin_share=0.5)
        with pytest.raises(
            CapacityError, match=r"more than pinned prompts leave free \(max_pinned_blocks\)"
        ):
            engine.submit([5] * 250, max_new_tokens=1)
    assert texts[0] == texts[1]
    with pytest.raises(
        CapacityError, match=r"the request needs 19 blocks .* the pool has only 16; shorten"
    ):
        engine.submit([5] * 300, max_new_tokens=1, tenant="b", pin_share=0.5)


def test_prefix_pins_are_optional(clock):
    bench = Bench(16, max_num_seqs=1)
    whole = bench.submit(PROMPT, 2, terms={"pins": ((16, 60.0), (40, 5.0))})
    bench.run()
    assert (whole.result(0).finish_reason, whole.pinned_tokens, whole.cached_tokens) == (
        "length",
        40,
        0,
    )
    assert bench.manager.pins.num_blocks == 2
    clock[0] += 6
    again = bench.submit(PROMPT, 2, terms={"pins": ((10, 60.0),)})
    bench.run()
    assert (again.cached_tokens, again.pinned_tokens) == (32, 0), (
        "a prefix shorter than a block must not be pinned"
    )
    assert bench.manager.pins.num_blocks == 1, "the pin of the second block must have expired"
    for seconds in (60.0, 600.0, 30.0):
        bench.submit(PROMPT, 2, terms={"pins": ((16, seconds),)})
        bench.run()
    clock[0] += 500
    bench.ask([1], 1)
    assert bench.manager.pins.num_blocks == 1, "a shorter pin must not end a longer one"
    clock[0] += 100
    bench.ask([1], 1)
    assert bench.manager.pins.num_blocks == 0
    large = bench.submit([7] * 160, 2, terms={"pins": ((160, 60.0), (32, 60.0))})
    bench.run()
    assert (large.result(0).finish_reason, large.pinned_tokens) == ("length", 32), (
        "pins beyond the limit of eight blocks must be left out"
    )
    clock[0] += 60
    bench.ask([1], 1)
    assert bench.manager.pins.num_blocks == 0


def test_a_holder_shortens_and_ends_its_own_pin_only(engine):
    def pins(seconds, holder):
        terms = Terms(pins=((len(PROMPT), seconds),), pin_holder=holder)
        engine.submit(PROMPT, max_new_tokens=1, terms=terms).result(30)

    whole = Terms(pin=True, ttl=60, pin_holder="one")
    engine.submit(PROMPT, max_new_tokens=1, terms=whole).result(30)
    assert engine.unpin(PROMPT, holder="one") == 2
    pins(600.0, "one")
    engine.pin(PROMPT)
    assert engine.unpin(PROMPT, holder="one") == 0
    assert engine.paged_stats()["pinned_blocks"] == 2
    pins(600.0, "one")
    assert engine.unpin(PROMPT, holder="") == 0
    pins(0.01, "one")  # replaces the ten minutes
    give_up = time.monotonic() + 30
    while engine.paged_stats()["pinned_blocks"]:
        assert time.monotonic() < give_up
