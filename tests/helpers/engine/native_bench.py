"""A tiny model on the native runner in an engine core that is stepped by hand, and the results of
each prompt alone.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from helpers.engine.fake_runner import fake_tokenizer
from helpers.engine.hand_io_thread import HandIOThread
from helpers.engine.requests import make_request
from kvboost_edge.backends.base import DEFAULT_NUM_OPEN
from kvboost_edge.backends.cpu import CPUBackend
from kvboost_edge.config import GenerationMode
from kvboost_edge.engine.core import EngineCore
from kvboost_edge.engine.handle import RequestHandle
from kvboost_edge.engine.offload.prefetch import PrefetchQueue
from kvboost_edge.engine.offload.tiering import Tiering
from kvboost_edge.engine.request.request import Request, SamplingParams
from kvboost_edge.engine.request.results import GenerationResult, TokenLogprobs
from kvboost_edge.engine.schedule.planners import Prefetcher
from kvboost_edge.engine.sequence_factory import Sequences, make_model_drafts, make_scheduler
from kvboost_edge.engine.spec_decode.draft_model import DraftParts
from kvboost_edge.kvcache.hashing import root_hash
from kvboost_edge.kvcache.manager import KVCacheManager
from kvboost_edge.kvcache.recurrent.snapshots import StateSizes
from kvboost_edge.models.assistant import AssistantFiles
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.runners.base import LoadOptions
from kvboost_edge.runners.native.mtp_head import load_mtp_head
from kvboost_edge.runners.native.runner import NativeRunner
from kvboost_edge.tiers.base import Tier

BLOCK = 16
ROOT = root_hash(model_fingerprint="tiny", kv_format="tiny")
Bits = tuple[int, int]
ALL_BITS: tuple[Bits, ...] = ((16, 16), (8, 8), (8, 4), (4, 4))
Floats = npt.NDArray[np.float32]


class Machine:
    """Runners and backends over one model directory, each made once.

    A schedule gets a new manager over a used pool, so that data left by earlier schedules is in its
    way. `states` is the default for benches that do not set it.
    """

    def __init__(
        self, directory: Path, weights: str = "int8", states: StateSizes | None = None
    ) -> None:
        self._directory = directory
        self._weights = weights
        self.states = states
        self._runners: dict[tuple[Bits, int], NativeRunner] = {}
        self._backends: dict[tuple[Bits, int, int, int, int, int], CPUBackend] = {}
        self._drafters: dict[tuple[Bits, int, int, int], DraftParts] = {}
        self._heads: dict[tuple[Bits, int, int, int], DraftParts] = {}
        self._assistants: list[NativeRunner] = []
        self._digest = hashlib.sha256(f"{directory} {weights}".encode()).digest()

    def parts(
        self, bits: Bits, threads: int, num_blocks: int, num_open: int, states: StateSizes | None
    ) -> tuple[NativeRunner, CPUBackend]:
        runner = self._runner(bits, threads)
        rooms = (0, 0) if states is None else (states.num_slots, states.num_draft_rows)
        key = (bits, threads, num_blocks, num_open, *rooms)
        if key not in self._backends:
            self._backends[key] = CPUBackend(
                runner.info.kv_spec,
                num_blocks,
                num_threads=threads,
                num_open=num_open,
                num_state_slots=rooms[0],
                num_draft_rows=rooms[1],
            )
        runner.bind(self._backends[key])
        return runner, self._backends[key]

    def _runner(self, bits: Bits, threads: int) -> NativeRunner:
        if (bits, threads) not in self._runners:
            self._runners[bits, threads] = NativeRunner.from_dir(
                self._directory, weights=self._weights, num_threads=threads, kv_bits=bits
            )
        return self._runners[bits, threads]

    def drafter(
        self,
        num_blocks: int,
        short_vocabulary: int = 0,
        *,
        bits: Bits = (16, 16),
        num_open: int = DEFAULT_NUM_OPEN,
    ) -> DraftParts:
        """Return the model as a draft model of an engine with `num_blocks` blocks and KV of these
        bits. It has a separate runner.
        """
        key = bits, num_open, num_blocks, short_vocabulary
        if key not in self._drafters:
            runner = NativeRunner.from_dir(
                self._directory,
                weights=self._weights,
                num_threads=1,
                kv_bits=bits,
                short_vocabulary=short_vocabulary,
            )
            backend = CPUBackend(runner.info.kv_spec, num_blocks, num_threads=1, num_open=num_open)
            runner.bind(backend)
            self._drafters[key] = DraftParts(runner, backend, self._digest, num_open)
        return self._drafters[key]

    def head(
        self, bits: Bits, threads: int, num_blocks: int, short_vocabulary: int = 0
    ) -> DraftParts:
        """Return the model's MTP head, for an engine with the runner of `parts`."""
        key = bits, threads, num_blocks, short_vocabulary
        if key not in self._heads:
            checkpoint = Checkpoint.open(self._directory)
            options = LoadOptions(self._weights, "auto", "cpu", threads, BLOCK, bits)
            options = options._replace(short_vocabulary=short_vocabulary)
            runner = load_mtp_head(checkpoint, self._runner(bits, threads), options)
            backend = CPUBackend(runner.info.kv_spec, num_blocks, num_threads=threads)
            runner.bind(backend)
            self._heads[key] = DraftParts(runner, backend, bytes(32))
        return self._heads[key]

    def assistant(
        self, path: Path, bits: Bits, num_blocks: int = 64, max_num_seqs: int = 8
    ) -> DraftParts:
        """An assistant of the model, for an engine of one thread with the pool of `parts`."""
        target = Checkpoint.open(self._directory)
        head = AssistantFiles(Checkpoint.open(path), target, self._weights)
        model, pool = self.parts(bits, 1, num_blocks, max_num_seqs + 1, None)
        options = LoadOptions(self._weights, "auto", "cpu", 1, BLOCK, bits)
        runner = load_mtp_head(head, model, options)
        runner.bind(pool)
        self._assistants.append(runner)
        return DraftParts(runner, pool, bytes(32))

    def close(self) -> None:
        for drafter in (*self._drafters.values(), *self._heads.values()):
            drafter.runner.close()
            drafter.backend.close()
        for runner in self._assistants:
            runner.close()
        for part in (*self._runners.values(), *self._backends.values()):
            part.close()


class NativeBench:
    """An engine core without its thread: tests submit requests and call `step`, which checks the
    invariants.
    """

    def __init__(
        self,
        machine: Machine,
        *,
        bits: Bits = (16, 16),
        threads: int = 1,
        num_blocks: int = 64,
        max_num_seqs: int = 8,
        max_batch_tokens: int = 64,
        tiers: Sequence[Tier] = (),
        states: StateSizes | None = None,
        drafter: DraftParts | None = None,
    ) -> None:
        states = machine.states if states is None else states
        runner, self.backend = machine.parts(bits, threads, num_blocks, max_num_seqs + 1, states)
        self.manager = KVCacheManager(
            num_blocks, BLOCK, whole_blocks=bits != (16, 16), state_sizes=states
        )
        self.io_thread = HandIOThread(
            tiers, self.backend.spec.bytes_per_block, self.backend.spec.bytes_per_state
        )
        loads = PrefetchQueue(self.manager, self.io_thread) if tiers else Prefetcher()
        self.scheduler, speculation = make_scheduler(
            self.manager,
            loads,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_batch_tokens,
            remembers=bool(tiers),
            closes_blocks=bits != (16, 16),
            models=make_model_drafts(drafter, self.manager, runner.info),
        )
        sequences = Sequences(fake_tokenizer(), speculation, runner.info.vocab_size, frozenset())
        self.core = EngineCore(runner, self.backend, self.scheduler, sequences, True)
        if tiers:
            kept = drafter if drafter is not None and drafter.has_kv else None
            self.core.use_tiers(Tiering(self.manager, self.backend, loads, self.io_thread, kept))
        self._num_requests = 0

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        mode: GenerationMode = GenerationMode.PREFIX_CACHE,
        **fields: Any,
    ) -> RequestHandle:
        return self.core.submit(self._request(prompt_ids, params, mode, fields))

    def submit_logits(
        self, token_ids: Sequence[int], start: int = 0
    ) -> tuple[RequestHandle, list[Floats]]:
        params = SamplingParams(max_new_tokens=0)
        fields = {"logits_start": start}
        return self.core.submit_logits(
            self._request(token_ids, params, GenerationMode.PREFIX_CACHE, fields)
        )

    def _request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        mode: GenerationMode,
        fields: dict[str, Any],
    ) -> Request:
        self._num_requests += 1
        count = params.max_new_tokens or 0
        return make_request(
            index=self._num_requests,
            prompt_ids=tuple(prompt_ids),
            params=params,
            mode=mode,
            max_tokens=len(prompt_ids) + count,
            seed=params.seed or 0,
            root=ROOT,
            prefill_only=count == 0,
            **fields,
        )

    def step(self) -> bool:
        worked = self.core.step()
        tables = [s.table for s in self.scheduler.running if s.table is not None]
        self.manager.check_invariants([*tables, *(load.table for load in self.scheduler.loads)])
        return worked

    def run(self, limit: int = 3000) -> None:
        """Step until no work is left and all blocks are saved to their tiers."""
        for _ in range(limit):
            if not self.step() and not self.io_thread.pump():
                self.core.tiering.save_more()
                if not self.io_thread.pump():
                    return
        raise AssertionError(f"not done after {limit} steps")

    def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, **fields: Any
    ) -> GenerationResult:
        handle = self.submit(prompt_ids, params, **fields)
        self.run()
        return handle.result(0)

    def logits(self, token_ids: Sequence[int], start: int = 0) -> Floats:
        handle, rows = self.submit_logits(token_ids, start)
        self.run()
        handle.result(0)
        return np.concatenate(rows)

    def assert_clean(self) -> None:
        assert self.manager.used_block_count == 0
        self.manager.check_invariants([])
        assert not self.core._live


def recorded_drafts(bench: NativeBench) -> list[tuple[list[int], list[int]]]:
    """Return a list that collects the known tokens and the draft of each sequence that drafts."""
    speculation = bench.scheduler.speculation
    complete = speculation.complete
    found = []

    def spy(work: Any, copies: Any, is_ending: Any) -> None:
        complete(work, copies, is_ending)
        for one in work:
            if one.num_drafted:
                found.append(
                    (list(one.sequence.token_ids), list(one.token_ids[-one.num_drafted :]))
                )

    speculation.complete = spy
    return found


def overlapping_answers(
    bench: NativeBench, seed: int, steps_between: int = 4, *, longest: int = 70, **fields: Any
) -> tuple[list[Any], dict[bytes, bytes]]:
    """Run six requests that overlap and share beginnings of at most `longest` tokens.

    Returns:
        Tokens and log probabilities of each request, and the KV of all published blocks by hash.
    """
    rng = random.Random(seed)
    stem = [rng.randrange(250) for _ in range(longest)]
    handles = []
    for number in range(6):
        drawn = {"temperature": 1.1, "top_p": 0.95, "seed": number} if number % 2 else {}
        params = SamplingParams(max_new_tokens=30, logprobs=2, **({"temperature": 0.0} | drawn))
        prompt = [*stem[: rng.randrange(1, longest + 1)], number]
        handles.append(bench.submit(prompt, params, **fields))
        for _ in range(steps_between):
            bench.step()
            bench.io_thread.pump(1)
    bench.run()
    bench.assert_clean()
    blocks = bench.manager.content.under(ROOT)
    kv = bench.backend.read_blocks(blocks)
    hashes = bench.manager.content.hashes(blocks)
    return (
        [(one.output_token_ids, one.logprobs) for one in (handle.result(0) for handle in handles)],
        {key: row.tobytes() for key, row in zip(hashes, kv, strict=True)},
    )


class Cold:
    """Uncached results of prompts alone, computed in one pass with one thread when first requested.

    Computing one takes the backend away from a bench in use: request it before making the bench, or
    after its last step.
    """

    def __init__(self, machine: Machine, bits: Bits) -> None:
        self._machine = machine
        self._bits = bits
        self._logits: dict[tuple[int, ...], Floats] = {}
        self._answers: dict[tuple[tuple[int, ...], str], GenerationResult] = {}

    def _bench(self) -> NativeBench:
        return NativeBench(self._machine, bits=self._bits, max_batch_tokens=512)

    def logits(self, token_ids: Sequence[int]) -> Floats:
        """Return the logits of every token, after checking that all are finite."""
        key = tuple(token_ids)
        if key not in self._logits:
            self._logits[key] = self._bench().logits(token_ids)
            assert np.isfinite(self._logits[key]).all()
        return self._logits[key]

    def answer(self, prompt_ids: Sequence[int], params: SamplingParams) -> GenerationResult:
        key = tuple(prompt_ids), repr(params)
        if key not in self._answers:
            self._answers[key] = self._bench().generate(
                prompt_ids, params, mode=GenerationMode.BASELINE
            )
        return self._answers[key]


def assert_begins(result: GenerationResult, expected: GenerationResult, where: str) -> None:
    """Assert that everything generated so far is the beginning of the expected result, with `==` on
    every float.
    """
    count = result.generated_tokens
    assert result.output_token_ids == expected.output_token_ids[:count], where
    assert result.logprobs is not None
    assert expected.logprobs is not None
    assert result.logprobs == expected.logprobs[:count], where
    if result.prompt_logprobs is not None and expected.prompt_logprobs is not None:
        known: tuple[TokenLogprobs | None, ...] = result.prompt_logprobs
        assert known == expected.prompt_logprobs[: len(known)], where
