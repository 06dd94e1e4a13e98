"""A router's beliefs about the replicas: their content, their memory and checks of them. Also used
by benchmarks/simulators/router.py.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from kvboost_edge.kvcache.hashing import prefix_hashes
from kvboost_edge.serve_ray.routing.prompt_chain import PromptChain
from kvboost_edge.serve_ray.routing.residency import _TOLD, Residency
from kvboost_edge.serve_ray.routing.router import PrefixRouter


def chain_of_tokens(
    token_ids: Sequence[int],
    root: bytes,
    block_size: int,
    prompt_cache_key: str | None = None,
    *,
    has_states: bool = False,
) -> PromptChain:
    """Build the chain of a prompt from its tokens."""
    hashes = prefix_hashes(token_ids, root, block_size)
    return PromptChain.of_hashes(
        hashes, len(token_ids), block_size, root, prompt_cache_key, has_states=has_states
    )


def keys_of(residency: Residency, slot: int) -> dict[int, bool]:
    """Return the keys that a replica is believed to hold, and whether each was reported."""
    return {
        key: until == _TOLD
        for key, until in residency._known[slot].until.items()
        if not key & residency._coarse
    }


def beliefs(router: PrefixRouter, replica_id: str) -> dict[int, bool]:
    """Return the keys that a replica is believed to hold, and whether each was reported."""
    return keys_of(router._residency, router._slots[replica_id])


def num_bytes(router: PrefixRouter) -> int:
    """Return the bytes of beliefs and expiries, summed over their objects."""
    residency = router._residency
    tables: list[Mapping[int, object]] = [
        residency._holders,
        *(known.until for known in residency._known.values()),
    ]
    parts: list[object] = [
        *(one for table in tables for one in table),
        *residency._holders.values(),
        *(expiry.keys for expiry in residency._expiries if expiry.keys is not None),
    ]
    sizes = {id(one): sys.getsizeof(one) for one in parts}
    return sum(map(sys.getsizeof, tables)) + sum(sizes.values())


def check_residency(residency: Residency) -> None:
    """Compare the map of holders with each replica's content."""
    holders: dict[int, int] = {}
    for slot, known in residency._known.items():
        for key in known.until:
            holders[key] = holders.get(key, 0) | 1 << slot
    assert holders == residency._holders
    assert residency.num_entries == sum(len(known.until) for known in residency._known.values())


def check_router(router: PrefixRouter) -> None:
    """Compare the router's tables with one another."""
    check_residency(router._residency)
    assert all(router._ids[slot] == replica_id for replica_id, slot in router._slots.items())
    assert len(router._slots) + len(router._free) == len(router._ids)
    assert int(router._loads.usable.sum()) <= len(router._slots)
