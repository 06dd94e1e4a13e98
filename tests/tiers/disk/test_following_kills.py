"""kill -9 of processes that share a directory: no wrong byte is served, reported blocks are found,
and the other processes continue.
"""

import os
import random

import pytest

from helpers.pairwise import each_once
from helpers.tiers.disk_cases import chain, has_all, opened, space_dir
from helpers.tiers.herd import herd

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

NUM_CHAINS = 400  # 10 MB
ROOM_FOR_ALL = 32 << 20
# Requests chains at random and stores those that are missing. Its clock runs 20 times as fast, so
# it polls the directory every 25 ms.
CODE = """
import itertools, random, time
from helpers.pairwise import each_once
from helpers.tiers.disk_cases import chain, opened, read, write
from helpers.tiers.disk_faults import FaultyFiles

def run(directory, name, cap, keeps_all):
    draw = random.Random(name)
    say = journal_of(directory, name)
    clock = lambda: 20 * time.monotonic()
    with opened(Path(directory), files=FaultyFiles(), max_bytes=cap, clock=clock) as tier:
        while True:
            seed = draw.randrange(400)
            blocks = chain(6, seed)
            hashes = (block.prefix_hash for block in blocks)
            held = len(list(itertools.takewhile(tier.holds, hashes)))
            try:
                found = read(tier, blocks)
                assert found >= held or not keeps_all, f"{found} of {held} reported blocks"
                assert tier.stat().refused == 0, tier.stat()
            except BaseException as error:
                say("wrong", repr(error))
                raise
            if found < 6 and write(tier, blocks) == 6:
                say("stored", seed)
            say("hit" if found == 6 else "miss", "owner" if tier.stat().writable else "reader")
            tier.tend()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("num_processes", "cap"), each_once([2, 3], [ROOM_FOR_ALL, 2 << 20]))
def test_killed_at_random_times(tmp_path, num_processes, cap, scale):
    """The long form kills 100 times."""
    draw = random.Random(num_processes)
    keeps_all = cap == ROOM_FOR_ALL
    with herd(CODE, tmp_path) as forks:
        survived = forks.kill_by_turns(
            *(scale(9, 100), num_processes, draw, 0.1),
            *(cap, keeps_all),
        )
        assert min(survived["owner"], survived["reader"]) >= 3
        for name in forks.names:
            forks.kill(name)
        lines = forks.all_lines()
    stored = {int(line.split()[1]) for line in lines if line.startswith("stored")}
    with opened(tmp_path, max_bytes=cap) as tier:
        found = [has_all(tier, chain(6, seed)) for seed in stored]
        assert (tier.stat().refused, tier.stat().writable) == (0, True)
    assert all(found) if keeps_all else 0 < sum(found) < len(found)
    assert not list(space_dir(tmp_path).glob("*.new"))
