"""Bounded memory of evicted hashes, which keeps the latest ones."""

from kvboost_edge.kvcache.evicted_hashes import EvictedHashes


def test_the_latest_hashes_are_remembered():
    names = [bytes([number]) * 32 for number in range(40)]
    for least in (1, 3, 10):
        dropped = EvictedHashes(least)
        for count, name in enumerate(names, 1):
            assert name not in dropped
            dropped.add([name])
            known = [other in dropped for other in names[:count]]
            assert least <= sum(known) < 2 * least + 1 or all(known)
            assert known == sorted(known), "the oldest hashes must be dropped first"
    dropped.add([])
    assert names[-1] in dropped


def test_dropping_a_hash_again_renews_it():
    dropped = EvictedHashes(least=2)
    dropped.add([b"a", b"b", b"c", b"a", b"d"])
    assert [name in dropped for name in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
