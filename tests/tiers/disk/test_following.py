"""Tiers of several processes on one directory: the others see what the owner stores, and one of
them takes over.

Each tier here stands for a process. `test_following_kills.py` runs real ones.
"""

import contextlib
import errno
import itertools
import os
import shutil
import threading
from pathlib import Path

import pytest

from helpers.tiers.disk_cases import (
    OTHER_SPACE,
    chain,
    die,
    has_all,
    hashes_of,
    opened,
    opened_apart,
    present,
    read,
    scratch,
    segments,
    space_dir,
    write,
)
from helpers.tiers.disk_faults import ERRORS, FaultyFiles, fails, moves_half, moves_nothing
from kvboost_edge.tiers.disk.segment_sealing import Sealer
from kvboost_edge.tiers.disk.store import FOLLOW_S

BLOCKS = chain(40)  # three segments
LATER = chain(20, 5)


class Clock:
    """Clock of monotonic seconds, set by hand."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def tick(self, *tiers):
        """Advance the clock to the next poll of the directory by these tiers, and run it."""
        self.now += FOLLOW_S
        for tier in tiers:
            tier.tend()


@pytest.fixture
def clock():
    return Clock()


@pytest.mark.parametrize("how", ["tend", "ask", "read", "write"])
def test_a_reader_sees_new_blocks_after_half_a_second(tmp_path, clock, how):
    look = {
        "tend": lambda tier: tier.tend(),
        "ask": lambda tier: tier.ask([]),
        "read": lambda tier: read(tier, LATER),
        "write": lambda tier: write(tier, LATER),
    }[how]
    with opened(tmp_path) as owner, opened_apart(tmp_path, clock=clock) as reader:
        for start in range(0, 40, 5):
            new = BLOCKS[start : start + 5]
            write(owner, new)
            clock.now += FOLLOW_S - 0.01
            look(reader)
            assert not reader.holds(new[0].prefix_hash)
            clock.now += 0.02
            look(reader)
            assert set(reader.known()) == set(owner.known())
            assert read(reader, BLOCKS) == start + 5
        assert (reader.stat().refused, reader.stat().writable) == (0, False)
    assert len(segments(tmp_path)) > 2


def test_a_reader_does_not_poll_in_between(tmp_path, clock):
    files = FaultyFiles(names=("sizes", "lock"))
    with opened(tmp_path) as owner, opened_apart(tmp_path, files=files, clock=clock) as reader:
        write(owner, BLOCKS)
        before = files.calls
        for _ in range(5):
            reader.tend()
            read(reader, BLOCKS)
        assert files.calls == before
        for _ in range(5):
            clock.tick(reader)
        assert files.calls == before + 5 * 2


def test_a_reader_sees_only_complete_records(tmp_path, clock):
    """The reader polls after every part of a write."""
    looks = []

    def in_parts(name, call, handle, buffers, offset):
        data = memoryview(b"".join(buffers))
        ends = [1, 8, 200, 255, 256, 257, 4000, data.nbytes - 1]
        for start, end in itertools.pairwise([0, *ends]):
            call(handle, [data[start:end]], offset + start)
            clock.tick(reader)
            looks.append(set(reader.known()))
        return ends[-1] + call(handle, [data[ends[-1] :]], offset + ends[-1])

    files = FaultyFiles(names=("write",))
    with (
        opened(tmp_path, files=files) as owner,
        opened_apart(tmp_path, clock=clock) as reader,
    ):
        for count in (0, 1, 2):
            files.at = files.calls
            files.fault = in_parts
            write(owner, BLOCKS[: count + 1])
            assert looks == [set(hashes_of(BLOCKS[:count]))] * 8
            looks.clear()
            clock.tick(reader)
            assert read(reader, BLOCKS) == count + 1
        assert reader.stat().refused == 0


def test_moved_blocks_are_found_at_once(tmp_path, clock):
    """The cleaner copies blocks and deletes the segment that the reader knows."""
    with (
        opened(tmp_path, files=FaultyFiles()) as owner,
        opened_apart(tmp_path, clock=clock) as reader,
    ):
        for seed in range(260):
            write(owner, chain(6, seed))
            if seed % 30 == 0:
                clock.tick(reader)
            if seed % 2 and seed > 40:
                read(owner, chain(6, seed - 40))
                known = [one for one in chain(6, seed - 40) if reader.holds(one.prefix_hash)]
                held = [one for one in known if owner.holds(one.prefix_hash)]
                assert has_all(reader, held)
        assert owner._store.cleaner.copied_bytes > 0
        assert owner.stat().evicted > 0
        clock.tick(reader)
        assert set(reader.known()) >= set(owner.known())
        for blocks in (chain(6, seed) for seed in range(260)):
            assert present(reader, blocks) >= present(owner, blocks)
        assert reader.stat().refused == 0


def test_a_block_of_a_deleted_segment_is_a_miss(tmp_path, clock):
    with opened(tmp_path) as owner, opened_apart(tmp_path, clock=clock) as reader:
        write(owner, BLOCKS)
        clock.tick(reader)
        assert read(reader, BLOCKS) == len(BLOCKS)
        segments(tmp_path)[0].unlink()
        assert len(present(reader, BLOCKS)) == len(BLOCKS) - 15
        assert reader.stat().refused == 0
        segments(tmp_path)[0].unlink()
        clock.tick(reader)
        assert len(reader.known()) == len(BLOCKS) - 30
        assert reader.dropped(BLOCKS[20].prefix_hash)


@pytest.mark.parametrize("end", ["close", "die"])
def test_a_reader_becomes_owner_when_the_owner_ends(tmp_path, clock, end, caplog):
    caplog.set_level("INFO", "kvboost_edge")
    with (
        opened(tmp_path) as owner,
        opened_apart(tmp_path, clock=clock) as second,
        opened_apart(tmp_path, clock=clock) as third,
    ):
        write(owner, BLOCKS)
        clock.tick(second, third)
        assert write(second, LATER) == 0
        for tier in (second, third):
            stat = tier.stat()
            assert not stat.writable
            assert "owned by another process" in stat.state
            assert "takes over" in stat.state
        owner.close() if end == "close" else die(owner)
        clock.tick(second, third)
        assert [tier.stat().writable for tier in (second, third)] == [True, False]
        assert second.stat().state == ""
        assert read(second, BLOCKS) == len(BLOCKS)
        assert write(second, LATER) == len(LATER)
        clock.tick(third)
        assert read(third, LATER) == len(LATER)
        assert read(third, BLOCKS) == len(BLOCKS)
        die(second)
        clock.tick(third)
        assert third.stat().writable
        assert has_all(third, [*BLOCKS, *LATER])
        assert write(third, chain(30, 7)) == 30
    assert sum("stores blocks in" in record.message for record in caplog.records) == 2
    with opened(tmp_path) as tier:
        assert has_all(tier, [*BLOCKS, *LATER, *chain(30, 7)])
        assert tier.stat().refused == 0


def test_dropped_blocks_stay_dropped_after_a_takeover(tmp_path, clock):
    """After the owner replaced a block, the reader never serves the first bytes again."""
    block = chain(1)[0]
    with opened(tmp_path) as owner, opened_apart(tmp_path, clock=clock) as reader:
        write(owner, [block], 5000)
        clock.tick(reader)
        owner.drop([block.prefix_hash])
        write(owner, [block])
        clock.tick(reader)
        assert read(reader, [block]) == 1
        owner.close()
        clock.tick(reader)
        assert read(reader, [block]) == 1
        assert reader.stat().blocks == 1


def test_a_dead_owners_segment_is_sealed_during_reads(tmp_path, clock):
    jobs = []

    class Later(Sealer):
        def start(self, job):
            jobs.append(job)

    with (
        opened(tmp_path) as owner,
        opened_apart(tmp_path, clock=clock, sealer=Later()) as reader,
    ):
        write(owner, BLOCKS[:5])
        die(owner)
        clock.tick(reader)
        assert reader.stat().writable
        assert read(reader, BLOCKS[:5]) == 5
        assert not list(space_dir(tmp_path).glob("*.kvx"))
        assert len(jobs) == 1
        jobs.pop()()
        assert len(list(space_dir(tmp_path).glob("*.kvx"))) == 1
        assert read(reader, BLOCKS[:5]) == 5
        for job in jobs:
            job()


def test_a_reused_segment_number_is_read_again(tmp_path, clock):
    """The reader does not notice that one owner deleted its last segment, whose number the next
    owner reuses.
    """
    with opened(tmp_path) as owner, opened_apart(tmp_path, clock=clock) as reader:
        write(owner, BLOCKS)
        clock.tick(reader)
        assert read(reader, BLOCKS) == len(BLOCKS)
        die(owner)
        last = segments(tmp_path)[-1]
        last.unlink()
        with opened_apart(tmp_path) as heir:
            write(heir, LATER)
            assert last in segments(tmp_path)
            clock.tick(reader)
            assert read(reader, LATER) == len(LATER)
            assert set(reader.known()) == set(heir.known())
            assert reader.stat().refused == 0


@pytest.mark.parametrize("sealed", [False, True])
def test_records_after_damage_are_seen_once_sealed(tmp_path, clock, sealed):
    with (
        opened(tmp_path, max_bytes=64 << 20) as owner,
        opened_apart(tmp_path, clock=clock) as reader,
    ):
        write(owner, BLOCKS[:1])
        clock.tick(reader)
        write(owner, BLOCKS[1:4])
        with open(segments(tmp_path)[0], "r+b") as file:
            file.seek(256 + 4032 + 50)
            file.write(b"damage")
        clock.tick(reader)
        assert reader.stat().blocks == 1
        if sealed:
            owner._store._retire()
            clock.tick(reader)
        assert len(present(reader, BLOCKS)) == (3 if sealed else 1)
        assert reader.stat().refused == sealed


def test_readers_keep_no_files_of_other_spaces_open(tmp_path, clock):
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("looks into /proc")
    with (
        opened(tmp_path) as owner,
        opened_apart(tmp_path, clock=clock) as reader,
        opened(tmp_path, OTHER_SPACE) as other,
    ):
        write(owner, BLOCKS)
        write(other, BLOCKS)
        clock.tick(reader)
        assert read(reader, BLOCKS) == len(BLOCKS)
        owner._store._segments.close()
        other._store._segments.close()
        names = []
        for path in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                names.append(str(path.readlink()))
        assert [name for name in names if str(tmp_path) in name and ".kv" in name] == []


@pytest.mark.skipif(os.name != "posix", reason="elsewhere an open file cannot be deleted")
def test_a_directory_deleted_under_a_reader_is_reopened(tmp_path, clock, caplog):
    root = tmp_path / "root"
    with opened(root) as owner, opened_apart(root, clock=clock) as reader:
        write(owner, BLOCKS)
        clock.tick(reader)
        shutil.rmtree(root)
        assert read(reader, BLOCKS) == 0
        assert reader.stat().blocks == 0
        assert "deleted or replaced" in reader.stat().state
        assert not root.exists(), "the reader must not recreate a directory that is being deleted"
        assert write(owner, LATER) == len(LATER)
        assert reader.stat().writable, (
            "the reader must stay writable so that it reopens the directory"
        )
        assert write(reader, LATER) == len(LATER), "the blocks stored by the owner must be accepted"
        assert not reader.stat().writable
        assert "owned by another process" in reader.stat().state
        assert read(reader, LATER) == len(LATER)
    assert sum("starts empty" in record.message for record in caplog.records) == 2


def test_engines_of_one_process_poll_once(tmp_path, clock):
    files = FaultyFiles(names=("sizes",))
    with (
        opened(tmp_path) as owner,
        opened_apart(tmp_path, files=files, clock=clock) as reader,
    ):
        write(owner, BLOCKS)
        before = files.calls
        clock.now += 1
        threads = [threading.Thread(target=reader.tend) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert files.calls == before + 1
        assert reader.stat().blocks == len(BLOCKS)


FAULTS = {
    **{errno.errorcode[code]: fails(code) for code in (*ERRORS, errno.EMFILE)},
    "half": moves_half,
    "nothing": moves_nothing,
}


def story(owner, reader, clock):
    """Store, copy and delete blocks that a reader follows, kill the owner, and let the reader take
    over.
    """
    kept = chain(3, 99)
    for seed in range(12):
        write(owner, kept, 28_000)
        write(owner, chain(5, seed), 28_000)
        read(owner, kept, 28_000)
        clock.tick(reader)
        read(reader, [*kept, *chain(5, seed)], 28_000)
        present(reader, chain(5, seed - 3), 28_000)
    die(owner)
    clock.tick(reader)
    write(reader, chain(5, 100), 28_000)
    read(reader, chain(5, 100), 28_000)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.some(2)
def test_every_file_operation_of_a_reader_may_fail(name, lasting, scale):
    """The caller gets no error and no wrong byte. After the faults, the reader takes over and
    stores.

    `test_faults.py` covers the calls of opening.
    """

    def played(at=-1):
        directory = scratch()
        clock = Clock()
        files = FaultyFiles(fault=FAULTS[name], lasting=lasting)
        with (
            opened(directory, files=FaultyFiles()) as owner,
            opened_apart(directory, files=files, clock=clock) as reader,
        ):
            begun = files.calls
            files.at = -1 if at < 0 else begun + at
            story(owner, reader, clock)
            files.at = -1
            clock.now += 60
            reader.tend()
            assert reader.stat().writable, reader.stat()
            fresh = chain(3, 1000)
            assert write(reader, fresh) == 3, reader.stat()
            assert read(reader, fresh) == 3
        with opened(directory, files=FaultyFiles()) as tier:
            assert has_all(tier, fresh)
            for seed in (*range(12), 99, 100):
                present(tier, chain(5, seed), 28_000)
        shutil.rmtree(directory)
        return files.calls - begun

    step = scale(480, len(FAULTS))  # each fault begins at another call
    for at in range(sorted(FAULTS).index(name) % step, played(), step):
        played(at)
