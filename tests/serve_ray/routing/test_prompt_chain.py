"""The hash chain of a prompt: the engine's own hashes, of one tenant only, from which no text can
be recovered.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.serve_ray.router_beliefs import chain_of_tokens
from kvboost_edge.errors import RequestError
from kvboost_edge.kvcache.hashing import prefix_hashes, shared_root, state_hash
from kvboost_edge.kvcache.manager import KVCacheManager
from kvboost_edge.serve_ray.routing.cache_records import OUTSIDE_MASK, Place
from kvboost_edge.serve_ray.routing.prompt_chain import PromptChain, key_of

ROOT = b"r" * 32


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), st.sampled_from([1, 4, 16]))
def test_hashes_equal_those_the_pool_publishes(tokens, size):
    manager = KVCacheManager(64, size)
    table = manager.open_table(tokens, ROOT)
    manager.extend(table, len(tokens))
    manager.commit(table, tokens, len(tokens))
    assert prefix_hashes(tokens, ROOT, size) == tuple(manager.content.chain(table))


def test_tenants_share_no_keys():
    tokens = list(range(64))
    roots = [shared_root(ROOT, tenant, salt) for tenant in (None, "a", "b") for salt in (None, "s")]
    chains = [chain_of_tokens(tokens, root, 16, "same key") for root in roots]
    keys = [
        key
        for chain in chains
        for key in (*chain.keys, chain.cache_key, *chain.disk.keys, *chain.shared.keys)
    ]
    assert len(set(keys)) == len(keys) > 6 * (4 + 1)


def test_invalid_chains_are_refused():
    hashes = prefix_hashes(range(40), ROOT, 16)
    chain = PromptChain.of_hashes(hashes, 40, 16)
    assert chain.keys == tuple(map(key_of, hashes))
    # Outside of pools one block in four is reported, with the number of blocks up to it.
    hashes = prefix_hashes(range(400), ROOT, 1)
    chain = PromptChain.of_hashes(hashes, 400, 1)
    for place, outside in ((Place.DISK, chain.disk), (Place.SHARED, chain.shared)):
        told = [(i + 1, key) for i, one in enumerate(hashes) if not (key := key_of(one, place)) % 4]
        assert list(zip(outside.ends, outside.keys, strict=True)) == told
        assert 50 < len(told) < 150
    assert chain_of_tokens(range(15), ROOT, 16)[:1] == ((),)
    for num_tokens in (0, 31, 48):
        with pytest.raises(RequestError, match="do not fit"):
            PromptChain.of_hashes(hashes, num_tokens, 16)
    with pytest.raises(RequestError, match="token ids"):
        prefix_hashes([2**32], ROOT, 1)


def test_states_are_found_by_their_published_keys():
    """All states have keys at every place, and none of the keys is left out by sampling."""
    hashes = prefix_hashes(range(67), ROOT, 4)
    chain = chain_of_tokens(range(67), ROOT, 4, has_states=True)
    for place in Place:
        assert chain.states[place] == tuple(key_of(state_hash(one), place) for one in hashes)
        assert not any(key & OUTSIDE_MASK for key in chain.states[place])
    assert not set(chain.states[Place.POOL]) & set(chain.keys)
    assert chain._replace(states=()) == chain_of_tokens(range(67), ROOT, 4)
    assert len(chain.servable_states(Place.POOL)) == 16
    whole = chain_of_tokens(range(64), ROOT, 4, has_states=True)
    assert (len(whole.states[Place.DISK]), len(whole.servable_states(Place.DISK))) == (16, 15), (
        "the state after the last token must not be servable"
    )
