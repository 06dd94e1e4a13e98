"""The reported contents of the cache: the hashes that a router computes for the same prompts."""

import threading

from helpers.engine.fake_runner import fake_engine
from kvboost_edge.kvcache.hashing import prefix_hashes, shared_root

PROMPT = list(range(20, 70))  # three full blocks and two tokens


def test_cache_events_describe_the_resident_blocks():
    with fake_engine(num_blocks=32, prefill="on-request") as engine:
        size = engine.config.block_size
        assert engine.take_cache_events().is_whole
        salted = {"tenant": "a", "cache_salt": "s"}
        for terms in ({}, {"tenant": "a"}, salted, {**salted, "prefill": "sparse"}):
            engine.generate(PROMPT, 2, **terms)
            root = shared_root(
                engine.cache_root,
                terms.get("tenant"),
                terms.get("cache_salt"),
                terms.get("prefill", "exact"),
            )
            events = engine.take_cache_events()
            assert not events.is_whole
            # Each tenant reports its own blocks and no others.
            assert set(events.published) == set(prefix_hashes(PROMPT, root, size))
            assert events.evicted == ()
        told = set(engine.take_cache_events(whole=True).published)
        assert len(told) == 4 * (len(PROMPT) // size)
        engine.reset_cache()
        assert set(engine.take_cache_events().evicted) == told


def test_cache_events_may_be_read_while_requests_run():
    """Another thread reads events again and again. Added up, they equal the contents at the end."""
    with fake_engine(num_blocks=16) as engine:
        known = set(engine.take_cache_events().published)
        done = threading.Event()

        def work():
            for number in range(40):
                engine.generate([number, *PROMPT], 2)
            done.set()

        thread = threading.Thread(target=work)
        thread.start()
        while True:
            was_done = done.is_set()
            events = engine.take_cache_events()
            known = set(events.published) | (
                set() if events.is_whole else known - set(events.evicted)
            )
            if was_done:
                break
        thread.join()
        assert known == set(engine.take_cache_events(whole=True).published)
        assert known
