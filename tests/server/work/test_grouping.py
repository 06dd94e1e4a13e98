"""The batch window: whom it holds back, without a server."""

import asyncio

from kvboost_edge.server.work.grouping import PrefixGroups


async def test_requests_do_not_wait_for_other_keys_prompts():
    """Waiting would tell one key that another one asks the same at this moment."""
    groups = PrefixGroups(window_seconds=60.0, block_size=4)
    prompt = [1, 2, 3, 4, 5]
    found = [await groups.join("one", prompt)]
    for tenant in ("another", None):
        found.append(await asyncio.wait_for(groups.join(tenant, prompt), 10))
    assert len(set(found)) == 3
    assert groups.held == 0
    for key in found:
        groups.leave(key)
