"""Scheduler, loads, pool and a real disk tier under random operations of Hypothesis: requests,
cancels, resets, faults, damage, restarts and crashes. Every answer equals the one of the prompt
alone.
"""

from __future__ import annotations

import errno
import random
import shutil
from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from helpers.engine.model_kinds import ModelKind
from helpers.tiers.disk_cases import InlineSealer, chain, scratch
from helpers.tiers.disk_faults import FaultyFiles, PowerOff, fails, moves_half, powers_off
from kvboost_edge.config import GenerationMode
from kvboost_edge.tiers.disk import tier as module
from kvboost_edge.tiers.disk.tier import DiskTier

SPACE = bytes(32)
CAP = 1 << 20
HEADS = [[(7 * head + 3 * place) % 250 for place in range(80)] for head in range(2)]
PROMPTS = [
    head[:length] + [tail] * (tail % 20)
    for head in HEADS
    for length in (33, 48, 80)
    for tail in (16, 101, 202)
]
MODES = (
    GenerationMode.PREFIX_CACHE,
    GenerationMode.PREFIX_CACHE,
    GenerationMode.PREFIX_CACHE,
    GenerationMode.BASELINE,
)


class TieredMachine(RuleBasedStateMachine):
    """Engine over a disk tier, driven by Hypothesis.

    The requests in `asked` have answers to check. A crash forgets them, while the disk keeps all or
    part of its data.
    """

    kind: ModelKind
    hits: ClassVar[Counter[str]] = Counter()

    def __init__(self):
        super().__init__()
        self.directory = scratch()
        self.now = 0.0
        self.start(8)

    def start(self, num_blocks):
        self.files = FaultyFiles()
        parts = {"files": self.files, "sealer": InlineSealer(), "clock": lambda: self.now}
        self.tier = DiskTier.open(self.directory, SPACE, max_bytes=CAP, **parts)
        assert self.tier.stat().writable
        self.bench = self.kind.bench(num_blocks, 6, tiers=[self.tier], max_num_seqs=3)
        self.asked = []

    @rule(
        which=st.integers(0, len(PROMPTS) - 1),
        count=st.sampled_from((1, 2, 18)),
        mode=st.sampled_from(MODES),
    )
    def submit(self, which, count, mode):
        self.asked.append(self.bench.submit(PROMPTS[which], count, mode))

    @rule(steps=st.integers(1, 6), moves=st.integers(0, 2))
    def work(self, steps, moves):
        for _ in range(steps):
            self.bench.step()
            self.bench.io_thread.pump(moves)

    @rule()
    def finish(self):
        self.bench.run()
        for handle in self.asked:
            self.hits.update(self.bench.answer(handle).hit_tokens)
        self.asked = []
        assert self.bench.manager.used_block_count == self.bench.io_thread.staging_bytes == 0

    @precondition(lambda self: self.asked)
    @rule(pick=st.integers(0, 100))
    def cancel(self, pick):
        self.asked[pick % len(self.asked)].cancel()

    @rule()
    def reset(self):
        self.bench.manager.reset()

    @rule(seed=st.integers(0, 1000))
    def flood(self, seed):
        """Write enough foreign blocks to evict all others."""
        blocks = chain(60, seed)
        self.tier.write(blocks, [memoryview(bytes(18_000))] * len(blocks))

    @rule(
        after=st.integers(0, 12),
        fault=st.sampled_from((fails(errno.ENOSPC), fails(errno.EIO), moves_half)),
    )
    def trouble(self, after, fault):
        """Let the device fail from one of the next calls on, then recover."""
        self.files.at = self.files.calls + after
        self.files.fault = fault
        self.files.lasting = True
        self.work(3, 2)
        self.files.at = -1
        self.now += 60

    @rule(seed=st.integers(0, 2**32))
    def damage(self, seed):
        draw = random.Random(seed)
        paths = sorted(self.directory.glob("*/*.kv?"))
        if paths:
            with open(draw.choice(paths), "r+b") as file:
                place = draw.randrange(max(1, file.seek(0, 2)))
                file.seek(place)
                byte = file.read(1) or b"\0"
                file.seek(place)
                file.write(bytes([byte[0] ^ 1 << draw.randrange(8)]))

    @rule(num_blocks=st.sampled_from((8, 12, 40)), save=st.booleans())
    def restart(self, num_blocks, save):
        for handle in self.asked:
            handle.cancel()
        self.bench.step()
        if save:
            self.bench.run()
        self.tier.close()
        self.start(num_blocks)

    @rule(which=st.integers(0, len(PROMPTS) - 1))
    def come_back(self, which):
        """Finish a prompt, restart, and submit it again without waiting for the answer."""
        self.submit(which, 2, GenerationMode.PREFIX_CACHE)
        self.finish()
        self.restart(8, True)
        self.submit(which, 2, GenerationMode.PREFIX_CACHE)

    @rule(
        which=st.integers(0, len(PROMPTS) - 1), after=st.integers(0, 20), seed=st.integers(0, 2**32)
    )
    def crash(self, which, after, seed):
        """End the process at one of its next system calls. Part of the unsealed segment may be
        lost.
        """
        self.files.at = self.files.calls + after
        self.files.fault = powers_off
        self.files.lasting = True
        store = self.tier._store
        assert store is not None
        try:
            self.submit(which, 18, GenerationMode.PREFIX_CACHE)
            self.bench.run()
            self.tier.close()
        except PowerOff:
            pass
        self.files.at = -1
        store.after_fork()  # releases all handles and writes nothing
        module._stores.clear()
        self.lose(random.Random(seed))
        self.start(8)

    def lose(self, draw):
        path = max(self.directory.glob("*/*.kvs"), default=None)
        if path is not None and not path.with_suffix(".kvx").exists():
            with open(path, "r+b") as file:
                file.truncate(draw.randrange(path.stat().st_size + 1))

    @invariant()
    def cap_holds(self):
        assert sum(path.stat().st_size for path in self.directory.glob("*/*.kvs")) <= CAP

    def teardown(self):
        self.finish()
        self.tier.close()
        shutil.rmtree(self.directory)


class PlainTieredMachine(TieredMachine):
    kind = ModelKind.PLAIN


class HybridTieredMachine(TieredMachine):
    kind = ModelKind.HYBRID


@pytest.mark.slow
@pytest.mark.parametrize("machine", [PlainTieredMachine, HybridTieredMachine])
def test_answers_are_correct_in_any_sequence_of_events(machine, scale):
    machine.hits.clear()
    count = scale(24, 5000)
    run_state_machine_as_test(machine, settings=settings(max_examples=count, stateful_step_count=8))
    assert machine.hits["pool"] > count
    assert machine.hits["disk"] > count
