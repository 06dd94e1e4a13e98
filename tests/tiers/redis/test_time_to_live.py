"""The time to live of blocks is renewed when they are used: when, how many at once, and after
failures.
"""

import pytest

from helpers.tiers.redis_cases import Clock, chain, filled, hashes_of, opened, reads, stored_keys
from helpers.tiers.redis_servers import running_redis
from kvboost_edge.tiers.redis import tier as tier_module

MIB = 1 << 20


def renewed(client):
    """Return the number of keys whose time was renewed since the last call, and shorten the time of
    all.
    """
    keys = client.keys("*")
    count = sum(client.ttl(key) > 10 for key in keys)
    for key in keys:
        client.expire(key, 10)
    return count


def test_touched_blocks_are_renewed_at_the_next_read(server, client):
    blocks, payloads = chain(80)
    long, long_payloads = chain(1, 3 * MIB, seed=1)
    clock = Clock()
    tier = opened(server.url, ttl_s=1000, clock=clock)
    tier.write(blocks + long, payloads + long_payloads)
    keys = client.keys("*")

    def refreshed():
        """Touch all blocks, and return the number of keys whose time the next read renews."""
        for key in keys:
            client.expire(key, 10)
        commands = client.info("stats")["total_commands_processed"]
        tier.touch(hashes_of(blocks))
        tier.touch(hashes_of(long))
        assert client.info("stats")["total_commands_processed"] == commands + 1, (
            "touch must not send a command"
        )
        assert reads(tier, blocks[:1], payloads[:1]) == 1
        return sum(client.ttl(key) > 10 for key in keys)

    assert refreshed() == len(keys) == 80 + 4
    assert refreshed() == 0, "keys must not be renewed for every prompt"
    clock.now += 125
    assert refreshed() == 80 + 4


def test_excess_touched_blocks_are_renewed_later(server, client, monkeypatch):
    monkeypatch.setattr(tier_module, "_MOST_TOUCHED", 5)
    tier, blocks, _ = filled(server.url, 8, clock=Clock())
    for expected in (5, 3):
        for key in client.keys("*"):
            client.expire(key, 10)
        tier.touch(hashes_of(blocks))
        tier.read(blocks[:1], [memoryview(bytearray(1000))])
        assert sum(client.ttl(key) > 10 for key in client.keys("*")) == expected


def test_touched_blocks_are_renewed_at_closing(server, client):
    tier, blocks, payloads = filled(server.url, 1)
    client.expire(stored_keys(client)[0], 10)
    tier.touch([blocks[0].prefix_hash])
    tier.close()
    assert client.ttl(stored_keys(client)[0]) > 10
    tier.close()
    assert (tier.write(blocks, payloads), reads(tier, blocks, payloads), tier.holds(bytes(32))) == (
        0,
        0,
        False,
    )
    assert tier.known() == []
    assert not tier.stat().writable


def test_reads_renew_some_blocks_and_tend_the_rest(server, client, monkeypatch):
    monkeypatch.setattr(tier_module.RedisTier._refresh, "__defaults__", (3,))
    tier, blocks, payloads = filled(server.url, 12)
    renewed(client)
    tier.touch(hashes_of(blocks))
    assert reads(tier, blocks[:1], payloads[:1]) == 1
    assert renewed(client) == 3
    assert tier.write(blocks[:1], payloads[:1]) == 1
    assert renewed(client) == 3
    tier.tend()
    assert renewed(client) == 6
    commands = client.info("stats")["total_commands_processed"]
    tier.tend()
    assert client.info("stats")["total_commands_processed"] == commands + 1, (
        "no renewals may be left"
    )


def test_failed_renewals_are_repeated_after_an_outage():
    clock = Clock()
    with running_redis() as own, own.client() as client:
        tier, blocks, _ = filled(own.url, 2, clock=clock)
        renewed(client)
        tier.touch(hashes_of(blocks))
        client.config_set("maxclients", 1)
        client.client_kill_filter(_type="normal", skipme=True)
        tier.tend()
        assert tier.stat().errors > 0
        client.config_set("maxclients", 100)
        tier.tend()
        assert renewed(client) == 0, "failed renewals must not be repeated by every call"
        clock.now += 30
        tier.tend()
        assert renewed(client) == 2


@pytest.mark.parametrize("forbidden", ["-expire", "-getrange"])
def test_refused_renewals_are_repeated(forbidden):
    """The renewal covers all four chunks of a block. A missing block is not retried."""
    clock = Clock()
    with running_redis() as own, own.client() as client:
        tier, blocks, _ = filled(own.url, 1, 3 * MIB, clock=clock)
        renewed(client)
        client.execute_command("ACL", "SETUSER", "default", forbidden)
        tier.touch([blocks[0].prefix_hash, bytes(32)])
        for _ in range(2):
            tier.tend()
        assert tier.stat().errors == 1, "refused renewals must not be repeated by every call"
        client.execute_command("ACL", "SETUSER", "default", "+@all")
        clock.now += 30
        tier.tend()
        assert renewed(client) == 4


def test_a_key_of_another_type_does_not_block_renewal(server, client):
    tier, blocks, _ = filled(server.url, 2)
    hashes = hashes_of(blocks)
    (foreign,) = (key for key in stored_keys(client) if hashes[0].hex() in key)
    client.delete(foreign)
    client.rpush(foreign, "x")
    renewed(client)
    tier.touch(hashes[:1])
    tier.tend()
    tier.touch(hashes[1:])
    tier.tend()
    assert renewed(client) == 1
