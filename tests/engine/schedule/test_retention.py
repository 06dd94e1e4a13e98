"""Retention in an engine: prompts for a time, and the common prefix of calls under one cache key."""

import itertools
import logging
import random

import pytest

from helpers.clocks import give_clock
from helpers.engine.fake_runner import Bench, checked, fake_engine
from helpers.engine.hand_io_thread import DictTier
from kvboost_edge.engine import core
from kvboost_edge.engine.schedule.retention import KEY_SECONDS, CacheKeys
from kvboost_edge.errors import RequestError

HEAD = list(range(60, 124))  # four full blocks
NUM_BLOCKS = 32


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    give_clock(monkeypatch, lambda: now[0], core)
    return now


@pytest.fixture
def engine():
    with fake_engine(num_blocks=NUM_BLOCKS) as engine:
        yield engine


def ask(engine, prompt, **terms):
    """Check the answer to a prompt and return the number of its cached tokens."""
    result = checked(engine, prompt, 2, **terms)
    return result.cached_tokens


class Scan:
    """Requests with texts that never occur again."""

    def __init__(self, engine):
        self._engine = engine
        self._rng = random.Random(1)

    def __call__(self, texts=20, key=None, **terms):
        for number in itertools.count():
            if number == texts:
                return
            text = [self._rng.randrange(200) for _ in range(64)]
            name = f"{key}-{self._rng.random()}" if key == "fresh" else key
            assert ask(self._engine, text, cache_key=name, **terms) == 0


# keys


def test_a_chain_with_a_cache_key_survives_a_scan(engine):
    """The third call and all later ones hit the chain. Before each, twenty texts fill the pool
    twice.
    """
    scan = Scan(engine)
    found = {None: [], "chat": []}
    plain = [token + 100 for token in HEAD]
    for _ in range(5):
        found[None].append(ask(engine, plain))
        found["chat"].append(ask(engine, HEAD, cache_key="chat"))
        scan()
    assert found[None] == [0, 0, 0, 0, 0]
    assert found["chat"] == [0, 0, 63, 63, 63]


@pytest.mark.parametrize("key", ["fresh", "always the same"])
def test_a_cache_key_does_not_retain_texts_used_once(engine, key):
    """Neither a new key for each text nor one key for all retains the scanned texts. The prompt
    that is used again stays.
    """
    scan = Scan(engine)
    manager = engine._parts.manager
    for _ in range(2):
        ask(engine, HEAD, cache_key="chat")
    scan(60, key)
    assert manager.pins.num_retained == 4
    assert ask(engine, HEAD, cache_key="chat") == 63


def test_the_common_prefix_of_branching_calls_is_retained(engine):
    scan = Scan(engine)
    for number in range(1, 4):
        assert ask(engine, [*HEAD, *[number] * 32], cache_key="rag") == (64 if number > 2 else 0)
        assert engine._parts.manager.pins.num_retained == (4 if number > 1 else 0)
        scan()


def test_the_next_turn_hits_the_retained_turns(engine):
    scan = Scan(engine)
    turn = HEAD.copy()
    found = []
    for number in range(4):
        found.append(ask(engine, turn, cache_key="chat"))
        turn += [number] * 32
        scan()
    assert found == [0, 0, 64, 96]


def test_cache_keys_belong_to_their_tenant_and_salt(engine):
    for terms in ({"tenant": "a"}, {"tenant": "b"}, {"tenant": "a", "cache_salt": "s"}, {}):
        ask(engine, HEAD, cache_key="chat", **terms)
    assert engine._parts.manager.pins.num_retained == 0
    ask(engine, HEAD, cache_key="chat", tenant="b")
    assert engine._parts.manager.pins.num_retained == 4


def test_choices_count_as_one_call_and_failures_as_none(clock):
    bench = Bench(NUM_BLOCKS)
    pins = bench.manager.pins

    def call(began, **options):
        bench.submit(HEAD, 2, terms={"cache_key": b"k", "entered_at": began}, **options)
        bench.run()

    call(1.0)
    call(1.0)
    assert pins.num_retained == 0
    bench.runner.nan_for = {HEAD[-1]}
    call(2.0)
    bench.runner.nan_for = set()
    call(3.0, deadline=clock[0] - 1)
    assert pins.num_retained == 0
    call(4.0)
    assert pins.num_retained == 4
    clock[0] += KEY_SECONDS - 1
    call(5.0)
    clock[0] += KEY_SECONDS - 1
    bench.step()
    assert pins.num_retained == 4, "retention must last an hour after the last call"
    clock[0] += 3
    bench.step()
    assert pins.num_retained == 0


def test_the_memory_of_cache_keys_is_bounded_and_fair():
    keys = CacheKeys(8)
    hashes = [bytes([number]) * 32 for number in range(200)]
    for call in range(2):
        for number in range(3):
            assert keys.note(b"again %d" % number, b"", call, hashes) == 200 * call
    for number in range(1000):
        assert keys.note(b"fresh %d" % number, b"", 3.0 + number, hashes) == 0
        assert len(keys) <= 8
    assert [keys.note(b"again %d" % number, b"", 1e6, hashes) for number in range(3)] == [
        200,
        200,
        200,
    ]
    keys.note(b"mine", b"one", 0.0, hashes)
    for number in range(1000):
        keys.note(b"fresh %d" % number, b"two", 3.0 + number, hashes)
    assert keys.note(b"mine", b"one", 1.0, hashes) == 200
    assert all(len(chain.marks) <= 32 * 8 for calls in keys._calls.values() for chain in calls[1:])


@pytest.mark.parametrize(
    ("length", "other"), [(0, 9), (1, 1), (5, 40), (32, 33), (33, 20), (300, 1000), (1000, 300)]
)
def test_the_common_prefix_of_two_chains_is_a_tight_lower_bound(length, other):
    def chain(number, shared, name):
        return [
            (index if index < shared else 10_000 * name + index).to_bytes(32, "little")
            for index in range(number)
        ]

    for shared in range(min(length, other) + 1):
        keys = CacheKeys()
        keys.note(b"k", b"", 0.0, chain(length, shared, 1))
        found = keys.note(b"k", b"", 1.0, chain(other, shared, 2))
        assert found <= shared
        assert shared - found < max(1, 2 * length / 32)
        assert found == shared or (length > 32 and shared < length)


def test_cache_keys_are_not_in_messages_or_logs(engine, caplog):
    caplog.set_level(logging.DEBUG)
    secret = "the user's own name"
    for prompt in (HEAD, HEAD):
        ask(engine, prompt, cache_key=secret)
    for key in (secret * 100, secret.encode(), ""):
        with pytest.raises(RequestError, match="cache_key") as refused:
            engine.check(HEAD, cache_key=key)
        assert secret not in str(refused.value)
    request = engine._builder.read(HEAD, {"cache_key": secret})
    assert request.cache_key is not None
    assert secret not in f"{request!r}{caplog.text}{engine._core._retention.keys._calls!r}"


# for a time


def test_a_prompt_is_retained_for_its_retention_time(clock):
    """The prompt stays cached for 24 hours of an injected clock, whatever is requested. Then it is
    evicted like any reused prompt.
    """
    bench = Bench(NUM_BLOCKS)
    rng = random.Random(2)

    def flush():
        for _ in range(20):
            prompt = [rng.randrange(200) for _ in range(64)]
            for _ in range(2):
                bench.ask(prompt, 2)

    def cached():
        return bench.manager.peek([*HEAD, 0], bench.parts.root)

    bench.ask(HEAD, 40, terms={"retention": 86400.0})
    flush()
    assert (cached(), bench.manager.pins.num_retained) == (64, 4), (
        "the prompt must be retained, not its answer"
    )
    clock[0] += 86399
    flush()
    assert cached() == 64
    clock[0] += 1
    flush()
    assert cached() == 0


def test_retained_blocks_are_evicted_rather_than_delaying_requests(clock):
    """All prompts of other requests are retained, and a request of the size of the pool runs at
    once.
    """
    bench = Bench(16)
    for number in range(20):
        bench.ask([number] * 60, 2, tenant=str(number % 3), terms={"retention": 1e6})
    handles = [bench.submit([200 + number] * 100, 20, tenant="x") for number in range(2)]
    large = bench.submit([7] * 200, 50, tenant="y")
    bench.run()
    assert [handle.result(0).generated_tokens for handle in (*handles, large)] == [20, 20, 50]
    assert bench.scheduler.num_preemptions == 0


@pytest.mark.parametrize("retention", [0, -1, 1e10, float("nan"), "24h", True])
def test_invalid_retention_times_are_refused(engine, retention):
    with pytest.raises(RequestError, match="retention="):
        engine.check(HEAD, retention=retention)


def test_retained_blocks_are_stored_first():
    """A tier that takes few blocks at a time gets the retained ones first, although they were
    computed last.
    """
    tier = DictTier()
    bench = Bench(64, tiers=[tier])
    bench.core.tiering._save_next = lambda most_bytes: None
    bench.submit([5] * 160, 2)
    bench.submit(HEAD, 2, terms={"retention": 60.0})
    for _ in range(20):
        bench.step()
    del bench.core.tiering._save_next
    size = bench.parts.backend.spec.bytes_per_block
    assert bench.io_thread.room_for(size) >= 4
    assert not tier.blocks
    bench.core.tiering._save_next(4 * size)
    while bench.io_thread.pump():
        pass
    tokens = [block[0].tokens for block in tier.blocks.values()]
    assert [int.from_bytes(data[:4], "little") for data in tokens] == [60, 76, 92, 108]
