"""A seed in a result reproduces its request. It reveals nothing about other requests, least of all
those of other tenants.
"""

import itertools

import numpy as np
import pytest

from helpers.engine.fake_runner import fake_engine
from kvboost_edge.engine.request_builder import Seeds

PROMPT = "Once upon a time"


def seed_of(engine, tenant="", prompt=PROMPT):
    return engine.generate(prompt, max_new_tokens=1, temperature=1.0, tenant=tenant).seed


def test_seeds_are_unpredictable_and_do_not_repeat():
    seen = set()
    for _ in range(2):
        with fake_engine() as engine:
            assert engine.config.seed is None
            seen |= {seed_of(engine, tenant) for tenant in ("a", "b", "") for _ in range(3)}
    assert len(seen) == 18
    counted = {
        int(np.random.SeedSequence([0, i]).generate_state(1, np.uint64)[0]) for i in range(64)
    }
    assert not seen & counted


def test_an_engine_seed_gives_each_tenant_its_own_sequence_of_seeds():
    with fake_engine(seed=0) as alone, fake_engine(seed=0) as shared, fake_engine(seed=1) as other:
        lonely = [seed_of(alone, "a", prompt) for prompt in ("one", "two", "three")]
        mixed = {"a": [], "b": [], "c": []}
        for tenant, prompt in zip("abcbabacb", itertools.cycle(("one", "two", "three"))):
            mixed[tenant].append(seed_of(shared, tenant, prompt))
        assert mixed["a"] == lonely, "a tenant's seeds must not depend on requests of other tenants"
        assert len({*lonely, *mixed["b"], *mixed["c"]}) == 3 + 4 + 2
        assert seed_of(other, "a", "one") not in lonely


def test_a_cache_salt_does_not_restart_the_seeds():
    with fake_engine(seed=3) as engine:
        plain, salted = (
            engine.generate(PROMPT, max_new_tokens=1, **o).seed for o in ({}, {"cache_salt": "s"})
        )
    assert plain != salted


@pytest.mark.parametrize("seed", [None, 0, 255, 256, 2**200])
def test_every_engine_seed_gives_valid_request_seeds(seed):
    seeds = Seeds(seed)
    drawn = [seeds.draw(bytes(32)) for _ in range(50)]
    assert all(0 <= number < 2**64 for number in drawn)
    assert len(set(drawn)) == 50
    assert (Seeds(seed).draw(bytes(32)) == drawn[0]) == (seed is not None)
