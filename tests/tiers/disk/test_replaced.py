"""A directory that is deleted, moved or replaced under a running tier, and owners that stop or die."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from helpers.server.live_servers import wait_until
from helpers.tiers.disk_cases import (
    CAP,
    OTHER_SPACE,
    SPACE,
    InlineSealer,
    chain,
    has_all,
    opened,
    present,
    read,
    segments,
    space_dir,
    write,
)
from helpers.tiers.disk_faults import FaultyFiles
from kvboost_edge.tiers import io_thread as io_threads
from kvboost_edge.tiers.disk.tier import DiskTier

pytestmark = pytest.mark.skipif(
    os.name != "posix", reason="elsewhere an open file cannot be deleted or moved"
)

BLOCKS = chain(40)
LATER = chain(20, 5)
ALL = [*BLOCKS, *LATER]
TESTS = Path(__file__).parents[2]


def said(caplog):
    """Count the log records that report the loss of a directory."""
    return sum("starts empty" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("what", ["root", "space", "files"])
def test_a_deleted_directory_is_recreated_at_the_next_write(tmp_path, what, caplog):
    root = tmp_path / "root"
    with opened(root, description={"model": "m"}) as tier:
        write(tier, BLOCKS)
        if what == "files":
            for path in space_dir(root).iterdir():
                path.unlink()
        else:
            shutil.rmtree(root if what == "root" else space_dir(root))
        assert write(tier, LATER) == len(LATER)
        assert tier.stat().state == ""
        assert present(tier, BLOCKS) == set()
        assert read(tier, LATER) == len(LATER)
        assert write(tier, BLOCKS) == len(BLOCKS)
    assert said(caplog) == len(caplog.records) == 1
    assert '"model": "m"' in (space_dir(root) / "space.json").read_text()
    with opened(root) as tier:
        assert has_all(tier, ALL)


def test_a_read_notices_a_deleted_directory(tmp_path, caplog):
    with opened(tmp_path / "root") as tier:
        write(tier, BLOCKS)
        shutil.rmtree(tmp_path / "root")
        assert read(tier, BLOCKS) == 0
        assert not tier.holds(BLOCKS[0].prefix_hash)
    assert said(caplog) == 1


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="looks into /proc")
def test_an_idle_tier_closes_deleted_files(tmp_path, monkeypatch):
    """No request arrives, yet the deleted files must be closed, because they occupy space until
    then.
    """

    def held():
        found = []
        for path in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                found.append(str(path.readlink()))
        return [name for name in found if str(tmp_path) in name and "(deleted)" in name]

    monkeypatch.setattr(io_threads, "_TEND_SECONDS", 0.02)
    tier = DiskTier.open(tmp_path / "root", SPACE, max_bytes=CAP, sealer=InlineSealer())
    io_thread = io_threads.IOThread([tier], 4000)
    io_thread.start(lambda piece: None)
    try:
        io_thread.store(BLOCKS, np.zeros((len(BLOCKS), 4000), np.uint8))
        wait_until(lambda: tier.stat().blocks == len(BLOCKS), "the blocks to be stored")
        shutil.rmtree(tmp_path / "root")
        wait_until(lambda: tier.stat().blocks == 0, "the loss to be noticed")
        wait_until(lambda: not held(), "the files to be closed")
        io_thread.store(LATER, np.zeros((len(LATER), 4000), np.uint8))
        wait_until(lambda: tier.stat().blocks == len(LATER), "the blocks to be stored again")
    finally:
        io_thread.close()


def test_a_moved_directory_is_not_modified(tmp_path):
    root = tmp_path / "root"
    moved = tmp_path / "moved"
    with opened(root, max_bytes=16 << 20) as tier:  # all in one unsealed segment
        write(tier, BLOCKS)
        root.rename(moved)
        before = {path: path.read_bytes() for path in space_dir(moved).iterdir()}
        assert write(tier, LATER) == len(LATER)
        assert present(tier, BLOCKS) == set()
    assert {path: path.read_bytes() for path in space_dir(moved).iterdir()} == before
    with opened(moved) as tier:
        assert has_all(tier, BLOCKS)
        assert present(tier, LATER) == set()


def test_a_directory_replaced_by_a_link_to_it_stays_in_use(tmp_path, caplog):
    """Reads and writes continue while the directory is moved, for example to a larger disk."""
    root = tmp_path / "root"
    moved = tmp_path / "moved"
    with opened(root) as tier:
        write(tier, BLOCKS)
        root.rename(moved)
        root.symlink_to(moved)
        assert read(tier, BLOCKS) == len(BLOCKS)
        assert write(tier, LATER) == len(LATER)
    with opened(moved) as tier:
        assert has_all(tier, ALL)
    assert not caplog.records


def test_a_link_that_replaces_a_space_is_not_followed(tmp_path):
    now = [0.0]
    with opened(tmp_path / "root", OTHER_SPACE) as other:
        write(other, BLOCKS)
    elsewhere = space_dir(tmp_path / "root", OTHER_SPACE)
    before = {path: path.read_bytes() for path in elsewhere.iterdir()}
    with opened(tmp_path / "root", clock=lambda: now[0]) as tier:
        write(tier, BLOCKS)
        shutil.rmtree(space_dir(tmp_path / "root"))
        space_dir(tmp_path / "root").symlink_to(elsewhere)
        assert write(tier, LATER) == 0
        assert "symbolic link" in tier.stat().state
        assert read(tier, BLOCKS) == 0
        space_dir(tmp_path / "root").unlink()
        now[0] += 29
        assert write(tier, LATER) == 0
        now[0] += 2
        assert write(tier, LATER) == len(LATER)
        assert tier.stat().state == ""
    assert {path: path.read_bytes() for path in elsewhere.iterdir()} == before


def test_recreating_a_directory_is_retried_every_30_seconds(tmp_path, caplog):
    now = [0.0]
    sealer = InlineSealer()
    tier = DiskTier.open(
        tmp_path / "root", SPACE, max_bytes=CAP, clock=lambda: now[0], sealer=sealer
    )
    write(tier, BLOCKS)
    shutil.rmtree(tmp_path / "root")
    (tmp_path / "root").write_text("in the way")
    for _ in range(3):
        assert write(tier, LATER) == 0
        assert read(tier, LATER) == 0
        stat = tier.stat()
        assert (stat.writable, stat.blocks) == (False, 0)
        assert "root" in stat.state
        assert "is a file" in stat.state
        assert "\n" not in stat.state
        now[0] += 31
    assert said(caplog) == 1
    assert len(caplog.records) == 2, [record.getMessage() for record in caplog.records]
    tier.close()
    assert (tmp_path / "root").read_text() == "in the way"


def test_an_owner_whose_lock_file_was_deleted_keeps_its_blocks(tmp_path):
    with opened(tmp_path) as tier:
        write(tier, BLOCKS)
        (space_dir(tmp_path) / "lock").unlink()
        assert write(tier, LATER) == len(LATER)
        assert has_all(tier, ALL)
        with process(tmp_path, "open") as other:
            assert other.ask() == "reads"
        (space_dir(tmp_path) / "lock").unlink()
        with process(tmp_path, "open") as other:
            assert other.ask() == "writes"
            assert write(tier, chain(30, 9)) == 0
            assert "owned by another process" in tier.stat().state
            assert has_all(tier, BLOCKS)


def test_closing_does_not_touch_a_replacement_directory(tmp_path):
    """Another owner has the name by now, with segments of the same numbers."""
    root = tmp_path / "root"
    with opened(root) as tier:
        write(tier, BLOCKS[:5])
        root.rename(tmp_path / "moved")
        with process(root, "write") as other:
            assert other.ask() == "writes"
            before = {path: path.read_bytes() for path in space_dir(root).iterdir()}
            assert segments(root)
            tier.close()
            assert {path: path.read_bytes() for path in space_dir(root).iterdir()} == before
    with opened(root) as tier:
        assert has_all(tier, BLOCKS)


def test_a_failed_check_loses_nothing(tmp_path, caplog):
    def stale(name, *args):
        raise OSError(5, "Input/output error")

    files = FaultyFiles(names=("is_same",))
    with opened(tmp_path, files=files) as tier:
        write(tier, BLOCKS)
        files.at = files.calls
        files.fault = stale
        files.lasting = True
        assert read(tier, BLOCKS) == len(BLOCKS)
        assert write(tier, LATER) == len(LATER)
    assert said(caplog) == 0


CHILD = """
import os, sys, time
from pathlib import Path
from helpers.tiers.disk_cases import chain, opened, write
with opened(Path(sys.argv[1])) as tier:
    if sys.argv[2] != "open":
        write(tier, chain(40))
    print("writes" if tier.stat().writable else "reads", flush=True)
    for line in sys.stdin:
        print(write(tier, chain(int(line), 5)), flush=True)
"""


class Process:
    """Another process with a tier of the same space and 40 blocks."""

    def __init__(self, running):
        self.running = running

    def ask(self, line=""):
        if line:
            self.running.stdin.write(line + "\n")
            self.running.stdin.flush()
        return self.running.stdout.readline().strip()


@contextlib.contextmanager
def process(root, how):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    command = [sys.executable, "-c", CHILD, str(root), how]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        try:
            yield Process(running)
        finally:
            running.kill()


def test_readers_work_while_the_owner_is_stopped_and_take_over_when_it_dies(tmp_path):
    with process(tmp_path, "write") as owner:
        assert owner.ask() == "writes"
        os.kill(owner.running.pid, signal.SIGSTOP)
        began = time.monotonic()
        with opened(tmp_path) as tier:
            assert time.monotonic() - began < 5
            assert read(tier, BLOCKS) == len(BLOCKS)
            assert write(tier, LATER) == 0
            assert "owned by another process" in tier.stat().state
            os.kill(owner.running.pid, signal.SIGCONT)
            assert owner.ask("20") == "20"
            assert read(tier, BLOCKS) == len(BLOCKS)
        os.kill(owner.running.pid, signal.SIGSTOP)
        os.kill(owner.running.pid, signal.SIGKILL)
        owner.running.wait()
    with opened(tmp_path) as tier:
        assert has_all(tier, ALL)
        assert write(tier, chain(10, 7)) == 10
