"""Hybrid models on the native runner: whatever happens around a request, its logits, tokens and log probabilities are
equal to the bit to those of one uncached pass, for every width of the cache."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from engine.test_native_schedules import check
from helpers.engine.hand_mover import DictTier
from helpers.engine.hostile_drafts import KINDS, CutDrafter, hostile
from helpers.engine.native_bench import Bits, Machine, NativeBench
from helpers.models.tiny_models import save_tiny_model
from kvboost_edge.config import GenerationMode
from kvboost_edge.engine.handle import RequestHandle
from kvboost_edge.engine.request import Request, SamplingParams
from kvboost_edge.engine.results import GenerationResult
from kvboost_edge.errors import KVBoostError
from kvboost_edge.kvcache.states.tables import StateSizes

ALL_BITS: tuple[Bits, ...] = ((16, 16), (8, 8), (8, 4), (4, 4))
FAMILIES = ("lfm2", "qwen3_5_text", "granitemoehybrid-experts", "nemotron_h-moe", "falcon_h1")
LONG = np.random.default_rng(11).integers(3, 250, 90).tolist()
STATES = StateSizes(24, num_draft_rows=31)
VOCABULARY = 256
NEW = 24


@pytest.fixture(scope="module", params=FAMILIES)
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    directory = tmp_path_factory.mktemp(request.param)
    save_tiny_model(request.param, directory)
    machine = Machine(directory)
    yield machine
    machine.close()


def cold_logits(machine: Machine, bits: Bits, tokens: list[int]) -> npt.NDArray[np.float32]:
    return NativeBench(machine, bits=bits, max_batch_tokens=512, states=STATES).logits(tokens)


@pytest.mark.parametrize("bits", ALL_BITS, ids=str)
def test_any_chunking(machine: Machine, bits: Bits) -> None:
    expected = cold_logits(machine, bits, LONG)
    assert np.isfinite(expected).all()
    for budget in (1, 2, 5, 15, 16, 17, 31, 64):
        bench = NativeBench(machine, bits=bits, max_batch_tokens=budget, states=STATES)
        np.testing.assert_array_equal(bench.logits(LONG), expected)
        bench.assert_clean()


@pytest.mark.parametrize("bits", ALL_BITS, ids=str)
def test_snapshots_at_every_cut(machine: Machine, bits: Bits) -> None:
    expected = cold_logits(machine, bits, LONG)
    params = SamplingParams(max_new_tokens=0)
    for cut in (0, 1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 79, 80, 81, 89, 90):
        for every_block in (False, True):
            sizes = StateSizes(24, every_block=every_block, num_draft_rows=31)
            bench = NativeBench(machine, bits=bits, max_batch_tokens=64, states=sizes)
            bench.generate([*LONG[:cut], 251, 252], params)
            for start in (0, 40, 80, 89):
                np.testing.assert_array_equal(bench.logits(LONG, start), expected[start:])
            assert bench.generate(LONG[:80], params).matched_tokens == 64
            assert bench.generate(LONG[:80], params).cached_tokens == 64, "the first one kept the state"
            np.testing.assert_array_equal(bench.logits(LONG[:80], 79), expected[79:80])
            bench.assert_clean()


@pytest.mark.parametrize("bits", ALL_BITS, ids=str)
def test_the_next_turn_goes_on_from_what_decoding_left(machine: Machine, bits: Bits) -> None:
    bench = NativeBench(machine, bits=bits, max_batch_tokens=64, states=STATES)
    first = bench.generate(LONG[:25], SamplingParams(max_new_tokens=45, temperature=0.0))
    turn = [*LONG[:25], *first.output_token_ids, *LONG[60:80]]
    expected = cold_logits(machine, bits, turn)
    bench = NativeBench(machine, bits=bits, max_batch_tokens=64, states=STATES)
    bench.generate(LONG[:25], SamplingParams(max_new_tokens=45, temperature=0.0))
    handle, rows = bench.submit_logits(turn, 69)
    bench.run()
    assert handle.result(0).cached_tokens == 64
    np.testing.assert_array_equal(np.concatenate(rows), expected[69:])


NUM_DRAFTS = 6


@pytest.mark.parametrize(
    ("bits", "every_block"), [((16, 16), True), *((each, each[1] == 4) for each in ALL_BITS)], ids=str
)
def test_drafts_that_are_right_up_to_any_cut(machine: Machine, bits: Bits, every_block: bool) -> None:
    """Tokens and log probabilities of two answers at once, one of them sampled, and what is kept of them."""
    prompts = [LONG[:25], LONG[40:70]]
    answers = [
        SamplingParams(max_new_tokens=NEW, temperature=0.0, logprobs=2),
        SamplingParams(max_new_tokens=NEW, temperature=1.1, top_p=0.95, seed=5, logprobs=2),
    ]
    sizes = StateSizes(24, every_block=every_block, num_draft_rows=2 * NUM_DRAFTS)
    bench = NativeBench(machine, bits=bits, states=sizes)
    alone = [bench.generate(*each, mode=GenerationMode.BASELINE) for each in zip(prompts, answers, strict=True)]
    wholes = [[*prompt, *one.output_token_ids] for prompt, one in zip(prompts, alone, strict=True)]
    expected = [cold_logits(machine, bits, [*whole, 7, 8]) for whole in wholes]
    for cut in range(NUM_DRAFTS + 1):
        bench = NativeBench(machine, bits=bits, states=sizes)
        drafters: list[CutDrafter] = []

        def drafter(request: Request, cut: int = cut, drafters: list[CutDrafter] = drafters) -> CutDrafter:
            right = cut if request.index == 1 else NUM_DRAFTS - cut
            drafters.append(CutDrafter(wholes[request.index - 1], right, NUM_DRAFTS, VOCABULARY))
            return drafters[-1]

        bench.scheduler.speculation.drafter = drafter  # type: ignore[method-assign]
        drafts = {"max_draft_tokens": NUM_DRAFTS, "always_drafts": True}
        handles = [bench.submit(*each, **drafts) for each in zip(prompts, answers, strict=True)]
        bench.run()
        for handle, one in zip(handles, alone, strict=True):
            check(handle.result(0), one, f"cut {cut}")
        for right, one in zip((cut, NUM_DRAFTS - cut), drafters, strict=True):
            assert all(accepted == min(right, drafted) for drafted, accepted in one.outcomes)
            assert max(accepted for _, accepted in one.outcomes) == right
        bench.scheduler.speculation.drafter = lambda request: None  # type: ignore[method-assign]
        for whole, logits in zip(wholes, expected, strict=True):
            handle, rows = bench.submit_logits([*whole, 7, 8], len(whole) - 1)
            bench.run()
            assert handle.result(0).cached_tokens == (len(whole) - 1) // 16 * 16
            np.testing.assert_array_equal(np.concatenate(rows), logits[len(whole) - 1 :])
        bench.assert_clean()


class Truth:
    """Each prompt alone and uncached, in one pass."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._known: dict[tuple[Bits, tuple[int, ...]], GenerationResult] = {}

    def __call__(self, bits: Bits, prompt: list[int]) -> GenerationResult:
        key = (bits, tuple(prompt))
        if key not in self._known:
            bench = NativeBench(self._machine, bits=bits, max_batch_tokens=512, states=STATES)
            self._known[key] = bench.generate(prompt, params_of(prompt), mode=GenerationMode.BASELINE)
        return self._known[key]


def params_of(prompt: list[int]) -> SamplingParams:
    """Half of the prompts are answered greedily."""
    drawn = {"temperature": 1.1, "top_p": 0.95, "seed": len(prompt)} if len(prompt) % 2 else {"temperature": 0.0}
    return SamplingParams(max_new_tokens=NEW, logprobs=2, **drawn)


PROMPTS = [
    stem[:length] + tail
    for stem in np.random.default_rng(7).integers(3, 250, (2, 48)).tolist()
    for length in (1, 16, 31, 33, 48)
    for tail in ([], [9, 8, 7], list(range(3, 23)))
]


def run_schedule(machine: Machine, truth: Truth, seed: int, tiers: dict[Bits, DictTier]) -> Counter[str]:
    """One random schedule, and what happened in it."""
    rng = random.Random(seed)
    bits = rng.choice(ALL_BITS)
    family = rng.sample(PROMPTS, 3)
    family += [[*one, *truth(bits, one).output_token_ids[: rng.randrange(NEW)], 5, 6] for one in family]
    for prompt in family:
        truth(bits, prompt)
    max_num_seqs = rng.choice((2, 3, 8))
    bench = NativeBench(
        machine,
        bits=bits,
        threads=1 + seed % 2,
        num_blocks=rng.choice((8, 9, 24)),
        max_num_seqs=max_num_seqs,
        max_batch_tokens=rng.choice((1, 7, 16, 33, 128, 128)),
        tiers=[tiers[bits]] if rng.random() < 0.4 else [],
        states=StateSizes(rng.choice((9, 12, 40)), rng.choice((16, 1024)), rng.random() < 0.3, rng.choice((5, 31))),
    )
    bench.scheduler.speculation.drafter = hostile(  # type: ignore[method-assign]
        lambda request: [*request.prompt_ids, *truth(bits, list(request.prompt_ids)).output_token_ids],
        lambda request: KINDS[request.index % len(KINDS)],
        VOCABULARY,
    )
    wanted: list[tuple[RequestHandle, list[int]]] = []
    doomed: list[RequestHandle] = []
    pending, idle = rng.randrange(3, 7), 0
    while pending or bench.scheduler.has_work or idle < 1:
        if pending and rng.random() < 0.5:
            pending -= 1
            prompt = rng.choice(family)
            params = dataclasses.replace(params_of(prompt), max_new_tokens=rng.choice((0, 1, 17, NEW, NEW)))
            mode = GenerationMode.BASELINE if rng.random() < 0.1 else GenerationMode.PREFIX_CACHE
            hints = (rng.randrange(len(prompt)),)
            drafts = {"max_draft_tokens": rng.choice((0, 3, 31)), "always_drafts": True}
            handle = bench.submit(prompt, params, mode, snapshot_hints=hints, **drafts)
            wanted.append((handle, prompt))
            if rng.random() < 0.2:
                doomed.append(handle)
        if doomed and rng.random() < 0.1:
            doomed.pop().cancel()
        if rng.random() < 0.03:
            bench.manager.reset()
        if rng.random() < 0.5:
            bench.mover.pump(1)
        idle = 0 if bench.step() or bench.mover.pump(1) else idle + 1
    bench.run()
    for handle, prompt in wanted:
        check(handle.result(0), truth(bits, prompt), f"seed {seed}, request {handle.index}")
    bench.assert_clean()
    found = sum((Counter(handle.result(0).hit_tokens) for handle, _ in wanted), Counter())
    found["preemptions"] = bench.scheduler.num_preemptions
    found["drafted"], found["accepted"] = (
        sum(getattr(handle.result(0), name) for handle, _ in wanted) for name in ("drafted_tokens", "accepted_tokens")
    )
    return found


def test_random_schedules_equal_uncached_single_runs(machine: Machine, scale: Callable[[int, int], int]) -> None:
    truth, tiers = Truth(machine), {bits: DictTier(losses=0.1, seed=1) for bits in ALL_BITS}
    found = sum((run_schedule(machine, truth, seed, tiers) for seed in range(scale(40, 1000))), Counter())
    assert found["preemptions"] >= 2
    assert found["pool"] > 500
    assert found["shelf"] > 30
    assert found["drafted"] > found["accepted"] > 100


def test_random_schedules_of_a_mixture_of_experts(tmp_path: Path, scale: Callable[[int, int], int]) -> None:
    machine = Machine(save_tiny_model("qwen3_5_moe_text", tmp_path))
    truth, tiers = Truth(machine), {bits: DictTier(losses=0.1, seed=2) for bits in ALL_BITS}
    found = sum((run_schedule(machine, truth, seed, tiers) for seed in range(scale(15, 200))), Counter())
    machine.close()
    assert found["pool"] > 200
    assert found["drafted"] > found["accepted"] > 40


def test_an_overflowing_state_ends_its_request_alone(machine: Machine) -> None:
    params = SamplingParams(max_new_tokens=20, temperature=0.0)
    expected = NativeBench(machine, states=STATES).generate(LONG[40:80], params)
    bench = NativeBench(machine, states=STATES)
    fine = bench.submit(LONG[:40], SamplingParams(max_new_tokens=4, temperature=0.0, logprobs=0))
    bench.step()
    doomed = bench.submit(LONG[40:80], params)
    bench.step()
    bench.step()
    assert bench.backend.states is not None
    assert bench.manager.states is not None
    (sequence,) = [one for one in bench.scheduler.running if one.index == doomed.index]
    slot = bench.manager.states._states[sequence.blocks._serial].slot
    bench.backend.states.poison([slot])
    bench.run()
    with pytest.raises(KVBoostError, match="NaN or infinite logits"):
        doomed.result(0)
    assert fine.result(0).generated_tokens == 4
    assert bench.generate(LONG[40:80], params).output_token_ids == expected.output_token_ids
