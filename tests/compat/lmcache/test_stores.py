"""Memory is bounded and evicts tails first. Failed writes of a tier are never served, whichever
write fails.
"""

import numpy as np
import pytest

from helpers.compat.lmcache_cases import equal, kv_of, kv_slice, make_engine, num_tokens_of
from helpers.tiers.redis_servers import running_redis
from kvboost_edge.compat.lmcache import LMCacheEngineConfig
from kvboost_edge.compat.lmcache.chunk_addresses import chunk_addresses, token_bytes
from kvboost_edge.compat.lmcache.chunk_arrays import ChunkShape
from kvboost_edge.compat.lmcache.stores import MemoryStore, StoredChunk, TierStore
from kvboost_edge.errors import ConfigError
from kvboost_edge.tiers.disk.tier import DiskTier

SPACE = bytes(range(32))
CHUNK = (
    2 * 2 * 3 * 4 * 4 * 4 + 16
)  # make_engine's layers, k and v, heads, head size, tokens, float32; its tokens


def chunks_of(tokens, fill=0):
    """Build chunks of 4 tokens with 200 bytes each."""
    addresses = chunk_addresses(SPACE, token_bytes(tokens), 4)
    return [
        StoredChunk(
            a,
            ChunkShape("numpy", "|u1", 1, 1, 1, 25, len(a.tokens) // 4),
            np.full(50 * len(a.tokens) // 4, fill, np.uint8),
        )
        for a in addresses
    ]


# memory


def test_the_memory_store_is_a_bounded_lru():
    engine = make_engine(max_memory_bytes=4 * CHUNK)
    a, b, c = (np.arange(start, start + 8) for start in (0, 100, 200))
    engine.store(a, kv_of(a))
    engine.store(b, kv_of(b))
    engine.retrieve(a)
    engine.store(c[:4], kv_of(c[:4]))
    assert [engine.lookup(t) for t in (a, b, c)] == [8, 4, 4], "the tail of b must be evicted first"
    engine.store(c, kv_of(c))
    assert [engine.lookup(t) for t in (a, b, c)] == [8, 0, 8]
    stat = engine.stats()["memory"]
    assert (stat.blocks, stat.bytes, stat.max_bytes, stat.evicted) == (4, 4 * CHUNK, 4 * CHUNK, 2)
    engine.close()


def test_the_head_of_an_overlong_sequence_stays():
    engine = make_engine(max_memory_bytes=3 * CHUNK + CHUNK // 2)
    tokens = np.arange(40)
    engine.store(tokens, kv_of(tokens))
    found, _ = engine.retrieve(tokens)
    assert equal(found, kv_slice(kv_of(tokens), 0, 12))
    assert engine.stats()["memory"].not_written == 7
    tiny = make_engine(max_memory_bytes=CHUNK - 1)
    tiny.store(tokens[:4], kv_of(tokens[:4]))
    assert tiny.lookup(tokens) == 0
    tiny.close()
    engine.close()


def test_reaching_the_memory_limit_is_logged_once(caplog):
    engine = make_engine(max_memory_bytes=3 * CHUNK + CHUNK // 2)
    tokens = np.arange(21)
    assert engine.config.max_memory_bytes < LMCacheEngineConfig().max_memory_bytes == 1 << 30
    engine.store(tokens[:12], kv_of(tokens[:12]))
    assert caplog.messages == []
    for _ in range(2):
        engine.store(tokens, kv_of(tokens))
    [cut] = caplog.messages
    assert f"max_memory_bytes={3 * CHUNK + CHUNK // 2}: " in cut
    assert f"stored up to token {engine.lookup(tokens)}; the rest does not fit" in cut
    assert "raise max_memory_bytes (max_local_cpu_size in from_defaults" in cut
    for start in (100, 200):
        other = np.arange(start, start + 4)
        engine.store(other, kv_of(other))
    assert len(caplog.messages) == 2
    assert "least recently used chunks are evicted from now on" in caplog.messages[1]
    engine.close()


def test_a_replacement_that_does_not_fit_removes_the_old_chunk():
    store = MemoryStore(250)
    small = chunks_of(range(4))[0]
    large = chunks_of(range(4))[0]
    large = large._replace(data=np.zeros(300, np.uint8))
    assert store.put([small], [small.address], replace=False) == 1
    assert store.put([large], [large.address], replace=True) == 0
    assert store.holds([small.address]) == 0
    assert store.stat().bytes == 0


def test_pinned_chunks_stay_until_every_pin_is_released():
    store = MemoryStore(500)
    old = chunks_of(range(8))
    new = chunks_of(range(100, 116))
    addresses = [chunk.address for chunk in old]

    def refill():
        store.put(new, [chunk.address for chunk in new], replace=False)

    store.put(old, addresses, replace=False)
    keys = store.pin(addresses)
    assert store.pin(addresses[:1]) == keys[:1]
    for _ in range(2):
        refill()
        assert store.holds(addresses) == 2
    assert store.stat().bytes <= 500
    store.unpin(keys)
    refill()
    assert store.holds(addresses) == 1, "a chunk that was pinned twice must stay"
    store.unpin(keys[:1])
    store.unpin(keys)
    refill()
    assert store.holds(addresses) == 0
    assert store.clear() == 2
    assert store.stat().bytes == 0


def test_a_chunk_of_another_sequence_under_the_same_hash_is_not_found():
    store = MemoryStore(1000)
    chunk = chunks_of(range(4))[0]
    store.put([chunk], [chunk.address], replace=False)
    for other in (
        chunk.address._replace(tokens=bytes(16)),
        chunk.address._replace(parent_hash=bytes(32)),
    ):
        assert store.holds([other]) == 0
        assert store.get([other]) == []


# tiers


class FailingWrites:
    """Tier that loses the n-th written block, as a full disk does."""

    def __init__(self, tier, lost):
        self.tier = tier
        self.lost = lost
        self.name = "disk"

    def write(self, blocks, payloads):
        done = 0
        for block, payload in zip(blocks, payloads, strict=True):
            self.lost -= 1
            done += 0 if self.lost == 0 else self.tier.write([block], [payload])
        return done

    def __getattr__(self, name):
        return getattr(self.tier, name)


@pytest.mark.parametrize("lost", range(1, 8))
@pytest.mark.parametrize("replace", [False, True])
def test_chunks_of_a_failed_store_are_never_returned(lost, replace, tmp_path):
    """Known fault: a failed store was later served as valid."""
    tier = DiskTier.open(tmp_path, SPACE)
    before = chunks_of(range(12), 1)
    after = chunks_of(range(12), 2)
    addresses = [chunk.address for chunk in before]
    if replace:
        TierStore(tier).put(before, addresses, replace=False)
    store = TierStore(FailingWrites(tier, lost))
    store.put(after, addresses, replace=replace)
    expected = (lost - 1) % 3 if lost <= 6 else 3
    assert store.holds(addresses) == expected
    found = store.get(addresses)
    assert [chunk.data.tolist() for chunk in found] == [
        chunk.data.tolist() for chunk in after[:expected]
    ]
    store.put(after, addresses, replace=False)
    assert store.holds(addresses) == len(store.get(addresses)) == 3, "the next store must succeed"
    store.close()


def test_a_full_disk_and_a_dead_server_return_only_valid_chunks(tmp_path):
    tokens = np.arange(8000)
    kv = kv_of(tokens)
    small = make_engine(f"file://{tmp_path}", chunk_size=100, max_disk_bytes=1 << 20)
    small.store(tokens, kv)
    found, _ = small.retrieve(tokens)
    assert num_tokens_of(found) == small.lookup(tokens) < 8000
    assert not found or equal(found, kv_slice(kv, 0, num_tokens_of(found)))
    small.close()
    with running_redis() as server:
        engine = make_engine(server.url, chunk_size=100)
        server.kill()
        engine.store(tokens, kv)
        assert (engine.lookup(tokens), engine.retrieve(tokens)[0]) == (0, ())
        assert "Connection refused" in engine.stats()["redis"].state
        engine.close()


def test_a_backend_that_cannot_be_opened_leaves_nothing_open(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError):
        make_engine(("memory", "redis://h", f"file://{tmp_path}/file"))
