"""The watchdog of the step loop, over a tier whose loads never arrive."""

import logging
from types import SimpleNamespace

import pytest

from helpers.engine.fake_runner import Bench
from helpers.engine.hand_io_thread import DictTier
from kvboost_edge.engine import stall_watchdog

PROMPT = [201, *range(100)]


@pytest.fixture
def clock(monkeypatch):
    """Clock that the test moves; `clock[0]` is the time."""
    now = [1000.0]
    monkeypatch.setattr(stall_watchdog, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def stalled_bench():
    """Return a bench and the handle of a request whose blocks a tier has but never delivers."""
    tier = DictTier()
    Bench(tiers=[tier]).ask(PROMPT, 1)
    bench = Bench(tiers=[tier], max_num_seqs=1)
    return bench, bench.submit(PROMPT, 3)


def messages(caplog):
    return [one.getMessage() for one in caplog.records if "nothing runs" in one.getMessage()]


def test_a_stall_is_logged_once_with_its_cause(clock, caplog):
    bench, handle = stalled_bench()
    bench.submit([5, 6, 7], 1, priority=2)
    with caplog.at_level(logging.WARNING):
        bench.step()
        clock[0] += stall_watchdog.STALL_SECONDS - 0.1
        bench.step()
        assert messages(caplog) == []
        for _ in range(3):
            clock[0] += stall_watchdog.STALL_SECONDS
            bench.step()
    (message,) = messages(caplog)
    assert message == (
        "requests wait but nothing runs: no token was computed for 20 s; places 0 running and 1 "
        "loading of 1, blocks 64 free of 64, loads 1 arriving and 0 arrived; waiting: request 1 "
        "(priority 0, 101 tokens, load arriving), request 2 (priority 2, 3 tokens, place); "
        "running: none"
    )
    bench.run()
    assert bench.answer(handle).generated_tokens == 3


def test_each_stall_is_logged_and_computing_steps_are_not_stalls(clock, caplog):
    bench, _ = stalled_bench()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            clock[0] += stall_watchdog.STALL_SECONDS
            bench.step()
        assert len(messages(caplog)) == 1
        bench.io_thread.pump()
        while bench.scheduler.has_work:
            clock[0] += stall_watchdog.STALL_SECONDS
            bench.step()
        bench.run()
        clock[0] += stall_watchdog.STALL_SECONDS
        bench.step()
        assert len(messages(caplog)) == 1
        bench.manager.reset()
        bench.submit(PROMPT, 3)
        for _ in range(3):
            clock[0] += stall_watchdog.STALL_SECONDS
            bench.step()
        assert len(messages(caplog)) == 2
