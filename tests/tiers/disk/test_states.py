"""A tier under random operations of Hypothesis, against a dict, through writes, reads, restarts and
crashes: it may lose blocks but never returns wrong ones.
"""

import random
import shutil

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from helpers.tiers.disk_cases import CAP, SPACE, InlineSealer, chain, hashes_of, payload, scratch
from helpers.tiers.disk_faults import FaultyFiles, PowerOff, powers_off
from kvboost_edge.tiers.disk import tier as module
from kvboost_edge.tiers.disk.tier import DiskTier

CHAINS = [chain(12, seed) for seed in range(6)]
for _branch in range(3):  # chains that share a head
    CHAINS.append([*CHAINS[0][:6], *chain(6, 50 + _branch, CHAINS[0][5].prefix_hash)])
NBYTES = 18_000  # three per segment, a hundred in all

chains = st.integers(0, len(CHAINS) - 1)
lengths = st.integers(1, 12)


class DiskMachine(RuleBasedStateMachine):
    """Disk tier driven by Hypothesis.

    The hashes in `given` were stored at some time. A crash happens at any system call, and data not
    yet on the device may be lost.
    """

    def __init__(self):
        super().__init__()
        self.directory = scratch()
        self.given = set()
        self.open()

    def open(self):
        self.files = FaultyFiles()
        self.tier = DiskTier.open(
            self.directory, SPACE, max_bytes=CAP, files=self.files, sealer=InlineSealer()
        )
        assert self.tier.stat().writable

    @rule(which=chains, start=st.integers(0, 8), length=lengths)
    def write(self, which, start, length):
        blocks = CHAINS[which][start : start + length]
        there = self.tier.write(blocks, [memoryview(payload(block, NBYTES)) for block in blocks])
        assert there == sum(self.tier.holds(block.prefix_hash) for block in blocks) == len(blocks)
        self.given |= set(hashes_of(blocks))

    @rule(which=chains, start=st.integers(0, 8), length=lengths)
    def read(self, which, start, length):
        self.check(CHAINS[which][start : start + length])

    @rule(which=chains, length=lengths)
    def touch(self, which, length):
        self.tier.touch(hashes_of(CHAINS[which][:length]))

    @rule(which=chains, start=st.integers(0, 11))
    def drop(self, which, start):
        hashes = hashes_of(CHAINS[which][start:])
        self.tier.drop(hashes)
        assert not any(map(self.tier.holds, hashes))

    @rule(seed=st.integers(0, 1000))
    def fill(self, seed):
        """Write chains that are used once, enough to evict others."""
        blocks = chain(30, 10_000 + seed)
        self.tier.write(blocks, [memoryview(bytes(NBYTES))] * len(blocks))

    @rule()
    def reopen(self):
        held = [
            block for blocks in CHAINS for block in blocks if self.tier.holds(block.prefix_hash)
        ]
        known = self.tier.known()
        assert len(known) == len(set(known)) == self.tier.stat().blocks
        assert all(map(self.tier.holds, known))
        assert self.tier.ask([*known, bytes(32)]) == [True] * len(known) + [False]
        assert set(hashes_of(held)) <= set(known)
        self.tier.close()
        assert self.tier.known() == []
        assert self.tier.ask(known) == [False] * len(known)
        self.open()
        assert all(self.tier.holds(block.prefix_hash) for block in held)

    @rule(which=chains, after=st.integers(0, 40), damage=st.integers(0, 2**32))
    def crash(self, which, after, damage):
        """End the process at a system call while it writes new chains. Part of the unsealed segment
        is lost.
        """
        self.files.at = self.files.calls + after
        self.files.fault = powers_off
        self.files.lasting = True
        try:
            self.fill(damage % 1000 + 5000)
            self.write(which, 0, 12)
            self.tier.close()
        except PowerOff:
            self.given |= set(hashes_of(CHAINS[which]))
        self.files.at = -1
        for shared in module._stores.values():
            shared.store.after_fork()  # releases all handles and writes nothing
        module._stores.clear()
        self.lose(random.Random(damage))
        self.open()

    def lose(self, draw):
        path = max(self.directory.glob("*/*.kvs"), default=None)
        if path is None or path.with_suffix(".kvx").exists():
            return
        with open(path, "r+b") as file:
            start = draw.randrange(path.stat().st_size + 1)
            if draw.random() < 0.5:
                file.truncate(start)
            else:
                file.seek(start)
                file.write(bytes(min(draw.randrange(1, 20_000), path.stat().st_size - start)))

    @invariant()
    def cap_holds(self):
        sizes = [path.stat().st_size for path in self.directory.glob("*/*.kvs")]
        assert sum(sizes) <= CAP
        assert 0 <= self.tier.stat().bytes <= sum(sizes)

    def check(self, blocks):
        into = [memoryview(bytearray(NBYTES)) for _ in blocks]
        done = self.tier.read(blocks, into)
        for block, got in zip(blocks[:done], into, strict=False):
            assert got == payload(block, NBYTES)
            assert block.prefix_hash in self.given

    def teardown(self):
        for blocks in CHAINS:
            self.check(blocks)
        self.tier.close()
        shutil.rmtree(self.directory)


def test_a_chain_is_not_evicted_from_its_head():
    machine = DiskMachine()
    machine.write(which=0, start=0, length=1)
    machine.fill(seed=3)
    machine.write(which=1, start=0, length=1)
    for seed in (1, 2, 0):
        machine.fill(seed=seed)
    machine.write(which=0, start=0, length=5)
    machine.write(which=1, start=0, length=7)
    machine.teardown()


@pytest.mark.slow
def test_the_tier_never_returns_wrong_bytes(scale):
    count = scale(60, 10_000)
    run_state_machine_as_test(
        DiskMachine, settings=settings(max_examples=count, stateful_step_count=8)
    )
