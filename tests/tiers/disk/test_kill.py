"""kill -9 at every kind of call and at random times: served blocks are right, and sealed ones are
found.
"""

import os
import random

import pytest

from helpers.tiers.crashing import crashing
from helpers.tiers.disk_cases import SPACE, chain, opened, present, read, segments, space_dir, write
from helpers.tiers.disk_faults import FaultyFiles
from kvboost_edge.tiers.disk.sidecar import decode_sidecar

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

CHAINS = [chain(10, seed) for seed in range(30)]
NBYTES = 18_000

# Writes one chain after another; kills itself at the requested call, or leaves a list of its calls.
CODE = """
from pathlib import Path
from helpers.tiers import disk_faults
from helpers.tiers.disk_cases import chain, opened, read, write

def run(directory, at, fault):
    directory = Path(directory)
    files = disk_faults.FaultyFiles(at, getattr(disk_faults, fault, None))
    with opened(directory, files=files, max_bytes=4 << 20) as tier:
        for seed in range(30):
            write(tier, chain(10, seed), 18_000)
            read(tier, chain(10, 0), 18_000)
    (directory / "trace").write_text(" ".join(files.trace))
"""


@pytest.fixture(scope="module")
def crash():
    with crashing(CODE) as crash:
        yield crash


def check(directory):
    """Check that the next process stores and serves, serves nothing wrong, and finds all blocks of
    sealed segments.
    """
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


def sealed_hashes(directory):
    """Return the hashes of all sealed segments if no segment was ever deleted to make room;
    otherwise none.
    """
    paths = segments(directory)
    if [int(path.stem, 16) for path in paths] != list(range(1, len(paths) + 1)):
        return set()
    found = set()
    for path in paths:
        if path.with_suffix(".kvx").exists():
            data = path.with_suffix(".kvx").read_bytes()
            number = int(path.stem, 16)
            records = decode_sidecar(data, SPACE, number, path.stat().st_size)
            assert records is not None
            found |= {record.prefix_hash for record in records}
    return found


@pytest.fixture(scope="module")
def trace(crash, tmp_path_factory):
    """System calls of a process that ends normally."""
    directory = tmp_path_factory.mktemp("trace")
    assert not crash(str(directory), -1, "none")
    return (directory / "trace").read_text().split()


NAMED = "open allocate write truncate sync replace sync_directory unlink forget close lock".split()


@pytest.mark.parametrize("fault", ["ends_before", "ends_within"])
def test_killed_at_every_kind_of_call(crash, trace, tmp_path, fault, scale):
    """One call in the middle of each kind is tested; the long form adds the first and the last."""
    for name in NAMED:
        places = [number for number, call in enumerate(trace) if call == name]
        for which in scale(
            [len(places) // 2], [0, len(places) // 4, len(places) // 2, len(places) - 1]
        ):
            directory = tmp_path / f"{name}-{which}"
            assert crash(str(directory), places[which], fault), name
            check(directory)


def test_killed_at_random_times(crash, trace, tmp_path, scale):
    draw = random.Random(0)
    for number in range(scale(5, 200)):
        directory = tmp_path / str(number)
        assert crash(str(directory), draw.randrange(len(trace)), "ends_within")
        check(directory)
