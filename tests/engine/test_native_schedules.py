"""RELIABILITY 5 on the native runner: whatever happens around a request, its tokens and the log probabilities of prompt
and output are equal to the bit to those of an uncached run alone, for every width of the cache."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from helpers.engine.hand_mover import DictTier
from helpers.engine.hostile_drafts import KINDS, hostile
from helpers.engine.native_bench import BLOCK, ROOT, Bits, Machine, NativeBench
from helpers.models.gpt_oss_files import save_gpt_oss
from helpers.models.tiny_checkpoints import save_tiny_checkpoint
from kvboost_edge.config import GenerationMode, RecomputeStrategy
from kvboost_edge.engine.handle import RequestHandle
from kvboost_edge.engine.request import Request, SamplingParams
from kvboost_edge.engine.results import GenerationResult, TokenLogprobs
from kvboost_edge.errors import KVBoostError
from kvboost_edge.reuse.repair import Repair

ALL_BITS: tuple[Bits, ...] = ((16, 16), (8, 8), (8, 4), (4, 4))
BAD = 255  # in no prompt but the one that shall fail
NEW = 40
REPAIRS = [
    Repair(strategy=RecomputeStrategy.NONE),
    Repair(strategy=RecomputeStrategy.SELECTIVE, overlap=8),
    Repair(strategy=RecomputeStrategy.CACHEBLEND, overlap=0, ratio=0.5),
]
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 40, 48)


def _prompts() -> list[list[int]]:
    """Three stems, each cut at many places, each cut alone and with two tails: much to share and much to diverge."""
    rng = np.random.default_rng(5)
    stems = [rng.integers(0, BAD, 48).tolist() for _ in range(3)]
    tails = [rng.integers(0, BAD, length).tolist() for length in (3, 20)]
    return [stem[:length] + tail for stem in stems for length in LENGTHS for tail in ([], *tails)]


PROMPTS = _prompts()


def _params(number: int) -> SamplingParams:
    """How prompt `number` is sampled: half of them greedily, half at random with a seed of their own."""
    if number % 2:
        return SamplingParams(max_new_tokens=NEW, temperature=1.1, top_p=0.95, seed=number, logprobs=2)
    return SamplingParams(max_new_tokens=NEW, temperature=0.0, logprobs=2)


class Truth:
    """Each prompt alone and uncached, one token budget that takes it whole; computed when first asked for."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._known: dict[tuple[Bits, int], GenerationResult] = {}

    def __call__(self, bits: Bits, number: int) -> GenerationResult:
        if (bits, number) not in self._known:
            bench = NativeBench(self._machine, bits=bits, max_batch_tokens=512)
            params = dataclasses.replace(_params(number), prompt_logprobs=1)
            self._known[bits, number] = bench.generate(PROMPTS[number], params, mode=GenerationMode.BASELINE)
        return self._known[bits, number]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    directory = tmp_path_factory.mktemp("schedules")
    save_tiny_checkpoint("qwen3", directory, num_hidden_layers=2, hidden_size=48, intermediate_size=80)
    machine = Machine(directory)
    yield machine
    machine.close()


@pytest.fixture(scope="module")
def truth(machine: Machine) -> Truth:
    return Truth(machine)


def check(result: GenerationResult, expected: GenerationResult, where: str) -> None:
    """Everything generated so far is the beginning of what is expected, with `==` on every float."""
    count = result.generated_tokens
    assert result.output_token_ids == expected.output_token_ids[:count], where
    assert result.logprobs is not None
    assert expected.logprobs is not None
    assert result.logprobs == expected.logprobs[:count], where
    if result.prompt_logprobs is not None and expected.prompt_logprobs is not None:
        known: tuple[TokenLogprobs | None, ...] = result.prompt_logprobs
        assert known == expected.prompt_logprobs[: len(known)], where


def _whole(truth: Truth, bits: Bits, request: Request) -> list[int]:
    """Prompt and answer of a request, where it is one whose answer is known."""
    prompt = list(request.prompt_ids)
    if request.repair is not None or prompt not in PROMPTS:
        return prompt
    return [*prompt, *truth(bits, PROMPTS.index(prompt)).output_token_ids]


def run_schedule(machine: Machine, truth: Truth, seed: int, tiers: dict[Bits, DictTier]) -> tuple[int, Counter[str]]:
    """One random schedule; (preemptions, cached tokens by tier). Half of them find what those before kept, as after a
    restart."""
    rng = random.Random(seed)
    bits = ALL_BITS[seed % 2] if rng.random() < 0.8 else rng.choice(ALL_BITS[2:])
    family = rng.sample(range(len(PROMPTS)), 3)  # few prompts, so that some come again
    for number in family:  # before the bench: it takes the runner
        truth(bits, number)
    bench = NativeBench(
        machine,
        bits=bits,
        threads=1 + seed // 2 % 2,
        num_blocks=rng.choice((7, 7, 7, 24)),
        max_num_seqs=rng.choice((2, 3, 8)),
        max_batch_tokens=rng.choice((1, 7, 16, 33, 128, 128)),
        tiers=[tiers[bits]] if rng.random() < 0.5 else [],
    )
    bench.scheduler.speculation.drafter = hostile(
        lambda request: _whole(truth, bits, request), lambda request: KINDS[request.index % len(KINDS)], 256
    )
    wanted: list[tuple[RequestHandle, int]] = []
    doomed: list[RequestHandle] = []
    moved: list[RequestHandle] = []
    pending, idle = rng.randrange(3, 6), 0
    while pending or bench.scheduler.has_work or idle < 1:
        if pending and rng.random() < 0.6:
            pending -= 1
            number = rng.choice(family)
            if rng.random() < 0.3:  # company whose keys are at other positions
                head = [rng.randrange(BAD) for _ in range(rng.choice((1, 16, 23)))]
                params = SamplingParams(max_new_tokens=rng.choice((1, 9)), temperature=0.0)
                mode, repair = GenerationMode.CHUNK_KV_REUSE, rng.choice(REPAIRS)
                longest = max((PROMPTS[number] for number in family), key=len)
                tokens = [*head, *longest, rng.randrange(BAD)]
                drafts = {"max_draft_tokens": rng.choice((0, 31)), "always_drafts": True}
                moved.append(bench.submit(tokens, params, mode, repair=repair, **drafts))
            params = dataclasses.replace(
                _params(number),
                max_new_tokens=rng.choice((0, 1, 17, NEW, NEW)),
                prompt_logprobs=1 if rng.random() < 0.15 else None,
            )
            mode = GenerationMode.BASELINE if rng.random() < 0.1 else GenerationMode.PREFIX_CACHE
            drafts = {"max_draft_tokens": rng.choice((0, 3, 31)), "always_drafts": True}
            handle = bench.submit(PROMPTS[number], params, mode, priority=rng.choice((0, 0, 0, 1)), **drafts)
            wanted.append((handle, number))
            if rng.random() < 0.2:
                doomed.append(handle)
        if moved and rng.random() < 0.05:
            rng.choice(moved).cancel()
        if doomed and rng.random() < 0.15:
            doomed.pop().cancel()
        if rng.random() < 0.03:
            bench.manager.reset()
        if rng.random() < 0.5:
            bench.mover.pump(1)
        idle = 0 if bench.step() or bench.mover.pump(1) else idle + 1
    for handle, number in wanted:
        check(handle.result(0), truth(bits, number), f"seed {seed}, request {handle.index}, prompt {number}")
    bench.assert_clean()
    hits = sum((Counter(handle.result(0).hit_tokens) for handle, _ in wanted), Counter())
    hits["drafted"] = sum(handle.result(0).drafted_tokens for handle, _ in wanted)
    hits["accepted"] = sum(handle.result(0).accepted_tokens for handle, _ in wanted)
    hits["moved"] = sum(handle.result(0).reused_span_tokens for handle in moved)
    return bench.scheduler.num_preemptions, hits


@pytest.mark.parametrize("part", range(10))
def test_random_schedules_equal_uncached_single_runs(
    machine: Machine, truth: Truth, part: int, scale: Callable[[int, int], int]
) -> None:
    per_part = scale(30, 1000)
    tiers = {bits: DictTier(losses=0.1, seed=part) for bits in ALL_BITS}
    seeds = range(part * per_part, (part + 1) * per_part)
    outcomes = [run_schedule(machine, truth, seed, tiers) for seed in seeds]
    hits = sum((cached for _, cached in outcomes), Counter())
    assert sum(preemptions for preemptions, _ in outcomes) >= 3
    assert hits["pool"] > 500
    assert hits["shelf"] > 60
    assert hits["moved"] > 30
    assert hits["drafted"] > hits["accepted"] > 50


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_random_schedules_of_a_mixture_of_experts(
    family: str, tmp_path: Path, scale: Callable[[int, int], int]
) -> None:
    if family == "gpt_oss":  # windows, sinks and biases of experts on top
        save_gpt_oss(tmp_path, num_hidden_layers=2)
    else:
        save_tiny_checkpoint(family, tmp_path, num_hidden_layers=2, hidden_size=48)
    machine = Machine(tmp_path)
    truth, tiers = Truth(machine), {bits: DictTier(losses=0.1, seed=0) for bits in ALL_BITS}
    outcomes = [run_schedule(machine, truth, seed, tiers) for seed in range(scale(20, 200))]
    machine.close()
    hits = sum((cached for _, cached in outcomes), Counter())
    assert sum(preemptions for preemptions, _ in outcomes) >= 1
    assert hits["pool"] > 300
    assert hits["drafted"] > hits["accepted"] > 20


LONG = np.random.default_rng(11).integers(0, 256, 90).tolist()


def cold_logits(machine: Machine, bits: Bits, tokens: list[int]) -> np.ndarray:
    return NativeBench(machine, bits=bits, max_batch_tokens=512).logits(tokens)


@pytest.mark.parametrize("bits", ALL_BITS, ids=str)
@pytest.mark.parametrize("budget", [1, 2, 5, 15, 16, 17, 31, 64])
def test_any_chunking(machine: Machine, bits: Bits, budget: int) -> None:
    expected = cold_logits(machine, bits, LONG)
    bench = NativeBench(machine, bits=bits, max_batch_tokens=budget)
    np.testing.assert_array_equal(bench.logits(LONG), expected)


@pytest.mark.parametrize("bits", ALL_BITS, ids=str)
def test_prefix_hits_at_every_cut(machine: Machine, bits: Bits) -> None:
    expected = cold_logits(machine, bits, LONG)
    params = SamplingParams(max_new_tokens=0)
    for cut in (0, 1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 79, 80, 81, 89, 90):
        bench = NativeBench(machine, bits=bits, max_batch_tokens=64)
        bench.generate([*LONG[:cut], 299, 298], params)
        for start in (0, 40, 80, 89):
            np.testing.assert_array_equal(bench.logits(LONG, start), expected[start:])
        whole = bench.generate(LONG[:80], params)  # cached to its end
        assert whole.cached_tokens == (79 if bits == (16, 16) else 64)
        np.testing.assert_array_equal(bench.logits(LONG[:80], 79), expected[79:80])
        bench.assert_clean()


@pytest.mark.parametrize("bits", ALL_BITS, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_alone_and_in_a_batch(machine: Machine, truth: Truth, bits: Bits, threads: int) -> None:
    numbers = [0, 7, 12, 30, 44, 45, 62, 80]
    bench = NativeBench(machine, bits=bits, threads=threads, max_batch_tokens=100)
    handles = [bench.submit(PROMPTS[number], _params(number)) for number in numbers]
    bench.run()
    for handle, number in zip(handles, numbers, strict=True):
        check(handle.result(0), truth(bits, number), f"prompt {number}")


@pytest.mark.parametrize("bits", ALL_BITS, ids=str)
def test_preempted_and_recomputed(machine: Machine, truth: Truth, bits: Bits) -> None:
    numbers = [2, 29, 56]
    bench = NativeBench(machine, bits=bits, num_blocks=7, max_num_seqs=3, max_batch_tokens=20)
    handles = [bench.submit(PROMPTS[number], _params(number)) for number in numbers]
    bench.run()
    assert bench.scheduler.num_preemptions > 0
    for handle, number in zip(handles, numbers, strict=True):
        check(handle.result(0), truth(bits, number), f"prompt {number}")
    bench.assert_clean()


@pytest.mark.parametrize("bits", ALL_BITS, ids=str)
def test_the_next_turn_reuses_generated_tokens(machine: Machine, bits: Bits) -> None:
    """KV that decoding made, one token at a time, equals what a prefill of the same text makes."""
    bench = NativeBench(machine, bits=bits, max_batch_tokens=64)
    first = bench.generate(LONG[:25], SamplingParams(max_new_tokens=45, temperature=0.0))
    turn = [*LONG[:25], *first.output_token_ids, *LONG[60:80]]
    expected = cold_logits(machine, bits, turn)
    handle, rows = bench.submit_logits(turn, 69)
    bench.run()
    assert handle.result(0).cached_tokens == 64 // BLOCK * BLOCK
    np.testing.assert_array_equal(np.concatenate(rows), expected[69:])


@pytest.mark.parametrize("bits", ALL_BITS[1:], ids=str)
def test_no_buffer_of_an_open_block_is_lost(machine: Machine, bits: Bits) -> None:
    """Finished, cancelled and preempted requests give them back: with two buffers two sequences always run."""
    bench = NativeBench(machine, bits=bits, num_blocks=8, max_num_seqs=2, max_batch_tokens=24)
    for round_number in range(30):
        number = round_number % len(PROMPTS)
        handles = [bench.submit(PROMPTS[(number + i) % len(PROMPTS)], _params(0)) for i in range(3)]
        for _ in range(round_number % 9):
            bench.step()
        handles[round_number % 3].cancel()
        bench.run()
        assert all(handle.done for handle in handles)
        for handle in handles:
            handle.result(0)
    bench.assert_clean()


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A Llama whose token BAD, and no other, has first-layer keys beyond float16: stored, they are infinite."""
    directory = tmp_path_factory.mktemp("overflow")
    save_tiny_checkpoint("llama", directory, num_hidden_layers=2)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    embed, keys = tensors["model.embed_tokens.weight"], tensors["model.layers.0.self_attn.k_proj.weight"]
    embed[:, 0], keys[:, 0] = 0.0, 1e6
    embed[BAD, 0] = 1.0
    save_file(tensors, path, metadata={"format": "pt"})
    machine = Machine(directory)
    yield machine
    machine.close()


@pytest.mark.parametrize("bits", ALL_BITS[:3], ids=str)
def test_keys_that_are_not_finite_end_their_request_alone(overflowing: Machine, bits: Bits) -> None:
    """RELIABILITY 8: nothing of the request is published, and whoever shares the batch is not touched to the bit."""
    truth, prompt = Truth(overflowing), [7, 8, 9, BAD, *range(40)]
    bench = NativeBench(overflowing, bits=bits, max_batch_tokens=128)
    bad, good = bench.submit(prompt, _params(0)), bench.submit(PROMPTS[80], _params(80))
    bench.run()
    with pytest.raises(KVBoostError, match="NaN or infinite logits"):
        bad.result(0)
    assert bench.manager.peek([*prompt, 1], ROOT) == 0
    check(good.result(0), truth(bits, 80), "beside a request that failed")
    bench.assert_clean()


@pytest.mark.parametrize("bits", ALL_BITS[:2], ids=str)
@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_pass_that_fails_half_way_leaves_nothing_open(
    machine: Machine, truth: Truth, bits: Bits, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [truth(bits, number) for number in (26, 53, 80)]
    bench = NativeBench(machine, bits=bits, max_num_seqs=2, max_batch_tokens=24)
    runner: Any = bench.core._runner
    real = runner._run
    calls: list[int] = []

    def fail(*args: Any) -> None:
        real(*args)
        calls.append(len(calls))
        if len(calls) == 2 * at + 1:
            raise RuntimeError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_run", fail)
        handles = [bench.submit(PROMPTS[number], _params(number)) for number in (26, 53)]
        bench.run()
    assert any(isinstance(handle._error, RuntimeError) for handle in handles)
    for number, result in zip((26, 53, 80), expected, strict=True):
        check(bench.generate(PROMPTS[number], _params(number)), result, f"prompt {number}")
    bench.assert_clean()
