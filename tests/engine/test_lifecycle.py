"""A request that ends in any way (finish, cancel, an error at any point, the engine's end) leaks
nothing.
"""

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers.engine.fake_runner import (
    Bench,
    FakeRunner,
    assert_clean,
    checked,
    expected_tokens,
    fake_engine,
    hold_passes,
    runner_of,
    wait_until_idle,
)
from helpers.raising import assert_raises
from helpers.server.live_servers import wait_until
from kvboost_edge.engine.handle import RequestHandle, TokenEvent
from kvboost_edge.engine.request.answer_ids import AnswerStore
from kvboost_edge.engine.schedule.feature import Restored
from kvboost_edge.engine.schedule.planners import Prefetcher
from kvboost_edge.engine.schedule.retention import Retention
from kvboost_edge.engine.schedule.scheduler import Scheduler
from kvboost_edge.engine.schedule.sequence import Sequence
from kvboost_edge.engine.sequence_factory import Sequences
from kvboost_edge.engine.spec_decode.speculation import Speculation
from kvboost_edge.errors import CacheCorruption, CapacityError, KVBoostError
from kvboost_edge.kvcache.manager import KVCacheManager
from kvboost_edge.runners.base import PassAbandoned
from kvboost_edge.text.detokenizer import IncrementalDetokenizer
from kvboost_edge.text.stop_strings import StopChecker


@pytest.fixture
def engine():
    with fake_engine() as engine:
        yield engine


def test_waiting_for_a_result_wakes_up_once():
    """A wake-up for each token would take a processor from the pass, only for the thread to sleep
    again.
    """
    handle = RequestHandle(0, lambda index: None)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(handle.result)
        asleep = handle._ended._waiters
        wait_until(lambda: len(asleep) == 1, "the other thread to fall asleep")
        (sleeper,) = asleep
        handle._push(TokenEvent(1, "", 0.0))
        assert list(asleep) == [sleeper]
        handle._finish(None, Boom())
        assert isinstance(waiting.exception(30), Boom)


class Boom(Exception):
    """Unexpected error."""


def raise_on_call(monkeypatch, owner, name, at):
    """Raise Boom in the `at`-th call of a method. Return a list that grows with the calls."""
    real = getattr(owner, name)
    calls = []

    def wrapper(*args, **kwargs):
        calls.append(len(calls) + 1)
        if len(calls) == at:
            raise Boom(f"{name} call {at}")
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapper)
    return calls


POINTS = [
    (KVCacheManager, "awaited_hash"),
    (KVCacheManager, "open_table"),
    (KVCacheManager, "blocks_needed"),
    (KVCacheManager, "extend"),
    (KVCacheManager, "commit"),
    (Prefetcher, "missed"),
    (Prefetcher, "used"),
    (Restored, "admit"),
    (FakeRunner, "forward"),
    (Sequence, "accept"),
    (IncrementalDetokenizer, "push"),
    (IncrementalDetokenizer, "flush"),
    (StopChecker, "push"),
    (StopChecker, "flush"),
    ("kvboost_edge.engine.schedule.output", "token_logprobs"),
    ("kvboost_edge.engine.samplers.sampling", "uniform"),
]


@pytest.mark.parametrize(
    ("owner", "name"), POINTS, ids=lambda value: getattr(value, "__name__", value)
)
@pytest.mark.parametrize("at", [1, 2, 3, 7])
@pytest.mark.some(5)
def test_an_error_at_any_point_ends_only_its_requests(engine, monkeypatch, owner, name, at):
    """RELIABILITY 6 and 8: the other requests keep their answers."""
    if isinstance(owner, str):
        owner = __import__(owner, fromlist=["_"])
    prompts = [[i] * 20 for i in range(4)]
    with monkeypatch.context() as patch:
        raise_on_call(patch, owner, name, at)
        options = {
            "max_new_tokens": 12,
            "logprobs": 1,
            "temperature": 0.7,
            "stop": "no such text",
            "seed": 1,
        }
        handles = [engine.submit(prompt, **options) for prompt in prompts]
        outcomes = [_outcome(handle.result) for handle in handles]
    failed = [o for o in outcomes if isinstance(o, Exception)]
    assert all(isinstance(error, Boom) for error in failed)
    if (owner, name) not in (
        (FakeRunner, "forward"),
        (StopChecker, "flush"),
        (IncrementalDetokenizer, "flush"),
    ):
        assert len(failed) <= 1, "only the request that failed may end"
    assert_clean(engine)
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        if not isinstance(outcome, Exception):
            again = engine.generate(prompt, **options)
            assert again.output_token_ids == outcome.output_token_ids


def _outcome(call):
    try:
        return call()
    except Exception as error:
        return error


@pytest.mark.parametrize("name", ["encode", "decode"])
def test_an_error_during_tokenization_releases_everything(engine, monkeypatch, name):
    with monkeypatch.context() as patch:
        raise_on_call(patch, type(engine.tokenizer), name, 1)
        with pytest.raises(Boom):
            engine.generate("some text" if name == "encode" else [1, 2, 3])
    assert_clean(engine)


def test_an_error_in_a_batch_is_raised_after_the_others_finish(engine):
    runner_of(engine).nan_for = {77}
    with pytest.raises(KVBoostError, match="NaN"):
        engine.generate_batch([[1, 2, 3], [4, 77], [5, 6]], max_new_tokens=5)
    assert_clean(engine)


def test_nan_logits_end_only_their_request():
    bench = Bench(max_batch_tokens=64)
    bench.runner.nan_for = {255}
    bad = bench.submit([*range(47), 255], 5)
    good = bench.submit([*range(60, 100)], 5)
    bench.run()
    assert_raises(KVBoostError, "NaN or infinite logits near token 47", bad.result, 0)
    bench.answer(good)
    # The chunk that held the bad token was not published, but full blocks before it may be.
    assert bench.manager.peek([*range(47), 255, 1], bench.parts.root) < 48


def test_nan_in_chunked_prefill_is_detected_before_publishing():
    bench = Bench(max_batch_tokens=16)
    bench.runner.nan_for = {255}
    bad = bench.submit([*range(31), 255, *range(40)], 5)
    bench.run()
    assert_raises(KVBoostError, "near token 31", bad.result, 0)
    assert bench.manager.peek([*range(31), 255, *range(40)], bench.parts.root) == 16


def test_cancelling_works_in_every_state():
    """The requests are new, in the inbox, waiting, waiting for a prefix in flight, prefilling,
    decoding, preempted or done.
    """
    for steps in range(30):
        bench = Bench(6, max_num_seqs=2, max_batch_tokens=16)
        handles = [
            bench.submit([1] * 30, 40),
            bench.submit([2] * 30, 40),
            bench.submit([1] * 30 + [3], 20),
        ]
        for _ in range(steps):
            bench.step()
        for handle in handles:
            handle.cancel()
        bench.step()  # it takes at most one step
        assert all(handle.done for handle in handles)
        assert bench.manager.used_block_count == 0
        assert not bench.scheduler.has_work
        bench.manager.check_invariants([])
        for handle in handles:
            assert bench.answer(handle).finish_reason in ("cancelled", "length")


def test_cancelling_during_a_forward_pass(engine):
    started = threading.Event()
    go = threading.Event()

    def hold(batch):
        started.set()
        assert go.wait(30)

    runner_of(engine).on_forward = hold
    handle = engine.submit(list(range(200)), max_new_tokens=100)
    assert started.wait(30)
    handle.cancel()
    assert engine.paged_stats()["num_running"] == 1  # readable while the model computes
    runner_of(engine).on_forward = None
    go.set()
    assert handle.result(30).finish_reason == "cancelled"
    assert handle.result(30).generated_tokens <= 1
    assert_clean(engine)


@pytest.mark.parametrize("end", ["cancel", "timeout", "close"])
def test_a_pass_of_cancelled_requests_is_aborted(end):
    """The runner polls `is_abandoned` and ends the pass early."""
    started = threading.Event()

    def ask(batch):
        started.set()
        deadline = time.monotonic() + 20
        while not batch.is_abandoned():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        raise PassAbandoned

    with fake_engine() as engine:
        runner_of(engine).on_forward = ask
        options = {"deadline": time.monotonic() + 0.5} if end == "timeout" else {}
        handle = engine.submit(list(range(200)), max_new_tokens=5, **options)
        assert started.wait(20)
        if end == "close":
            engine.close()
            with pytest.raises(KVBoostError, match="closed"):
                handle.result(20)
            return
        if end == "cancel":
            handle.cancel()
        assert handle.result(20).finish_reason == {"cancel": "cancelled"}.get(end, end)
        runner_of(engine).on_forward = None
        checked(engine, list(range(200)), 5)
        assert_clean(engine)


def test_a_pass_with_a_live_request_is_not_aborted():
    bench = Bench()
    first = bench.submit(list(range(10)), 5)
    bench.submit(list(range(20, 30)), 5)
    answers = []

    def ask(batch):
        first.cancel()
        answers.append(batch.is_abandoned())

    bench.runner.on_forward = ask
    bench.step()
    assert answers == [False]


def test_closing_a_stream_cancels(engine):
    stream = engine.stream(list(range(50)), max_new_tokens=None)
    assert next(stream)
    stream.close()
    wait_until_idle(engine)
    assert_clean(engine)
    del stream
    unread = engine.stream([1, 2, 3])
    del unread
    assert_clean(engine)


def test_threads_share_one_engine(engine):
    outputs = {}

    def work(number):
        for turn in range(6):
            prompt = [number, turn, *range(30)]
            outputs[number * 10 + turn] = engine.generate(
                prompt, max_new_tokens=10
            ).output_token_ids

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for key, tokens in outputs.items():
        assert list(tokens) == expected_tokens([key // 10, key % 10, *range(30)], 10)
    assert len(outputs) == 48
    assert max(runner_of(engine).batches) > 1
    assert_clean(engine)


def test_close_fails_running_and_later_requests():
    engine = fake_engine()
    started = threading.Event()
    go = threading.Event()

    def hold(batch):
        started.set()
        assert go.wait(30)

    runner_of(engine).on_forward = hold
    running = engine.submit(list(range(50)))
    assert started.wait(30)
    waiting = engine.submit([1, 2, 3])
    closer = threading.Thread(target=engine.close)
    closer.start()
    go.set()
    closer.join(30)
    for handle in (running, waiting):
        assert_raises(KVBoostError, "closed before", handle.result, 30)
        handle.cancel()
    engine.close()
    assert not engine.is_alive()
    assert engine.failure() is None
    assert runner_of(engine).closed
    assert engine._parts.backend.closed
    assert engine._parts.manager.used_block_count == 0
    for call in (
        lambda: engine.generate([1]),
        lambda: engine.warm([1]),
        lambda: engine.logits([1]),
        lambda: list(engine.stream([1])),
        engine.paged_stats,
        engine.cache_stats,
        engine.reset_cache,
        engine.block_map,
    ):
        assert_raises(KVBoostError, "the engine is closed", call)


def test_an_unreferenced_engine_ends_its_thread():
    engine = fake_engine()
    engine.generate([1, 2, 3], max_new_tokens=2)
    thread = engine._core._thread
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    thread.join(30)
    assert not thread.is_alive()


def test_a_handle_keeps_its_engine_alive():
    handle = fake_engine().submit(list(range(20)), max_new_tokens=10)
    gc.collect()
    assert list(handle.result(30).output_token_ids) == expected_tokens(range(20), 10)


def test_cache_corruption_stops_the_engine_and_fails_all_requests(
    monkeypatch,
):
    with fake_engine() as engine:
        assert engine.is_alive()
        assert engine.failure() is None

        def corrupt(*args, **kwargs):
            raise CacheCorruption("broken on purpose")

        monkeypatch.setattr(KVCacheManager, "commit", corrupt)
        go = threading.Event()
        hold_passes(engine, go)
        handles = [engine.submit([i, 1], max_new_tokens=3) for i in range(3)]
        go.set()
        for handle in handles:
            error = _outcome(lambda handle=handle: handle.result(30))
            assert isinstance(error, KVBoostError)
        assert_raises(CacheCorruption, "broken on purpose", handles[0].result, 30)
        engine._core._thread.join(30)
        assert not engine.is_alive()
        assert isinstance(engine.failure(), CacheCorruption)
        with pytest.raises(KVBoostError, match=r"stopped after an error.*broken on purpose"):
            engine.generate([1])


ENDINGS = [
    ("kvboost_edge.engine.core", "pin_prompt"),
    (Retention, "ended"),
    (Scheduler, "finish"),
    (KVCacheManager, "free"),
    (AnswerStore, "keep"),
    (Speculation, "remember"),
    (Sequence, "result"),
]


@pytest.mark.parametrize(
    ("owner", "name"), ENDINGS, ids=lambda value: getattr(value, "__name__", value)
)
def test_an_error_while_a_request_ends_stops_the_engine_and_fails_all_requests(
    monkeypatch, owner, name
):
    bench = Bench()
    handles = [bench.submit([i] * 20, count) for i, count in enumerate((2, 30, 30))]
    if isinstance(owner, str):
        owner = __import__(owner, fromlist=["_"])
    raise_on_call(monkeypatch, owner, name, 1)
    bench.core.start()
    for handle in handles:
        assert_raises(Boom, f"{name} call 1", handle.result, 30)
    bench.core.close()
    assert_raises(KVBoostError, "stopped after an error", bench.submit, [1])
    assert bench.runner.closed
    assert bench.parts.backend.closed


@pytest.mark.parametrize("at", [1, 2])
def test_an_error_while_the_engine_closes_fails_the_other_requests(monkeypatch, at):
    bench = Bench()
    handles = [bench.submit([i] * 20, 30) for i in range(3)]
    bench.step()
    raise_on_call(monkeypatch, KVCacheManager, "free", at)
    bench.core.close()
    outcomes = [_outcome(lambda handle=handle: handle.result(0)) for handle in handles]
    assert [type(one) for one in outcomes] == [KVBoostError] * (at - 1) + [Boom] * (4 - at)
    assert bench.runner.closed


def test_after_a_failure_requests_in_the_inbox_end_with_its_error(monkeypatch):
    bench = Bench()
    handles = [bench.submit([i] * 20, 30) for i in range(3)]
    bench.step()
    raise_on_call(monkeypatch, KVCacheManager, "free", 1)
    for handle in handles:
        handle.cancel()
    handles.append(bench.submit([9], 1))
    bench.core.close()
    for handle in handles:
        assert_raises(Boom, "free call 1", handle.result, 0)


@pytest.mark.parametrize("owner", [Sequences, Speculation, FakeRunner])
def test_an_error_while_one_part_closes_leaves_no_other_part_open(monkeypatch, owner):
    bench = Bench()
    raise_on_call(monkeypatch, owner, "close", 1)
    assert_raises(Boom, "close call 1", bench.core.close)
    assert bench.parts.backend.closed
    assert bench.runner.closed or owner is FakeRunner


def test_debug_checks_detect_a_write_into_a_shared_block():
    bench = Bench()
    bench.ask(list(range(32)), 1)
    cached = bench.manager.block_states().index(1)

    def scribble(batch):
        bench.parts.backend.tokens[cached] = 3

    bench.runner.on_forward = scribble
    bench.submit([200, 201], 1)
    assert_raises(CacheCorruption, "was written while it was shared or cached", bench.core.step)


def test_a_request_that_can_never_fit_is_refused_at_once():
    with fake_engine(num_blocks=4) as small:
        with pytest.raises(
            CapacityError, match=r"needs 7 blocks \(60 prompt tokens and up to 50 new ones"
        ):
            small.generate([1] * 60, max_new_tokens=50)
        with pytest.raises(CapacityError):
            small.warm([1] * 65)
        with pytest.raises(CapacityError):
            small.logits([1] * 65)
        with pytest.raises(CapacityError):
            small.generate_batch([[1], [1] * 60], max_new_tokens=50)
        assert small.generate([1] * 60, max_new_tokens=5).generated_tokens == 5
        assert small.paged_stats()["used_blocks"] == 0


def test_result_times_out_without_ending_the_request(engine):
    go = threading.Event()
    hold_passes(engine, go)
    handle = engine.submit([1, 2, 3], max_new_tokens=3)
    assert_raises(TimeoutError, r"timeout=0\.01", handle.result, 0.01)
    go.set()
    assert handle.result(30).generated_tokens == 3


def test_reset_drops_idle_blocks(engine):
    engine.generate(list(range(40)), max_new_tokens=2)
    assert engine.reset_cache() == 2
    assert engine.generate(list(range(40)), max_new_tokens=2).cached_tokens == 0
    assert engine.cache_stats()["hot_chunks"] == 2
