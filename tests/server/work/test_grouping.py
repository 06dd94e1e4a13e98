"""Tests of the batch window and the requests that it delays, without a server."""

import asyncio

from kvboost_edge.server.work.grouping import PrefixGroups


async def test_requests_do_not_wait_for_other_keys_prompts():
    """A delay would reveal to one key that another key is sending the same prompt."""
    groups = PrefixGroups(window_seconds=60.0, block_size=4)
    prompt = [1, 2, 3, 4, 5]
    found = [await groups.join("one", prompt)]
    for tenant in ("another", None):
        found.append(await asyncio.wait_for(groups.join(tenant, prompt), 10))
    assert len(set(found)) == 3
    assert groups.held == 0
    for key in found:
        groups.leave(key)
