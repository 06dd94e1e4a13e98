"""What a tier dropped is remembered up to a bound, the last first."""

from kvboost_edge.tiers.dropped import Dropped


def test_the_last_ones_are_remembered():
    dropped = Dropped(most=3)
    dropped.add([b"a", b"b", b"c"])
    dropped.add([b"a", b"d"])  # again: it is as young as "d"
    assert [name in dropped for name in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    dropped.add([])
    assert b"a" in dropped
