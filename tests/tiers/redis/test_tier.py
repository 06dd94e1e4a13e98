"""The Redis tier on a real server: one machine reads what another stored, and untrustworthy values
are misses.
"""

import itertools
import re
import sys

import pytest

from helpers.raising import assert_raises
from helpers.tiers.redis_cases import (
    SECRET,
    SPACE,
    Clock,
    chain,
    filled,
    hashes_of,
    opened,
    reads,
    stored_keys,
)
from kvboost_edge.errors import BackendUnavailable, ConfigError, install_extra
from kvboost_edge.tiers.redis import tier as tier_module
from kvboost_edge.tiers.redis.tier import SECRET_VARIABLE
from kvboost_edge.tiers.redis.values import PIECE_BYTES, Seal, pieces_of

MIB = 1 << 20


# writing and reading


@pytest.mark.parametrize(("count", "payload_bytes"), [(40, 1000), (5, 3 * MIB), (1, 0)])
def test_blocks_are_shared_between_clients(server, client, count, payload_bytes):
    blocks, payloads = chain(count, payload_bytes)
    writer = opened(server.url)
    reader = opened(server.url)
    assert reads(reader, blocks, payloads) == 0
    assert writer.write(blocks, payloads) == count
    assert reads(reader, blocks, payloads) == count
    assert (writer.stat().written_blocks, reader.stat().read_blocks, reader.stat().missing) == (
        count,
        count,
        1,
    )
    assert (
        reader.stat().read_bytes
        == writer.stat().written_bytes
        == sum(client.strlen(k) for k in client.keys("*"))
    )
    assert all(
        client.strlen(key) <= PIECE_BYTES and 0 < client.ttl(key) <= 86_400
        for key in client.keys("*")
    )
    assert all(key.startswith(f"kvb:{SPACE[:8].hex()}:") for key in stored_keys(client))


def test_a_read_ends_at_the_first_missing_block(server, client):
    blocks, payloads = chain(8, 2 * MIB)  # several pipelines
    tier = opened(server.url)
    tier.write(blocks[:3] + blocks[4:], payloads[:3] + payloads[4:])
    assert tier.ask(hashes_of(blocks)) == [True] * 3 + [False] + [True] * 4
    assert reads(tier, blocks, payloads) == 3
    assert reads(tier, blocks[4:], payloads[4:]) == 4


def test_a_block_evicted_by_the_server_is_reported_as_dropped(server, client):
    blocks, payloads = chain(4, 1000)
    tier = opened(server.url)

    def dropped():
        return [tier.dropped(block.prefix_hash) for block in blocks]

    assert reads(tier, blocks, payloads) == 0
    assert dropped() == [False] * 4, "blocks that were never stored must not count as dropped"
    tier.write(blocks, payloads)
    assert dropped() == [False] * 4
    client.flushall()
    assert reads(tier, blocks[1:], payloads[1:]) == 0
    assert dropped() == [False, True, False, False], (
        "blocks after the first missing one must not count as dropped"
    )
    tier.write(blocks[1:2], payloads[1:2])
    assert dropped() == [False] * 4


def test_existing_blocks_are_not_sent_again(server, client):
    blocks, payloads = chain(4, 100_000)
    first = opened(server.url)
    second = opened(server.url)
    first.write(blocks[:2], payloads[:2])
    before = client.info("stats")["total_net_input_bytes"]
    assert second.write(blocks, payloads) == 4
    assert 200_000 < client.info("stats")["total_net_input_bytes"] - before < 220_000
    assert second.stat().written_blocks == 2


def test_a_block_with_a_missing_piece_is_rewritten(server, client):
    tier, blocks, payloads = filled(server.url, 1, 3 * MIB)
    keys = stored_keys(client)
    assert len(keys) == 4
    for lost in keys:
        client.delete(lost)
        assert reads(tier, blocks, payloads) == 0
        assert tier.write(blocks, payloads) == 1
        assert reads(tier, blocks, payloads) == 1
    assert (tier.stat().missing, tier.stat().refused) == (4, 0)


def test_dropped_blocks_leave_nothing_behind(server, client):
    tier, blocks, payloads = filled(server.url, 3, 3 * MIB)
    unknown, _ = chain(1, seed=9)
    tier.drop([blocks[0].prefix_hash, unknown[0].prefix_hash, blocks[2].prefix_hash])
    assert {key.split(":")[3] for key in stored_keys(client)} == {blocks[1].prefix_hash.hex()}
    assert reads(tier, blocks, payloads) == 0


def test_spaces_are_isolated(server, client):
    """Another model, KV format or tenant never shares blocks, even if the first 8 bytes of the
    digests are equal.
    """
    _tier, blocks, payloads = filled(server.url, 2)
    for other in (bytes(32), SPACE[:8] + bytes(24)):
        neighbour = opened(server.url, space=other)
        assert reads(neighbour, blocks, payloads) == 0


# untrustworthy values


def damages():
    """Return changes by a stranger to the keys of one block, by name; each gets the keys of two
    blocks.
    """
    blocks, payloads = chain(2, 3 * MIB)
    foreign = pieces_of(Seal(SPACE, "somebody else's secret").value(blocks[0], payloads[0]))
    elsewhere = pieces_of(Seal(bytes(32), SECRET).value(blocks[0], payloads[0]))
    older = pieces_of(Seal(SPACE, SECRET).value(blocks[0]._replace(tokens=bytes(64)), payloads[0]))

    def replace(pieces):
        return lambda client, mine, other: [
            client.set(k, bytes(p)) for k, p in zip(mine, pieces, strict=True)
        ]

    def swap(client, one, another):
        first = client.get(one)
        second = client.get(another)
        client.set(one, second)
        client.set(another, first)

    return {
        "poisoned": lambda client, mine, other: client.setrange(mine[2], 1000, b"\xff\xfe"),
        "truncated": lambda client, mine, other: client.set(
            mine[3], client.getrange(mine[3], 0, -2)
        ),
        "longer": lambda client, mine, other: client.append(mine[0], b"\0"),
        "garbage": lambda client, mine, other: client.set(mine[0], b"garbage"),
        "of another type": lambda client, mine, other: (
            client.delete(mine[0]),
            client.rpush(mine[0], "x"),
        ),
        "swapped": lambda client, mine, other: [
            swap(client, a, b) for a, b in zip(mine, other, strict=True)
        ],
        "a piece swapped": lambda client, mine, other: swap(client, mine[1], other[1]),
        "pieces in another order": lambda client, mine, other: swap(client, mine[1], mine[2]),
        "foreign": replace(foreign),
        "of another space": replace(elsewhere),
        "replayed, of other tokens": replace(older),
    }


@pytest.mark.parametrize("name", damages())
def test_an_invalid_value_is_a_miss_and_rewritten(name, server, client, caplog):
    tier, blocks, payloads = filled(server.url, 2, 3 * MIB)
    by_block = [
        [key for key in stored_keys(client) if block.prefix_hash.hex() in key] for block in blocks
    ]
    damages()[name](client, *by_block)
    assert reads(tier, blocks, payloads) == 0
    assert tier.stat().refused == 1
    assert caplog.text.count("is damaged or was not written with this secret") == 1
    assert not client.exists(*by_block[0])
    tier.read(
        blocks[1:], [memoryview(bytearray(3 * MIB))]
    )  # those that were swapped with it are lost as well
    assert tier.write(blocks, payloads) == 2
    assert reads(tier, blocks, payloads) == 2
    client.set(by_block[1][0], b"garbage")
    assert reads(tier, blocks, payloads) == 1
    assert caplog.text.count("is damaged or was not written") == 1, "one warning must be enough"


@pytest.mark.parametrize("other", [{"secret": "another secret of somebody"}, {"secret": None}])
def test_secrets_are_isolated(server, client, caplog, other):
    """Machines with different secrets neither find nor delete each other's blocks."""
    tier, blocks, payloads = filled(server.url, 2, 3 * MIB)
    neighbour = opened(server.url, trust=other["secret"] is None, **other)
    assert neighbour.ask(hashes_of(blocks)) == [False, False]
    assert reads(neighbour, blocks, payloads) == 0
    assert neighbour.write(blocks, payloads) == 2
    neighbour.drop(hashes_of(blocks[:1]))
    assert reads(tier, blocks, payloads) == 2
    assert reads(neighbour, blocks[1:], payloads[1:]) == 1
    assert (tier.stat().refused, neighbour.stat().refused) == (0, 0)
    assert caplog.records == []


def test_an_oversized_value_is_not_fetched(server, client):
    tier, blocks, payloads = filled(server.url, 1)
    client.setrange(stored_keys(client)[0], 100 * MIB, b"x")
    before = client.info("stats")["total_net_output_bytes"]
    assert reads(tier, blocks, payloads) == 0
    assert client.info("stats")["total_net_output_bytes"] - before < 20_000


def test_damage_is_detected_without_a_secret(server, client):
    blocks, payloads = chain(2)
    tier = opened(server.url, secret=None, trust=True)
    assert tier.write(blocks, payloads) == 2
    assert reads(tier, blocks, payloads) == 2
    client.setrange(
        next(key for key in stored_keys(client) if blocks[1].prefix_hash.hex() in key),
        500,
        b"\xff\xfe",
    )
    assert reads(tier, blocks, payloads) == 1


# opening


def test_without_a_secret_the_tier_is_refused_unless_trusted():
    with pytest.raises(ConfigError, match=rf"{SECRET_VARIABLE}.*redis_trust=True"):
        opened("redis://h", secret=None)
    assert_raises(
        ConfigError, "15 characters, but needs at least 16", opened, "redis://h", secret="x" * 15
    )
    with pytest.raises(ConfigError, match="0 characters"):
        opened("redis://h", secret=None, environment={SECRET_VARIABLE: ""}, trust=True)
    for ttl in (0, -1, True, 1.5, None):
        assert_raises(ConfigError, "redis_ttl_s=", opened, "redis://h", ttl_s=ttl)
    opened("redis://h", secret=None, environment={SECRET_VARIABLE: SECRET})
    opened("redis://h", secret=None, trust=True)


def test_the_secret_may_come_from_the_environment(server, client):
    blocks, payloads = chain(1)
    writer = opened(server.url)
    reader = opened(server.url, secret=None, environment={SECRET_VARIABLE: SECRET})
    writer.write(blocks, payloads)
    assert reads(reader, blocks, payloads) == 1


def test_opening_sends_no_command(server, client):
    commands = client.info("stats")["total_connections_received"]
    tier = opened(server.url, clock=Clock())
    assert tier.holds(bytes(32)) is None
    stat = tier.stat()
    assert (stat.blocks, stat.bytes, stat.max_bytes, stat.writable, stat.state) == (
        None,
        None,
        None,
        True,
        "",
    )
    assert client.info("stats")["total_connections_received"] == commands
    assert tier.ping()


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    assert_raises(BackendUnavailable, re.escape(install_extra("redis")), opened, "redis://h")


def test_holds_remembers_recent_writes_and_reads(server, client):
    blocks, payloads = chain(4, 2 * MIB)
    hashes = hashes_of(blocks)
    clock = Clock()
    tier = opened(server.url, clock=clock, ttl_s=100)
    reader = opened(server.url)

    def held(by):
        found = [by.holds(prefix_hash) for prefix_hash in hashes]
        assert sorted(by.known()) == sorted(itertools.compress(hashes, found))
        return found

    assert held(tier) == [None] * 4
    tier.write(blocks[:3], payloads[:3])
    assert held(tier) == [True, True, True, None]
    assert reads(reader, blocks[:2], payloads[:2]) == 2
    assert held(reader) == [True, True, None, None]
    reader.write(blocks, payloads)  # it finds the third block on the server
    assert held(reader) == [True] * 4
    reader.drop(hashes[1:2])
    assert held(reader) == [True, None, True, True]
    client.flushall()
    assert reads(reader, blocks[2:3], payloads[2:3]) == 0
    assert held(reader) == [True, None, None, True]
    clock.now += 51  # by then the server may have evicted it
    assert held(tier) == [None] * 4


def test_ask_queries_the_server_and_is_remembered(server, client):
    blocks, payloads = chain(3, 2 * MIB)
    hashes = hashes_of(blocks)
    tier = opened(server.url)
    reader = opened(server.url)
    assert reader.ask(hashes) == [False] * 3
    tier.write(blocks[::2], payloads[::2])
    commands = client.info("commandstats")["cmdstat_exists"]["calls"]
    assert reader.ask(hashes) == tier.ask(hashes) == [True, False, True]
    assert client.info("commandstats")["cmdstat_exists"]["calls"] == commands + 6, (
        "each ask must query each of the three keys once"
    )
    assert [tier.holds(prefix_hash) for prefix_hash in hashes] == [True, None, True]
    client.delete(*(key for key in stored_keys(client) if hashes[2].hex() in key))
    assert tier.ask(hashes) == [True, False, False]
    assert [tier.holds(prefix_hash) for prefix_hash in hashes] == [True, None, None], (
        "the lost block must be unknown, so that it is written again"
    )
    assert tier.dropped(hashes[2])
    assert tier.stat().missing == tier.stat().errors == 0
    with server.stopped():
        assert tier.ask(hashes) == [False] * 3
    tier.close()
    assert tier.ask(hashes) == [False] * 3


@pytest.mark.parametrize("pieces", ["one pipeline", "several"])
def test_lost_or_damaged_values_are_rewritten_at_once(server, client, pieces):
    """Blocks after the first missing one are probably missing as well. They are looked up, not
    assumed.
    """
    blocks, payloads = chain(8, 1000 if pieces == "one pipeline" else 3 * MIB)
    tier = opened(server.url)
    tier.write(blocks, payloads)
    client.flushall()
    assert reads(tier, blocks, payloads) == 0
    assert [tier.holds(block.prefix_hash) for block in blocks] == [None] * 8
    assert tier.write(blocks, payloads) == 8
    for key in stored_keys(client)[:: 1 if pieces == "one pipeline" else 4]:
        client.set(key, b"garbage")
    assert reads(tier, blocks, payloads) == 0
    assert tier.write(blocks, payloads) == 8
    assert reads(tier, blocks, payloads) == 8


def test_the_memory_of_known_blocks_is_bounded(server, client, monkeypatch):
    monkeypatch.setattr(tier_module, "_MOST_SEEN", 3)
    tier, blocks, _ = filled(server.url, 5)
    assert [tier.holds(block.prefix_hash) for block in blocks] == [None, None, True, True, True]
