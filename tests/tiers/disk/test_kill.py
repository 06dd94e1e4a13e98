"""kill -9 at every kind of call and at random times: what is served afterwards is right, what was sealed is there."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.tiers.disk_cases import SPACE, chain, opened, present, read, segments, space_dir, write
from helpers.tiers.disk_faults import FaultyFiles
from kvboost_edge.tiers.disk.sidecar import decode_sidecar

CHAINS = [chain(10, seed) for seed in range(30)]
NBYTES = 18_000

# Writes chain after chain, and says which it wrote; ends itself at the call that is asked for.
CHILD = """
import sys
from pathlib import Path
from helpers.tiers import disk_faults
from helpers.tiers.disk_cases import chain, opened, read, write
directory, at, fault = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
files = disk_faults.FaultyFiles(at, getattr(disk_faults, fault, None))
with opened(directory, files=files, max_bytes=4 << 20) as tier:
    for seed in range(30):
        write(tier, chain(10, seed), 18_000)
        read(tier, chain(10, 0), 18_000)
print(files.calls)
print(*files.trace)
"""


def start(directory: Path, at: int = -1, fault: str = "none") -> subprocess.Popen[str]:
    tests = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])}
    command = [sys.executable, "-c", CHILD, str(directory), str(at), fault]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def check(directory: Path) -> None:
    """The next process stores and serves; nothing wrong is served, and of sealed segments nothing is missing."""
    sealed = sealed_hashes(directory)
    with opened(directory, files=FaultyFiles(), max_bytes=4 << 20) as tier:
        found = [present(tier, blocks, NBYTES) for blocks in CHAINS]
        assert tier.stat().refused == 0
        assert sealed <= set().union(*found)
        extra = chain(4, 77)
        assert write(tier, extra, NBYTES) == 4
        assert read(tier, extra, NBYTES) == 4
    with opened(directory, files=FaultyFiles(), max_bytes=4 << 20) as tier:
        assert read(tier, chain(4, 77), NBYTES) == 4
    assert not list(space_dir(directory).glob("*.new"))


def sealed_hashes(directory: Path) -> set[bytes]:
    """Of all sealed segments, as long as no segment was ever deleted to make room: then every block must be there."""
    paths = segments(directory)
    if [int(path.stem, 16) for path in paths] != list(range(1, len(paths) + 1)):
        return set()
    found: set[bytes] = set()
    for path in paths:
        if path.with_suffix(".kvx").exists():
            data, number = path.with_suffix(".kvx").read_bytes(), int(path.stem, 16)
            records = decode_sidecar(data, SPACE, number, path.stat().st_size)
            assert records is not None
            found |= {record.prefix_hash for record in records}
    return found


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The calls of a child that comes to its end."""
    done = start(tmp_path_factory.mktemp("trace"))
    out = done.communicate(timeout=120)[0].splitlines()
    assert done.returncode == 0
    assert len(out[1].split()) == int(out[0])
    return out[1].split()


NAMED = (
    "open",
    "allocate",
    "write",
    "truncate",
    "sync",
    "replace",
    "sync_directory",
    "unlink",
    "forget",
    "close",
    "lock",
)


@pytest.mark.parametrize("fault", ["ends_before", "ends_within"])
def test_killed_at_every_kind_of_call(trace, tmp_path, fault, scale):
    """At the first, one in the middle and the last call of every kind."""
    for name in NAMED:
        places = [number for number, call in enumerate(trace) if call == name]
        for which in scale([len(places) // 2], [0, len(places) // 4, len(places) // 2, len(places) - 1]):
            directory = tmp_path / f"{name}-{which}"
            child = start(directory, places[which], fault)
            child.communicate(timeout=120)
            assert child.returncode == -signal.SIGKILL, name
            check(directory)


def test_killed_at_random_times(trace, tmp_path, scale):
    draw = random.Random(0)
    for number in range(scale(20, 200)):
        directory = tmp_path / str(number)
        child = start(directory, draw.randrange(len(trace)), "ends_within")
        child.communicate(timeout=120)
        assert child.returncode == -signal.SIGKILL
        check(directory)
