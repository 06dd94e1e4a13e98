"""`check_invariants` detects each planted inconsistency. A check that cannot fail checks nothing."""

import pytest

from kvboost_edge.errors import CacheCorruption
from kvboost_edge.kvcache.manager import KVCacheManager

ROOT = b"r" * 32


def busy_manager():
    """Build a manager with a computed table, one in flight, an idle chain and a block being
    rewritten.
    """
    manager = KVCacheManager(16, 4)
    tokens = list(range(8))
    idle = manager.open_table([5] * 8, ROOT)
    manager.extend(idle, 8)
    manager.commit(idle, [5] * 8, 8)
    manager.free(idle)
    done = manager.open_table(tokens, ROOT)
    manager.extend(done, 10)
    manager.commit(done, tokens, 8)
    rewriting = manager.open_table([5] * 8 + [6] * 8, ROOT)
    manager.make_writable(rewriting, 1)
    manager.extend(rewriting, 16)
    manager.check_invariants([done, rewriting])
    return manager, done, rewriting


def swap_entry(manager, block_id, **fields):
    entry = manager._index.withdraw(block_id)
    manager._index.restore(block_id, entry._replace(**fields))


@pytest.mark.parametrize(
    "damage",
    [
        lambda m, done, new: done.block_ids.append(done.block_ids[0]),
        lambda m, done, new: done.block_ids.pop(),
        lambda m, done, new: setattr(done, "num_computed_tokens", 99),
        lambda m, done, new: setattr(done, "_num_hashed", 99),
        lambda m, done, new: setattr(done, "_chain_serial", 99),
        lambda m, done, new: done._duplicates.update({7: (0, 1)}),
        lambda m, done, new: new._withdrawn.update({9: new._withdrawn[1]}),
        lambda m, done, new: m._index.restore(new.block_ids[1], new._withdrawn[1]),
        lambda m, done, new: m._claims.holders.popitem(),
        lambda m, done, new: m._claims.holders.update({b"stray": 0}),
        lambda m, done, new: new._claims.popitem(),
        lambda m, done, new: m._pool.touch(done.block_ids[0]),
        lambda m, done, new: m._pool.release(done.block_ids[2], matchable=False),
        lambda m, done, new: m._pool._free.take(1),
        lambda m, done, new: swap_entry(m, done.block_ids[0], prefix_hash=b"wrong"),
        lambda m, done, new: swap_entry(m, done.block_ids[1], prefix_hash=b"wrong"),
        lambda m, done, new: swap_entry(m, done.block_ids[0], tokens=b"short"),
        lambda m, done, new: swap_entry(m, done.block_ids[1], tokens=ROOT + b"t" * 16),
        lambda m, done, new: swap_entry(m, done.block_ids[1], tokens=b"t" * 16),
        lambda m, done, new: m._index._buckets.popitem(),
    ],
)
def test_each_planted_inconsistency_is_detected(damage):
    manager, done, rewriting = busy_manager()
    damage(manager, done, rewriting)
    with pytest.raises(CacheCorruption):
        manager.check_invariants([done, rewriting])


def test_lost_repeated_and_foreign_tables_are_detected():
    manager, done, rewriting = busy_manager()
    stranger = KVCacheManager(4, 4).open_table([1], ROOT)
    for tables in (
        [done],
        [done, done],
        [done, rewriting, rewriting],
        [done, rewriting, stranger],
        [],
    ):
        with pytest.raises(CacheCorruption, match="tables are live"):
            manager.check_invariants(tables)
    manager.check_invariants(iter([rewriting, done]))
