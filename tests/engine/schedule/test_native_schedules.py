"""RELIABILITY 5 on the native runner, for every cache width.

Under any schedule, a request's tokens and the log probabilities of prompt and output are equal to
the bit to those of an uncached run alone.
"""

import dataclasses
import random
from collections import Counter

import numpy as np
import pytest

from helpers.engine.hand_io_thread import DictTier
from helpers.engine.hostile_drafts import KINDS as DRAFTS
from helpers.engine.hostile_drafts import HostileDrafter
from helpers.engine.native_bench import ALL_BITS, Cold, NativeBench, assert_begins
from helpers.engine.native_kinds import machine_of, packages_for
from kvboost_edge.config import GenerationMode, RecomputeStrategy
from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.kvcache.recurrent.snapshots import StateSizes
from kvboost_edge.reuse.recompute import Repair

CHOSEN = (
    "qwen3",
    "qwen3_moe",
    "gpt_oss",
    "gemma4",
    "lfm2",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "granitemoehybrid-experts",
    "nemotron_h-moe",
    "falcon_h1",
)
VOCABULARY = 256
NEW = 24
REPAIRS = [
    Repair(strategy=RecomputeStrategy.NONE),
    Repair(strategy=RecomputeStrategy.SELECTIVE, overlap=8),
    Repair(strategy=RecomputeStrategy.CACHEBLEND, overlap=0, ratio=0.5),
]


def _prompts():
    """Cut two stems at many lengths, each alone and with two tails, so that much is shared and much
    diverges.
    """
    rng = np.random.default_rng(5)
    stems = [rng.integers(0, VOCABULARY, 33).tolist() for _ in range(2)]
    tails = [rng.integers(0, VOCABULARY, length).tolist() for length in (3, 10)]
    lengths = (1, 15, 16, 17, 31, 32, 33)
    return [stem[:length] + tail for stem in stems for length in lengths for tail in ([], *tails)]


PROMPTS = _prompts()


def params_of(prompt):
    """Return the parameters of a prompt. Half of the prompts are greedy, half are random with a
    seed of their own.
    """
    drawn = (
        {"temperature": 1.1, "top_p": 0.95, "seed": len(prompt)}
        if len(prompt) % 2
        else {"temperature": 0.0}
    )
    return SamplingParams(max_new_tokens=NEW, logprobs=2, **drawn)


class Model:
    """Model with the results of its prompts alone, and the tiers that schedules of one cache width
    share.
    """

    def __init__(self, machine, seed):
        self.machine = machine
        self.is_hybrid = machine.states is not None
        self._cold = {bits: Cold(machine, bits) for bits in ALL_BITS}
        self.tiers = {bits: DictTier(losses=0.1, seed=seed) for bits in ALL_BITS}

    def alone(self, bits, prompt):
        return self._cold[bits].answer(
            prompt, dataclasses.replace(params_of(prompt), prompt_logprobs=1)
        )

    def bench(self, bits, seed, rng):
        """Build a bench. Most of them share a tier with earlier ones, as after a restart."""
        states = StateSizes(
            rng.choice((9, 12, 40)), rng.choice((16, 1024)), rng.random() < 0.3, rng.choice((5, 31))
        )
        return NativeBench(
            self.machine,
            bits=bits,
            threads=1 + seed // 2 % 2,
            num_blocks=rng.choice((7, 7, 7, 20)),
            max_num_seqs=rng.choice((3, 8)),
            max_batch_tokens=rng.choice((1, 7, 16, 33, 128, 128)),
            tiers=[self.tiers[bits]] if rng.random() < 0.7 else [],
            states=states if self.is_hybrid else None,
        )


def submit_moved(bench, text, rng):
    """Submit a request that reuses KV of `text` at another position, to run next to the exact ones."""
    tokens = [
        *(rng.randrange(VOCABULARY) for _ in range(rng.choice((1, 16, 23)))),
        *text,
        rng.randrange(VOCABULARY),
    ]
    params = SamplingParams(max_new_tokens=rng.choice((1, 9)), temperature=0.0)
    drafts = {"max_draft_tokens": rng.choice((0, 31)), "always_drafts": True}
    return bench.submit(
        tokens, params, GenerationMode.CHUNK_KV_REUSE, repair=rng.choice(REPAIRS), **drafts
    )


def submit_wanted(bench, prompt, rng):
    params = dataclasses.replace(
        params_of(prompt),
        max_new_tokens=rng.choice((0, 1, 17, NEW, NEW)),
        prompt_logprobs=1 if rng.random() < 0.15 else None,
    )
    mode = GenerationMode.BASELINE if rng.random() < 0.1 else GenerationMode.PREFIX_CACHE
    return bench.submit(
        prompt,
        params,
        mode,
        priority=rng.choice((0, 0, 0, 1)),
        snapshot_hints=(rng.randrange(len(prompt)),),
        max_draft_tokens=rng.choice((0, 3, 31)),
        always_drafts=True,
    )


def run_schedule(model, seed):
    """Run one random schedule and return the counts of its events."""
    rng = random.Random(seed)
    bits = ALL_BITS[seed % 4]
    prompts = rng.sample(
        PROMPTS, 2
    )  # few prompts, so that some repeat and some continue inside an answer
    prompts += [
        [*one, *model.alone(bits, one).output_token_ids[: rng.randrange(NEW)], 5, 6]
        for one in prompts
    ]
    expected = {
        tuple(prompt): model.alone(bits, prompt) for prompt in prompts
    }  # before the bench, which takes over the runner
    bench = model.bench(bits, seed, rng)

    def drafter(request):
        known = expected.get(request.prompt_ids)
        if not request.max_draft_tokens:
            return None
        truth = [*request.prompt_ids, *(known.output_token_ids if known else ())]
        return HostileDrafter(DRAFTS[request.index % len(DRAFTS)], truth, VOCABULARY, request.index)

    bench.scheduler.speculation.prompt_lookup = drafter
    wanted = []
    doomed = []
    moved = []
    pending = rng.randrange(4, 8)
    idle = 0
    while pending or bench.scheduler.has_work or idle < 1:
        if pending and rng.random() < 0.8:
            pending -= 1
            if rng.random() < 0.3 and not model.is_hybrid:
                moved.append(submit_moved(bench, max(prompts, key=len), rng))
            wanted.append((submit_wanted(bench, prompt := rng.choice(prompts), rng), prompt))
            if rng.random() < 0.2:
                doomed.append(wanted[-1][0])
        if moved and rng.random() < 0.05:
            rng.choice(moved).cancel()
        if doomed and rng.random() < 0.15:
            doomed.pop().cancel()
        if rng.random() < 0.05:
            bench.manager.reset()
        if rng.random() < 0.5:
            bench.io_thread.pump(1)
        idle = 0 if bench.step() or bench.io_thread.pump(1) else idle + 1
    bench.run()
    results = [handle.result(0) for handle, _ in wanted]
    for result, (handle, prompt) in zip(results, wanted, strict=True):
        assert_begins(
            result,
            expected[tuple(prompt)],
            f"seed {seed}, request {handle.index}, {len(prompt)} tokens",
        )
    bench.assert_clean()
    found = sum((Counter(result.hit_tokens) for result in results), Counter())
    found["preemptions"] = bench.scheduler.num_preemptions
    found["drafted"] = sum(result.drafted_tokens for result in results)
    found["accepted"] = sum(result.accepted_tokens for result in results)
    found["moved"] = sum(handle.result(0).reused_span_tokens for handle in moved)
    return found


@pytest.fixture(scope="module", params=CHOSEN)
def kind(request):
    for package in packages_for(request.param, "int8"):
        pytest.importorskip(package)
    return request.param


@pytest.fixture(scope="module")
def machine(kind, tmp_path_factory):
    machine = machine_of(kind, "int8", tmp_path_factory.mktemp("schedules"))
    yield machine
    machine.close()


@pytest.mark.some(5)
def test_random_schedules_equal_uncached_single_runs(kind, machine, scale):
    found = Counter[str]()
    for first in range(0, scale(16, 1760), 16):
        model = Model(machine, first)
        for seed in range(first, first + 16):
            found += run_schedule(model, 10_000 * CHOSEN.index(kind) + seed)
    assert found["preemptions"] >= 1
    assert found["pool"] > 300
    assert found["shelf"] > 15
    assert found["drafted"] > found["accepted"] > 30
    assert found["moved"] > 10 or machine.states is not None
