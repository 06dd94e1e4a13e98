"""Slow token masks are computed outside the engine's thread and within a time limit. The parsers of
these tests have a prescribed speed.
"""

import contextlib
import copy
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from helpers.engine.fake_runner import EOS_ID, VOCAB_SIZE, Bench, fake_engine, fake_tokenizer
from kvboost_edge.engine.grammar import masks
from kvboost_edge.engine.grammar.compiler import GrammarCompiler
from kvboost_edge.engine.grammar.masks import GrammarConstraint
from kvboost_edge.errors import RequestError

EVEN = np.uint32(0x55555555).astype(np.int32)


class Parser:
    """Grammar parser that allows even tokens without end.

    - cost: CPU seconds that each mask takes
    """

    def __init__(self, cost=0.0):
        self.cost = cost
        self.gate = None
        self.threads = []

    def unsafe_compute_mask_ptr(self, address, num_bytes):
        self.threads.append(threading.current_thread().name)
        if self.gate is not None and len(self.threads) > 1:
            assert self.gate.wait(20)
        end = time.thread_time() + self.cost
        while time.thread_time() < end:
            pass
        words = np.ctypeslib.as_array(
            (np.ctypeslib.ctypes.c_int32 * (num_bytes // 4)).from_address(address)
        )
        words[:] = EVEN

    def consume_token(self, token_id):
        return token_id % 2 == 0

    def is_stopped(self):
        return False

    def is_error(self):
        return False

    def get_error(self):
        return ""

    def compute_ff_tokens(self):
        return []


@pytest.fixture
def threads():
    with ThreadPoolExecutor(1, thread_name_prefix="masks") as pool:
        yield pool


def room():
    return np.empty(VOCAB_SIZE, np.float32)


def test_fast_masks_stay_in_the_callers_thread(threads):
    parser = Parser()
    grammar = GrammarConstraint(parser, room(), threads.submit)
    for _ in range(5):
        assert grammar.is_ready
        kept = grammar.masked(np.zeros(VOCAB_SIZE, np.float32))
        assert np.isneginf(kept[1::2]).all()
        assert (kept[::2] == 0).all()
        grammar.advance(2)
    assert set(parser.threads) == {threading.current_thread().name}


def test_slow_masks_move_to_another_thread_and_back(threads, monkeypatch):
    monkeypatch.setattr(masks, "_SLOW_TOKENS", 2)
    parser = Parser(cost=2 * masks._SLOW_SECONDS)
    grammar = GrammarConstraint(parser, room(), threads.submit)
    parser.cost = 0.0
    parser.gate = threading.Event()
    grammar.advance(2)
    assert not grammar.is_ready
    parser.gate.set()
    assert np.isneginf(grammar.masked(np.zeros(VOCAB_SIZE, np.float32))[1::2]).all()
    assert grammar.is_ready
    for _ in range(3):
        grammar.advance(2)
        grammar.masked(np.zeros(VOCAB_SIZE, np.float32))
    mine = threading.current_thread().name
    assert [name == mine for name in parser.threads] == [True, False, False, True, True]


def test_masks_of_a_slow_grammar_are_computed_in_another_thread(threads):
    parser = Parser(cost=0.0)
    grammar = GrammarConstraint(parser, room(), threads.submit, is_slow=True)
    for _ in range(3):
        grammar.advance(2)
        grammar.masked(np.zeros(VOCAB_SIZE, np.float32))
    mine = threading.current_thread().name
    assert [name == mine for name in parser.threads] == [True, False, False, False]


@pytest.mark.parametrize(("cost", "tokens"), [(0.9, 0), (0.12, 3)])
def test_masks_that_take_too_long_end_the_request(monkeypatch, cost, tokens):
    monkeypatch.setattr(masks, "_TOTAL_SECONDS", 0.4)
    parser = Parser(cost=cost)

    def answer():
        grammar = GrammarConstraint(parser, room())
        for _ in range(50):
            grammar.masked(np.zeros(VOCAB_SIZE, np.float32))
            grammar.advance(2)

    with pytest.raises(
        RequestError, match=f"too ambiguous.* for {tokens} tokens; at most 0.4 s in total"
    ):
        answer()


def test_a_lookahead_leaves_the_error_of_a_failed_mask_to_the_request(monkeypatch):
    parser = Parser()
    grammar = GrammarConstraint(parser, room())
    grammar.advance(2)
    monkeypatch.setattr(parser, "is_error", lambda: True)
    assert grammar.lookahead().num_allowed([1, 3]) == 2
    with pytest.raises(RequestError, match="parser failed"):
        grammar.masked(np.zeros(VOCAB_SIZE, np.float32))


class Clock(Parser):
    """Parser whose masks and tokens take a number of CPU seconds on a clock, shared by its copies.

    - seconds: of each mask
    - token_seconds: of each token
    """

    now = 0.0

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds
        self.token_seconds = 0.0
        self.clock = self

    def thread_time(self):
        return self.now

    def unsafe_compute_mask_ptr(self, address, num_bytes):
        super().unsafe_compute_mask_ptr(address, num_bytes)
        self.clock.now += self.seconds

    def consume_token(self, token_id):
        self.clock.now += self.token_seconds
        return super().consume_token(token_id)

    def deep_copy(self):
        return copy.copy(self)

    def validate_tokens(self, token_ids):
        self.clock.now += self.token_seconds
        return next((n for n, one in enumerate(token_ids) if one % 2), len(token_ids))


def long_answer(monkeypatch, seconds, *, is_slow):
    """Return how many tokens an answer of up to 2,000 tokens has until an error, and the error."""
    parser = Clock(seconds)
    monkeypatch.setattr(masks, "time", parser)
    grammar = GrammarConstraint(parser, room(), is_slow=is_slow)
    for count in range(2000):
        try:
            grammar.masked(np.zeros(VOCAB_SIZE, np.float32))
        except RequestError as error:
            return count, str(error)
        grammar.advance(2)
    return 2000, ""


def test_only_the_average_of_a_slow_grammar_is_limited(monkeypatch):
    assert long_answer(monkeypatch, 0.015, is_slow=True) == (2000, "")
    count, error = long_answer(monkeypatch, 0.015, is_slow=False)
    assert 0 < count < 200
    assert "at most 2 s in total" in error
    count, error = long_answer(monkeypatch, 0.06, is_slow=True)
    assert 0 < count < 50
    assert error.startswith("the grammar is too slow: its masks took 0.4")
    assert "Exclude from each repetition the characters that may follow it" in error


def num_masked(ahead):
    """Return the number of draft tokens that a lookahead masks, up to 5."""
    zeros = np.zeros(VOCAB_SIZE, np.float32)
    for count in range(5):
        if not np.isneginf(ahead.masked(zeros)[1::2]).all():
            return count
        ahead.advance(2)
    return 5


def follows(grammar):
    """Return whether a grammar checks draft tokens after the first one."""
    return grammar.lookahead().num_allowed([2, 3]) == 1


@pytest.mark.parametrize(("slow", "masked"), [("seconds", 2), ("token_seconds", 1)])
def test_draft_tokens_are_masked_until_a_later_mask_takes_too_long(monkeypatch, slow, masked):
    parser = Clock(0.0)
    monkeypatch.setattr(masks, "time", parser)
    grammar = GrammarConstraint(parser, room())
    assert num_masked(grammar.lookahead()) == 5
    setattr(parser, slow, 0.02)
    assert num_masked(grammar.lookahead()) == masked
    assert parser.now == 0.02
    setattr(parser, slow, 0.0)
    for _ in range(masks._SLOW_TOKENS):
        assert not follows(grammar)
        assert num_masked(grammar.lookahead()) == 1
        grammar.advance(2)
    assert follows(grammar)
    assert num_masked(grammar.lookahead()) == 5


def test_slow_checks_of_draft_tokens_stop(monkeypatch):
    parser = Clock(0.0)
    monkeypatch.setattr(masks, "time", parser)
    grammar = GrammarConstraint(parser, room())
    parser.token_seconds = 0.02
    assert follows(grammar)
    assert not follows(grammar)
    assert parser.now == 0.02


def test_only_the_first_draft_token_is_masked_while_slow_masks_are_expected(threads, monkeypatch):
    parser = Clock(0.0)
    monkeypatch.setattr(masks, "time", parser)
    assert num_masked(GrammarConstraint(parser, room(), is_slow=True).lookahead()) == 1
    parser.seconds = 2 * masks._SLOW_SECONDS
    grammar = GrammarConstraint(parser, room(), threads.submit)
    parser.seconds = 0.0
    for _ in range(masks._SLOW_TOKENS):
        assert num_masked(grammar.lookahead()) == 1
        grammar.advance(2)
        grammar.masked(np.zeros(VOCAB_SIZE, np.float32))
    assert num_masked(grammar.lookahead()) == 5


def test_a_sequence_skips_steps_until_its_mask_is_ready(threads):
    bench = Bench()
    parser = Parser(cost=2 * masks._SLOW_SECONDS)
    slow = bench.submit([1, 2, 3], 4)
    sequence = bench.core._live[slow.index]
    sequence.grammar = GrammarConstraint(parser, room(), threads.submit)
    parser.gate = threading.Event()
    bench.step()
    assert len(sequence.token_ids) == 4
    other = bench.submit([4, 5, 6], 6)
    for _ in range(6):
        bench.step()
    assert other.done, "other sequences must continue"
    assert len(sequence.token_ids) == 4
    parser.gate.set()
    end = time.monotonic() + 20
    while not slow.done and time.monotonic() < end:
        bench.step()
    assert slow.result().generated_tokens == 4
    assert all(token % 2 == 0 for token in slow.result().output_token_ids)


def test_the_engine_idles_during_mask_computation_and_cancels_at_once(monkeypatch):
    gate = threading.Event()
    with fake_engine() as engine:
        make = engine._sequences._grammars.make
        parser = Parser(cost=2 * masks._SLOW_SECONDS)
        parser.gate = gate
        monkeypatch.setattr(
            engine._sequences._grammars,
            "make",
            lambda grammar: GrammarConstraint(parser, room(), _threads_of(make).submit),
        )
        handle = engine.submit([1, 2, 3], max_new_tokens=50, regex="a*")
        assert handle.started(20)
        used = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - used < 0.15, "the engine must not spin"
        handle.cancel()
        assert handle.result(5).finish_reason == "cancelled"
        gate.set()


def _threads_of(make):
    return make.__self__._mask_threads


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_threads_of_slow_masks_yield_to_forward_passes():
    def priority():
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    compiler = GrammarCompiler(fake_tokenizer(), VOCAB_SIZE, frozenset({EOS_ID}))
    try:
        found = compiler._mask_threads.submit(priority).result(20)
    finally:
        compiler.close()
    assert found == min(19, priority() + 5)


AMBIGUOUS = 'start: e\ne: e e | e e e | "a" | ""'


def test_an_ambiguous_grammar_does_not_slow_down_other_requests():
    with fake_engine(num_blocks=512, debug_checks=False) as engine:
        handle = engine.submit(
            [1, 2, 3], max_new_tokens=300, temperature=1.5, seed=1, grammar=AMBIGUOUS
        )
        others = [
            engine.submit([n, 5, 6], max_new_tokens=4, temperature=0).result(20).generated_tokens
            for n in range(10)
        ]
        assert others == [4] * 10
        handle.cancel()
        with contextlib.suppress(RequestError):  # it may have ended as too ambiguous
            handle.result(20)
        assert engine.is_alive()


def test_a_failed_mask_ends_only_its_request(threads, monkeypatch):
    """Draft tokens are checked against the grammar while a step is planned, where an uncaught error
    would end all requests.
    """
    monkeypatch.setattr(masks, "_TOTAL_SECONDS", 5 * masks._SLOW_SECONDS)
    bench = Bench()
    slow = bench.submit([1, 2, 3], 50, terms={"max_draft_tokens": 3})
    grammar = GrammarConstraint(Parser(cost=2 * masks._SLOW_SECONDS), room(), threads.submit)
    bench.core._live[slow.index].grammar = grammar
    other = bench.submit([4, 5, 6], 60)
    end = time.monotonic() + 20
    while not slow.done and time.monotonic() < end:
        bench.step()
    with pytest.raises(RequestError, match="too ambiguous"):
        slow.result(0)
    bench.run()
    assert bench.answer(other).generated_tokens == 60
