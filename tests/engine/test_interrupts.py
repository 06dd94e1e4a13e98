"""Ctrl-C at any moment of a call ends the call's requests and leaks nothing."""

import itertools
import signal
import threading

import pytest

from helpers.engine.fake_runner import (
    assert_clean,
    fake_engine,
    hold_passes,
    runner_of,
    wait_until_idle,
)
from kvboost_edge.engine.handle import RequestHandle


@pytest.fixture
def engine():
    with fake_engine() as engine:
        yield engine


def test_ctrl_c_while_waiting_cancels_the_request(engine):
    main = threading.get_ident()
    passes = itertools.count()

    def interrupt(batch):
        if next(passes) == 3:
            signal.pthread_kill(main, signal.SIGINT)

    runner_of(engine).on_forward = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.generate(list(range(50)), max_new_tokens=None)
    runner_of(engine).on_forward = None
    with pytest.raises(KeyboardInterrupt):
        interrupted_stream(engine)
    wait_until_idle(engine)
    assert_clean(engine)


@pytest.mark.parametrize(
    "call",
    [
        lambda engine: engine.generate(list(range(50)), max_new_tokens=None),
        lambda engine: engine.generate_batch([[1, 2], list(range(50))], max_new_tokens=None),
        lambda engine: engine.generate_many([[1, 2], list(range(50))], max_new_tokens=None),
        lambda engine: engine.warm(list(range(50))),
        lambda engine: list(engine.stream(list(range(50)), max_new_tokens=None)),
    ],
    ids=["generate", "generate_batch", "generate_many", "warm", "stream"],
)
def test_ctrl_c_during_submission_cancels_the_request(engine, monkeypatch, call):
    """Passes are held back, because on a busy machine several could end before the interrupt."""

    def interrupt(*_):
        raise KeyboardInterrupt

    go = threading.Event()
    hold_passes(engine, go)
    with monkeypatch.context() as patch:
        patch.setattr(RequestHandle, "keep_alive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            call(engine)
    assert len(engine._core._live) == 1
    go.set()
    wait_until_idle(engine)
    assert_clean(engine)


def interrupted_stream(engine):
    for count, _ in enumerate(engine.stream(list(range(50)), max_new_tokens=None)):
        if count == 3:
            raise KeyboardInterrupt
