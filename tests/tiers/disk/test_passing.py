"""Transient errors, such as a limit on open files: lookups miss, and no sound block is forgotten."""

import contextlib
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.tiers.disk_cases import SPACE, chain, opened, present, read, segments, space_dir, write
from helpers.tiers.disk_faults import FaultyFiles, fails
from kvboost_edge.errors import ConfigError
from kvboost_edge.tiers.disk.sidecar import decode_sidecar, encode_sidecar

BLOCKS = chain(40)  # three segments
PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN)


@contextlib.contextmanager
def failing(files, code):
    files.at = files.calls
    files.fault = fails(code)
    files.lasting = True
    yield
    files.at = -1


@pytest.mark.parametrize("code", PASSING, ids=errno.errorcode.get)
@pytest.mark.parametrize("name", ["open", "read"])
def test_a_transient_read_error_is_a_miss_and_keeps_the_block(tmp_path, name, code, caplog):
    with opened(tmp_path) as tier:
        write(tier, BLOCKS)
    files = FaultyFiles(names=(name,))
    with opened(tmp_path, files=files) as tier:
        with failing(files, code):
            for _ in range(5):
                assert read(tier, BLOCKS) == 0
            assert tier.stat().blocks == len(BLOCKS)
            assert tier.stat().errors == 5
            assert os.strerror(code) in tier.stat().state
        assert read(tier, BLOCKS) == len(BLOCKS)
        assert (tier.stat().state, tier.stat().refused) == ("", 0)
    assert len(caplog.records) == 1, "the error must be logged once"


def test_own_open_files_are_closed_at_the_descriptor_limit(tmp_path):
    """The tier's own segments reach the limit, so it closes the least recently used one."""
    with opened(tmp_path) as tier:
        write(tier, BLOCKS)

    class Few(FaultyFiles):
        left = 100

        def open(self, path, flags):
            if not self.left:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            self.left -= 1
            return super().open(path, flags)

        def close(self, handle):
            self.left += 1
            super().close(handle)

    files = Few()
    with opened(tmp_path, files=files) as tier:
        assert read(tier, BLOCKS[:1]) == 1
        files.left = 0
        assert read(tier, BLOCKS) == len(BLOCKS)
        files.left = 10


def test_a_transient_error_during_cleaning_loses_nothing(tmp_path):
    files = FaultyFiles(names=("read",))
    now = [0.0]
    kept = chain(3, 99)
    with opened(tmp_path, files=files, clock=lambda: now[0]) as tier:
        write(tier, kept, 28_000)
        for seed in range(16):
            with failing(files, errno.ENOMEM):
                write(tier, chain(5, seed), 28_000)
            now[0] += 60
            read(tier, kept, 28_000)
        assert tier.stat().evicted > 0
        assert tier.stat().refused == 0
        assert read(tier, kept, 28_000) == 3


@pytest.mark.parametrize("at", range(8))
def test_a_transient_error_at_opening_loses_nothing(tmp_path, at):
    """Every open fails from the n-th on. A tier that knew only half of the blocks would forget the
    others.
    """
    with opened(tmp_path) as tier:
        write(tier, BLOCKS)
    before = [path.stat().st_size for path in segments(tmp_path)]
    files = FaultyFiles(at, fails(errno.EMFILE), lasting=True, names=("open",))
    said = "Too many open files"
    try:
        with opened(tmp_path, files=files):
            pass
    except ConfigError as error:
        said = str(error)
    assert "Too many open files" in said
    assert [path.stat().st_size for path in segments(tmp_path)] == before
    with opened(tmp_path) as tier:
        assert read(tier, BLOCKS) == len(BLOCKS)


CHILD = """
import os, resource, sys
from pathlib import Path
from helpers.tiers.disk_cases import chain, opened, read, write
blocks = chain(400)
with opened(Path(sys.argv[1])) as tier:
    assert write(tier, blocks[:200]) == 200
    tier._store._segments.close()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = os.open(os.devnull, os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 1, hard))
    assert read(tier, blocks[:200]) == 0
    assert write(tier, blocks) < 400
    assert not tier.stat().writable, tier.stat()
    assert tier.stat().blocks >= 200, tier.stat()
    os.close(taken)
    assert read(tier, blocks[:200]) == 200, tier.stat()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    tier._store._retry_at = 0.0
    assert write(tier, blocks) == 400
    assert read(tier, blocks) > 390
print("sound")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="limits as POSIX has them")
def test_a_process_at_its_limit_of_open_files(tmp_path):
    tests = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])}
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == "sound\n", done.stderr


def test_a_forged_length_allocates_no_memory(tmp_path):
    """A sidecar with a valid checksum but absurd lengths is not trusted."""
    with opened(tmp_path) as tier:
        write(tier, BLOCKS)
    path = space_dir(tmp_path) / "00000001.kvx"
    records = decode_sidecar(path.read_bytes(), SPACE, 1, 1 << 30)
    assert records
    records[0] = records[0]._replace(header_bytes=(1 << 32) - 64)
    records[1] = records[1]._replace(payload_bytes=1 << 60)
    path.write_bytes(encode_sidecar(SPACE, 1, records))
    (space_dir(tmp_path) / "order").unlink()
    with opened(tmp_path) as tier:
        assert len(present(tier, BLOCKS)) == len(BLOCKS) - 2
        assert (tier.stat().refused, tier.stat().errors) == (2, 0)
