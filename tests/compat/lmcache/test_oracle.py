"""The engine against a dictionary from prefixes to chunks, for any order of calls, and with many
threads at once.
"""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.compat.lmcache_cases import (
    BACKENDS,
    equal,
    kv_of,
    kv_slice,
    make_engine,
    num_tokens_of,
)
from helpers.tiers.redis_servers import running_redis

TOKENS = st.lists(st.integers(0, 1), max_size=9)  # so few that prefixes are shared
STORE = st.tuples(
    st.just("store"), TOKENS, st.integers(0, 3), st.booleans(), st.booleans(), st.integers(0, 3)
)
RETRIEVE = st.tuples(st.just("retrieve"), TOKENS, st.integers(0, 9), st.booleans())
CALLS = st.lists(st.one_of(STORE, RETRIEVE, st.tuples(st.just("lookup"), TOKENS)), max_size=12)


class Oracle:
    """Reference with the rules in plain Python: a chunk is found by all tokens up to its end."""

    def __init__(self, chunk_size):
        self.size = chunk_size
        self.chunks = {}
        self.hits = self.misses = 0

    def ends(self, tokens, start):
        for first in range(start, len(tokens), self.size):
            yield first, min(first + self.size, len(tokens))

    def store(self, tokens, kv, start, skip_existing):
        for first, end in self.ends(tokens, start):
            if not skip_existing or tuple(tokens[:end]) not in self.chunks:
                self.chunks[tuple(tokens[:end])] = kv_slice(kv, first - start, end - start)

    def retrieve(self, tokens, skipped):
        """Return the chunks found. The first lacks the tokens that are masked."""
        found = []
        for first, end in self.ends(tokens, skipped - skipped % self.size):
            chunk = self.chunks.get(tuple(tokens[:end]))
            if chunk is None:
                break
            found.append(kv_slice(chunk, max(0, skipped - first), end - first))
        count = sum(map(num_tokens_of, found))
        self.hits += count
        self.misses += len(tokens) - skipped - count
        return found

    def lookup(self, tokens):
        length = 0
        for _, end in self.ends(tokens, 0):
            if tuple(tokens[:end]) not in self.chunks:
                break
            length = end
        return length


def joined(chunks):
    return tuple(
        tuple(np.concatenate([chunk[layer][part] for chunk in chunks]) for part in (0, 1))
        for layer in range(len(chunks[0]))
    )


def compare(engine, oracle, calls):
    for name, tokens, *more in calls:
        if name == "store":
            chunks_skipped, skip_existing, blocking, salt = more
            start = min(chunks_skipped * oracle.size, len(tokens) // oracle.size * oracle.size)
            kv = kv_slice(kv_of(tokens, salt=salt / 8), start, len(tokens))
            mask = np.arange(len(tokens)) >= start
            engine.store(tokens, kv, mask, skip_existing=skip_existing, blocking=blocking)
            oracle.store(tokens, kv, start, skip_existing)
            if not blocking:  # so that the next call does not race with it
                engine.store([9], kv_of([9]))
        elif name == "retrieve":
            skipped = min(more[0], len(tokens))
            return_tuple = more[1]
            found, ret_mask = engine.retrieve(
                tokens, np.arange(len(tokens)) >= skipped, return_tuple
            )
            expected = oracle.retrieve(tokens, skipped)
            count = sum(map(num_tokens_of, expected))
            assert np.flatnonzero(ret_mask).tolist() == list(range(skipped, skipped + count))
            if not count:
                assert found == ()
            else:
                assert equal(
                    found if return_tuple else [tuple(layer) for layer in found], joined(expected)
                )
        else:
            assert engine.lookup(tokens) == oracle.lookup(tokens)
    assert (engine.hit_tokens_count, engine.miss_tokens_count) == (oracle.hits, oracle.misses)
    assert engine.hit_rate == oracle.hits / max(1, oracle.hits + oracle.misses)


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_calls_equal_a_dictionary(backend, scale, tmp_path_factory):
    def run(place):
        @settings(max_examples=scale(40, 1000))
        @given(chunk_size=st.integers(1, 4), calls=CALLS)
        def example(chunk_size, calls):
            engine = make_engine(place(), chunk_size)
            try:
                compare(engine, Oracle(chunk_size), calls)
            finally:
                engine.close()

        example()

    if backend != "redis":
        folder = lambda: f"file://{tmp_path_factory.mktemp('oracle')}"  # noqa: E731
        run(
            {
                "memory": lambda: "memory",
                "disk": folder,
                "memory over disk": lambda: ("memory", folder()),
            }[backend]
        )
        return
    with running_redis() as server, server.client() as client:
        run(lambda: (client.flushall(), server.url)[1])


@pytest.mark.parametrize("max_memory_bytes", [1 << 30, 3000])
@pytest.mark.some(3)
def test_threads_see_whole_chunks_and_exact_counts(backend, engines, max_memory_bytes):
    """Eight threads store, replace and retrieve sequences with a common head. Each retrieved chunk
    comes from one store.
    """
    engine = engines(max_memory_bytes=max_memory_bytes)
    kinds = [kv_of(np.arange(24), salt=salt / 8) for salt in range(4)]
    failures = []
    asked = [0] * 8

    def work(number):
        draw = np.random.default_rng(number)
        try:
            for _ in range(40):
                length = int(draw.integers(1, 25))
                tokens = np.arange(length)
                if draw.integers(2):
                    kv = kv_slice(kinds[draw.integers(4)], 0, length)
                    engine.store(
                        tokens,
                        kv,
                        skip_existing=bool(draw.integers(2)),
                        blocking=bool(draw.integers(2)),
                    )
                    continue
                asked[number] += length
                found, ret_mask = engine.retrieve(tokens)
                count = num_tokens_of(found)
                assert ret_mask.tolist() == [True] * count + [False] * (length - count)
                for start in range(0, count, 4):
                    end = min(start + 4, count)
                    mine = kv_slice(found, start, end)
                    assert any(equal(mine, kv_slice(kind, start, end)) for kind in kinds)
                assert 0 <= engine.lookup(tokens) <= length
                assert 0.0 <= engine.hit_rate <= 1.0
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert engine.hit_tokens_count + engine.miss_tokens_count == sum(asked)
    assert all(
        stat.bytes is None or stat.bytes <= (stat.max_bytes or 0)
        for stat in engine.stats().values()
    )
