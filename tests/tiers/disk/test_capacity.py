"""The cap over all spaces, the minimum of free space, and the order of eviction."""

import contextlib
import sys
import threading

import pytest

from helpers.tiers.disk_cases import (
    CAP,
    OTHER_SPACE,
    RECORD_BYTES,
    SPACE,
    chain,
    hashes_of,
    opened,
    present,
    read,
    segments,
    write,
)
from helpers.tiers.disk_faults import FaultyFiles
from kvboost_edge.errors import ConfigError
from kvboost_edge.tiers.disk import capacity
from kvboost_edge.tiers.disk.capacity import default_cap, free_floor
from kvboost_edge.tiers.disk.system_calls import Files
from kvboost_edge.tiers.disk.tier import DiskTier

HELD = CAP // RECORD_BYTES  # blocks that would fill the cap


class SmallDisk(FaultyFiles):
    """File system of `total` bytes with `free` bytes left."""

    def __init__(self, free, total=20 << 20):
        super().__init__()
        self.left = free
        self.total = total

    def space(self, path):
        return self.left, self.total


def on_disk(directory):
    return sum(path.stat().st_size for path in directory.glob("*/*.kvs"))


def watched(directory, *space):
    return opened(directory, *space, files=FaultyFiles())


def test_the_cap_holds_and_the_latest_blocks_stay(tmp_path):
    with watched(tmp_path) as tier:
        for seed in range(120):
            assert write(tier, chain(10, seed)) == 10
            assert on_disk(tmp_path) <= CAP
        stat = tier.stat()
        assert stat.bytes <= CAP
        assert stat.blocks + stat.evicted == 1200
        assert stat.blocks > 0.8 * HELD
        assert tier._store.cleaner.copied_bytes < 0.1 * stat.written_bytes, (
            "blocks that will soon be evicted must not be copied"
        )
        assert read(tier, chain(10, 119)) == 10


def test_a_chain_is_evicted_from_its_tail(tmp_path):
    """For any sequence of writes, the remaining blocks of a chain begin at its head."""
    long = chain(100, 1)
    with watched(tmp_path) as tier:
        for start in range(0, 100, 7):
            write(tier, long[start : start + 7])
        for seed in range(2, 90):
            write(tier, chain(5, seed))
            held = [tier.holds(block.prefix_hash) for block in long]
            assert held == sorted(held, reverse=True)
        assert not all(held)


def test_evicted_blocks_are_reported_as_dropped(tmp_path):
    written = [chain(10, seed) for seed in range(120)]
    with watched(tmp_path) as tier:
        for blocks in written:
            write(tier, blocks)
        hashes = [block.prefix_hash for blocks in written for block in blocks]
        held, dropped = (
            {hash_ for hash_ in hashes if asked(hash_)} for asked in (tier.holds, tier.dropped)
        )
        assert held | dropped == set(hashes)
        assert not held & dropped
        assert len(dropped) == tier.stat().evicted > 0
        assert not tier.dropped(chain(1, 1000)[0].prefix_hash), (
            "a block that was never stored must not count as dropped"
        )
        write(tier, written[0])
        assert not any(tier.dropped(block.prefix_hash) for block in written[0]), (
            "a block that was stored again must not count as dropped"
        )
        tier.drop([written[0][0].prefix_hash])
        assert tier.dropped(written[0][0].prefix_hash)


def test_shared_prefixes_survive_a_full_disk(tmp_path):
    head = chain(20, 1)
    with watched(tmp_path) as tier:
        write(tier, head)
        for seed in range(2, 220):
            tier.touch(hashes_of(head))
            write(tier, chain(8, seed, head[-1].prefix_hash))
        assert tier.stat().evicted > 2 * HELD
        assert read(tier, head) == 20
    with watched(tmp_path) as tier:
        assert read(tier, head) == 20


def test_reused_blocks_survive_a_scan(tmp_path):
    """The blocks are not touched in between: one read protects them, while the scan is on
    probation.
    """
    used = chain(60, 1)
    with watched(tmp_path) as tier:
        write(tier, used)
        assert read(tier, used) == 60
        for seed in range(2, 2 + 3 * HELD // 10):
            write(tier, chain(10, seed))
        assert tier.stat().evicted > HELD
        assert read(tier, used) == 60


def test_usage_order_survives_a_restart(tmp_path):
    first = chain(60, 1)
    second = chain(60, 2)
    with watched(tmp_path) as tier:
        write(tier, first)
        write(tier, second)
        tier.touch(hashes_of(first))
    with watched(tmp_path) as tier:
        for seed in range(3, 45):
            write(tier, chain(10, seed))
        assert len(present(tier, first)) == 60
        assert len(present(tier, second)) < 60


def test_write_amplification_is_at_most_two(tmp_path):
    """Cleaning copies blocks that are still used. Every other chain is read again, which is the
    worst case.
    """
    with watched(tmp_path) as tier:
        for seed in range(260):
            write(tier, chain(6, seed))
            if seed % 2 and seed > 40:
                read(tier, chain(6, seed - 40))
        assert 0 < tier._store.cleaner.copied_bytes <= tier.stat().written_bytes


def test_closed_spaces_are_evicted_first_in_lru_order(tmp_path):
    spaces = [bytes([number]) * 32 for number in range(4)]
    for space in spaces[:3]:
        with watched(tmp_path, space) as tier:
            write(tier, chain(120))
    with watched(tmp_path, spaces[0]) as tier:
        assert read(tier, chain(120)) == 120  # chain 1 is now the oldest
    with watched(tmp_path, spaces[3]) as tier:
        write(tier, chain(200))
        assert on_disk(tmp_path) <= CAP
        assert [len(segments(tmp_path, space)) for space in spaces] == [8, 1, 8, 14]
        write(tier, chain(430))
        assert on_disk(tmp_path) <= CAP
        assert [len(segments(tmp_path, space)) > 0 for space in spaces[1:3]] == [False, False]
        assert read(tier, chain(430)) > 0.8 * HELD


def test_an_open_space_is_not_evicted_by_others(tmp_path):
    with watched(tmp_path) as mine, watched(tmp_path, OTHER_SPACE) as theirs:
        write(theirs, chain(100))
        held = segments(tmp_path, OTHER_SPACE)
        for seed in range(60):
            write(mine, chain(10, seed))
        assert on_disk(tmp_path) <= CAP
        assert segments(tmp_path, OTHER_SPACE) == held, "an open space must keep its segments"
        assert read(theirs, chain(100)) == 100
        assert mine.stat().blocks > 60


def test_free_space_bounds_the_tier_dynamically(tmp_path):
    floor = free_floor(20 << 20)
    assert floor == 1 << 20
    disk = SmallDisk(free=4 << 20)
    now = [0.0]
    with opened(tmp_path, files=disk, clock=lambda: now[0]) as tier:
        write(tier, chain(100))
        taken = on_disk(tmp_path)
        disk.left = floor - taken // 2  # other files need half of the tier's space
        write(tier, chain(40, 2))
        assert on_disk(tmp_path) <= taken // 2 + (64 << 10)
        disk.left = 0
        assert write(tier, chain(200, 3)) < 200
        assert not tier.stat().writable
        assert "must stay free" in tier.stat().state
        disk.left = 4 << 20
        now[0] = 60.0
        assert write(tier, chain(50, 4)) == 50
        assert tier.stat().writable


@pytest.mark.parametrize(
    ("free", "cap"), [(0, 1 << 20), (10 << 30, 2 << 30), (80 << 30, 16 << 30), (1 << 40, 16 << 30)]
)
def test_the_default_cap_is_a_fifth_of_what_is_free_or_16_gib(tmp_path, free, cap):
    assert default_cap(tmp_path / "not" / "there", SmallDisk(free)) == cap


def test_the_tiers_own_files_count_as_free_for_its_cap(tmp_path):
    with opened(tmp_path) as tier:
        write(tier, chain(100))
    taken = on_disk(tmp_path)
    assert default_cap(tmp_path, SmallDisk((50 << 20) - taken)) == 10 << 20


def test_the_free_space_floor_is_a_twentieth_or_1_gib():
    assert free_floor(1 << 40) == 1 << 30
    assert free_floor(10 << 30) == 512 << 20


def test_free_space_is_that_of_the_nearest_existing_directory(tmp_path):
    assert Files().space(tmp_path / "not" / "yet")[1] == Files().space(tmp_path)[1]


def test_a_second_tier_of_a_space_sets_the_cap_of_both(tmp_path):
    with watched(tmp_path) as tier:
        with opened(tmp_path, max_bytes=2 * CAP) as second:
            assert tier.stat().max_bytes == second.stat().max_bytes == 2 * CAP
        with pytest.raises(ConfigError, match="max_disk_bytes"):
            DiskTier.open(tmp_path, SPACE, max_bytes=1)
        assert tier.stat().max_bytes == 2 * CAP


class AtOnce(Files):
    """File operations in which two allocations of segments wait shortly for each other.

    - peak: the most bytes that all segments took then
    """

    def __init__(self, directory):
        self.directory = directory
        self.peak = 0
        self.together = threading.Barrier(2)

    def allocate(self, handle, nbytes):
        self.wait()
        super().allocate(handle, nbytes)
        self.wait()
        self.peak = max(self.peak, on_disk(self.directory))

    def wait(self):
        with contextlib.suppress(threading.BrokenBarrierError):
            self.together.wait(0.1)


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere room is not given before it is written to"
)
def test_concurrent_writers_stay_below_the_cap(tmp_path, monkeypatch):
    monkeypatch.setattr(capacity, "_LOCK_WAIT_S", 0.02)
    now = [0.0]
    with opened(tmp_path) as one, opened(tmp_path, OTHER_SPACE, clock=lambda: now[0]) as other:
        for seed in range(30):
            write(one, chain(10, seed))
            write(other, chain(10, seed))
        files = AtOnce(tmp_path)
        monkeypatch.setattr(one._store._segments, "_files", files)
        monkeypatch.setattr(other._store._segments, "_files", files)
        begun = [
            threading.Thread(target=write, args=(tier, chain(16, 99))) for tier in (one, other)
        ]
        for thread in begun:
            thread.start()
        for thread in begun:
            thread.join()
        assert 0 < files.peak <= CAP
        assert sum("is making room" in tier.stat().state for tier in (one, other)) <= 1
        now[0] += 31
        one._store._retry_at = 0.0
        files.together.abort()
        assert write(one, chain(5, 100)) == write(other, chain(5, 100)) == 5
        assert [tier.stat().state for tier in (one, other)] == ["", ""]


@pytest.mark.parametrize("kind", ["link", "directory"])
def test_the_tier_works_without_the_directory_lock(tmp_path, kind):
    """In a directory that several users write to, the lock file may belong to another user."""
    if kind == "link":
        (tmp_path / "lock").symlink_to(tmp_path / "nowhere")
    else:
        (tmp_path / "lock").mkdir()
    with opened(tmp_path) as tier:
        assert write(tier, chain(40)) == 40
        assert tier.stat().state == ""
    assert not (tmp_path / "nowhere").exists()


def test_a_full_file_system_is_reported(tmp_path):
    """The free space is more than twice the minimum, but leaves no room for another segment."""
    floor = free_floor(20 << 20)
    with opened(tmp_path, files=SmallDisk(free=2 * floor + 4096), max_bytes=64 << 20) as tier:
        assert write(tier, chain(400)) < 400
        assert "MB free, of which" in tier.stat().state
        assert "other open models" not in tier.stat().state
