"""Each system call fails in turn: the caller gets no error and no wrong byte, and storing
continues.
"""

import errno

import pytest

from helpers.tiers.disk_cases import chain, opened, present, read, segments, space_dir, write
from helpers.tiers.disk_faults import ERRORS, FaultyFiles, fails, moves_half, moves_nothing
from kvboost_edge.errors import ConfigError

LARGE = 28_000  # two per segment
BLOCKS = [chain(5, seed) for seed in range(14)]
KEPT = chain(3, 99)


class Clock:
    """Clock of monotonic seconds, set by hand."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def story(tier):
    """Cause every operation: new segments, sealing, cleaning, reading, and reuse of a head."""
    for blocks in BLOCKS:
        write(tier, KEPT, LARGE)
        write(tier, blocks, LARGE)
        read(tier, [*KEPT[:1], blocks[0]], LARGE)


def number_of_calls(directory):
    files = FaultyFiles()
    with opened(directory, files=files) as tier:
        story(tier)
        assert tier.stat().evicted > 0
    with opened(directory, files=files) as tier:
        assert read(tier, KEPT, LARGE) == len(KEPT)
    assert set(files.trace) >= {
        "allocate",
        "truncate",
        "unlink",
        "replace",
        "sync",
        "sync_directory",
        "sizes",
        "space",
    }
    return files.calls


FAULTS = {
    **{errno.errorcode[code]: fails(code) for code in ERRORS},
    "half": moves_half,
    "nothing": moves_nothing,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.some(2)
def test_every_file_operation_may_fail(tmp_path, name, lasting, scale):
    """The fault begins at each call in turn. Half a minute after it ends, the tier stores and
    serves as before.
    """
    calls = number_of_calls(tmp_path / "count")
    step = scale(360, 1)
    for at in range(first_call(name, step), calls, step):
        clock = Clock()
        directory = tmp_path / str(at)
        files = FaultyFiles(at, FAULTS[name], lasting=lasting)
        try:
            tier_options = {"files": files, "clock": clock}
            with opened(directory, **tier_options) as tier:
                story(tier)
                files.at = -1
                clock.now += 60
                assert_stores(tier)
        except ConfigError as error:
            if "disk_cache_dir" not in str(error) or files.calls > 40:
                raise  # only opening does, and the error names the option
        with opened(directory, files=FaultyFiles()) as tier:
            for blocks in BLOCKS:
                present(tier, blocks, LARGE)
            assert_stores(tier)


def first_call(name, step):
    """Return the first call to fail. Each fault begins at another one, so that together they cover
    every call.
    """
    return sorted(FAULTS).index(name) % step


def assert_stores(tier):
    if "another process" in tier.stat().state or "only read" in tier.stat().state:
        return
    fresh = chain(3, 1000 + tier.stat().written_blocks)
    assert write(tier, fresh) == 3, tier.stat()
    assert read(tier, fresh) == 3
    assert tier.stat().writable


@pytest.mark.parametrize("code", ERRORS)
def test_writes_resume_after_a_full_or_broken_disk(tmp_path, code, caplog):
    clock = Clock()
    files = FaultyFiles(names=("write", "allocate"))
    with opened(tmp_path, files=files, clock=clock) as tier:
        assert write(tier, KEPT) == len(KEPT)
        files.at = files.calls
        files.fault = fails(code)
        files.lasting = True
        assert write(tier, BLOCKS[0]) == 0
        calls = files.calls
        stat = tier.stat()
        assert (stat.writable, stat.not_written, stat.errors) == (False, len(BLOCKS[0]), 1)
        assert str(tmp_path) in stat.state
        assert "\n" not in stat.state
        clock.now = 29.0
        assert write(tier, BLOCKS[0]) == 0
        assert files.calls == calls, "no write may be tried before the retry time"
        assert read(tier, KEPT) == len(KEPT)
        files.at = -1
        clock.now = 31.0
        assert write(tier, BLOCKS[0]) == len(BLOCKS[0])
        assert tier.stat().state == ""
    assert sum("cannot store blocks" in record.message for record in caplog.records) == 1
    with opened(tmp_path) as tier:
        assert read(tier, KEPT) == len(KEPT)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_old_segments_are_deleted_when_a_quota_is_reached(tmp_path, code, caplog):
    """The quota holds eight segments, and the free space of the file system does not show it."""

    class Quota(FaultyFiles):
        def allocate(self, handle, nbytes):
            if sum(path.stat().st_size for path in segments(tmp_path)) + nbytes > 8 * (64 << 10):
                raise OSError(code, "full")
            super().allocate(handle, nbytes)

    with opened(tmp_path, files=Quota()) as tier:
        for blocks in BLOCKS:
            assert write(tier, blocks, LARGE) == len(blocks)
            assert read(tier, blocks, LARGE) == len(blocks)
        stat = tier.stat()
        assert (stat.writable, stat.state, stat.not_written) == (True, "", 0)
        assert stat.evicted > 0
    assert caplog.records == []


def test_an_unreadable_block_is_a_miss_and_dropped(tmp_path):
    files = FaultyFiles(names=("read",))
    with opened(tmp_path, files=files) as tier:
        write(tier, KEPT)
        files.at = files.calls + 2
        files.fault = fails(errno.EIO)
        assert read(tier, KEPT) == 2
        assert tier.stat().errors == 1
        assert not tier.holds(KEPT[2].prefix_hash)
        assert write(tier, KEPT) == len(KEPT)
        assert read(tier, KEPT) == len(KEPT)


def test_an_unreadable_segment_is_not_deleted(tmp_path):
    """A device that fails for a while must not make the tier delete a file that it could not read."""
    with opened(tmp_path) as tier:
        write(tier, KEPT)
    for path in tmp_path.glob("*/*.kvx"):
        path.unlink()
    before = [path.stat().st_size for path in segments(tmp_path)]
    files = FaultyFiles(0, fails(errno.EIO), lasting=True, names=("read",))
    with opened(tmp_path, files=files) as tier:
        assert not any(tier.holds(block.prefix_hash) for block in KEPT)
    assert [path.stat().st_size for path in segments(tmp_path)] == before
    (space_dir(tmp_path) / "order").unlink()  # which no longer lists them
    with opened(tmp_path) as tier:
        assert read(tier, KEPT) == len(KEPT)
