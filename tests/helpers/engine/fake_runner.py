"""A runner without a model: the next token is a hash of the tokens read back through the block
table.

Every slot of the fake pool stores (token id, position). The logits of a row hash all tokens that
the row would attend to, and a slot that is poisoned, stale or at a wrong position raises. Every
bookkeeping error therefore shows as an exception or as tokens other than those that
`expected_tokens` computes from the prompt alone.
"""

from __future__ import annotations

import functools
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from helpers.engine.hand_io_thread import HandIOThread
from helpers.engine.requests import make_request
from kvboost_edge.backends.base import (
    AttentionParams,
    Backend,
    BackendInfo,
    BatchLayout,
    KVSpec,
    LayerKVSpec,
)
from kvboost_edge.backends.open_blocks import OpenBlocks
from kvboost_edge.config import EngineConfig, GenerationMode
from kvboost_edge.engine.build import EngineParts
from kvboost_edge.engine.core import EngineCore
from kvboost_edge.engine.engine import CPUPagedEngine
from kvboost_edge.engine.handle import RequestHandle
from kvboost_edge.engine.memory.report import MemoryReport
from kvboost_edge.engine.offload.prefetch import PrefetchQueue
from kvboost_edge.engine.offload.tiering import Tiering
from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.engine.request.results import GenerationResult
from kvboost_edge.engine.schedule.planners import Prefetcher
from kvboost_edge.engine.sequence_factory import Sequences, make_model_drafts, make_scheduler
from kvboost_edge.kvcache.block_table import CopyOp
from kvboost_edge.kvcache.eviction.policy import TenantFloors
from kvboost_edge.kvcache.hashing import narrowed_root, root_hash
from kvboost_edge.kvcache.manager import KVCacheManager
from kvboost_edge.reuse.recompute import Repair
from kvboost_edge.runners.base import ForwardBatch, RunnerInfo, StoredKeys
from kvboost_edge.segments import Segment
from kvboost_edge.text.chat_template import ChatTemplate
from kvboost_edge.text.tokenizer import Tokenizer
from kvboost_edge.text.turns.formats import TurnFormat
from kvboost_edge.tiers.base import Tier

VOCAB_SIZE = 260
EOS_ID = 259
CONTEXT = 400
POISON = -7
ROOT = root_hash(model_fingerprint="fake", kv_format="fake")


def token_logits(token_ids: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Return the logits [VOCAB_SIZE] after these tokens, a pure function of them. The array is
    read-only.
    """
    return _logits(zlib.crc32(np.asarray(token_ids, "<i8").tobytes()))


@functools.lru_cache(1 << 14)
def _logits(seed: int) -> npt.NDArray[np.float32]:
    logits = np.random.default_rng(seed).normal(0.0, 3.0, VOCAB_SIZE).astype(np.float32)
    logits[EOS_ID] -= 6.0  # rare, so that outputs have some length
    logits.flags.writeable = False
    return logits


def expected_tokens(
    prompt_ids: Sequence[int], max_new_tokens: int, stop_ids: frozenset[int] = frozenset()
) -> list[int]:
    """Compute the greedy output without an engine."""
    ids = list(prompt_ids)
    for _ in range(max_new_tokens):
        ids.append(int(np.argmax(token_logits(ids))))
        if ids[-1] in stop_ids:
            break
    return ids[len(prompt_ids) :]


class _OpenSpec(KVSpec):
    """Spec of a pool with open blocks, in which full blocks have the same bytes as open ones."""

    is_quantized = True

    @property
    def bytes_per_block(self) -> int:
        return self._bytes_as_stored


class FakeBackend:
    """Backend that stores token ids and positions instead of KV.

    Args:
        num_open: number of blocks that may be partly written at a time, as in a quantized pool, or
            None. Nothing is quantized.
    """

    name = "fake"
    array_kind = "numpy"
    device = "cpu"
    states: Any = None

    def __init__(self, num_blocks: int, block_size: int, num_open: int | None = None) -> None:
        self._open = None if num_open is None else OpenBlocks(num_open, block_size)
        spec = KVSpec if num_open is None else _OpenSpec
        # 8 bytes a token: its id and its position
        self.spec = spec((LayerKVSpec(1, 1),), block_size, "float32")
        self.num_blocks = num_blocks
        self.tokens, self.positions = (
            np.full((num_blocks, block_size), POISON, np.int64) for _ in range(2)
        )
        self.closed = False

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.spec.bytes_per_block

    def describe(self) -> BackendInfo:
        return BackendInfo(self.name, self.device)

    def prepare(self, layout: BatchLayout) -> BatchLayout:
        if self._open is not None:
            self._open.plan(layout)
        return layout

    def copy_blocks(self, ops: Sequence[CopyOp]) -> None:
        for op in ops:
            if self._open is not None:
                self._open.copied(op.src, op.dst)
            self.tokens[op.dst] = self.tokens[op.src]
            self.positions[op.dst] = self.positions[op.src]

    def write_kv(self, layer: int, keys: Any, values: Any, batch: BatchLayout) -> None:
        self.tokens.reshape(-1)[batch.slot_mapping] = keys
        self.positions.reshape(-1)[batch.slot_mapping] = values

    def attention(
        self, layer: int, queries: Any, batch: Any, params: AttentionParams
    ) -> tuple[Any, Any]:
        raise AssertionError("the fake runner reads the pool itself")

    def read_blocks(self, block_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
        self._check_full(block_ids)
        both = np.stack(
            [self.tokens[list(block_ids)], self.positions[list(block_ids)]], axis=1
        ).astype("<i4")
        return both.reshape(len(block_ids), -1).view(np.uint8)

    def write_blocks(self, block_ids: Sequence[int], data: npt.NDArray[np.uint8]) -> None:
        self._check_full(block_ids)
        both = data.view("<i4").reshape(len(block_ids), 2, -1)
        self.tokens[list(block_ids)] = both[:, 0]
        self.positions[list(block_ids)] = both[:, 1]

    def poison_blocks(self, block_ids: Sequence[int]) -> None:
        self.tokens[list(block_ids)] = POISON

    def release_blocks(self, block_ids: Sequence[int]) -> None:
        if self._open is not None:
            self._open.release(block_ids)

    def _check_full(self, block_ids: Sequence[int]) -> None:
        if self._open is not None:
            self._open.check_full(block_ids)

    def checksum_blocks(self, block_ids: Sequence[int]) -> list[int]:
        return [
            zlib.crc32(self.tokens[b].tobytes() + self.positions[b].tobytes()) for b in block_ids
        ]

    def close(self) -> None:
        self.closed = True


class FakeRunner:
    """Runner that hashes the tokens of a `FakeBackend`.

    Attributes:
        on_forward: called with the batch before each pass; it may raise or wait.
        computed: number of computed tokens.
        batches: number of sequences in each pass.
        expected: function that computes the greedy output without an engine.
    """

    expected = staticmethod(expected_tokens)

    def __init__(self, backend: FakeBackend, max_context: int = CONTEXT) -> None:
        self.info = RunnerInfo(
            "fake", "fake", "float32", VOCAB_SIZE, max_context, 1000, backend.spec
        )
        self.backend = backend
        self.moved_keys_refusal: str | None = None
        self.on_forward: Callable[[ForwardBatch], None] | None = None
        self.nan_for: set[int] = set()  # a last token in this set gives NaN logits
        self.computed = self.probed = self.asked = 0
        self.batches: list[int] = []
        self.closed = False

    def bind(self, backend: Backend) -> None:
        raise AssertionError("the fake runner is bound at construction")

    def forward(self, batch: ForwardBatch) -> npt.NDArray[np.float32]:
        backend = self.backend
        layout = backend.prepare(batch.layout)
        if self.on_forward is not None:
            self.on_forward(batch)
        backend.write_kv(0, batch.token_ids, batch.positions, layout)
        self.computed += len(batch.token_ids)
        self.batches.append(len(layout.seq_lens))
        self._put_states(batch)
        rows = [self._row(batch, int(row)) for row in batch.logit_rows]
        return np.stack(rows) if rows else np.empty((0, VOCAB_SIZE), np.float32)

    def _put_states(self, batch: ForwardBatch) -> None:
        """Write hidden states that encode the token and its position and are never 0."""
        rows = batch.hidden_state_rows
        if len(rows):
            batch.hidden_states[:] = 1 + np.stack([batch.token_ids, batch.positions], axis=1)[rows]

    def deviations(
        self, batch: ForwardBatch, rows: npt.NDArray[np.int64], slots: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float32]:
        """Return a number for each token, after checking that its slot stores this token and that
        all tokens before it are stored.
        """
        self._look(batch)
        assert (self.backend.tokens.reshape(-1)[slots] == batch.token_ids[rows]).all()
        return np.random.default_rng(len(slots)).random(len(rows), dtype=np.float32)

    def masses(
        self, batch: ForwardBatch, rows: npt.NDArray[np.int64], stored: StoredKeys
    ) -> npt.NDArray[np.float32]:
        """Return a number for each stored key after the same checks, 0 without query rows."""
        self._look(batch)
        positions = self.backend.positions.reshape(-1)[stored.slots]
        assert (positions + stored.deltas == stored.positions).all()
        assert len(rows) == 0 or batch.positions[rows].min() > stored.positions.max()
        self.asked += len(rows)
        return len(rows) * np.random.default_rng(len(stored.slots)).random(
            len(stored.slots), dtype=np.float32
        )

    def _look(self, batch: ForwardBatch) -> None:
        """Store the tokens of the batch, and check that all tokens before them are stored."""
        backend = self.backend
        layout = batch.layout
        backend.write_kv(0, batch.token_ids, batch.positions, layout)
        for sequence, length in enumerate(layout.seq_lens.tolist()):
            tokens, positions = self._read(layout, sequence, length)
            assert (tokens != POISON).all()
            assert (positions == np.arange(length)).all()
        self.probed += len(batch.token_ids)

    def _row(self, batch: ForwardBatch, row: int) -> npt.NDArray[np.float32]:
        layout = batch.layout
        sequence = int(np.searchsorted(layout.cu_seqlens_q, row, side="right")) - 1
        _, stop = layout.cu_seqlens_q[sequence : sequence + 2]
        length = int(layout.seq_lens[sequence]) - (int(stop) - row) + 1
        tokens, positions = self._read(layout, sequence, length)
        assert (tokens != POISON).all(), "the runner read memory that was never written"
        assert (positions == np.arange(length)).all(), "a slot holds a token of another position"
        assert batch.positions[row] == length - 1
        if int(tokens[-1]) in self.nan_for:
            return np.full(VOCAB_SIZE, np.nan, np.float32)
        return self._logits(tokens)

    def _logits(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        return token_logits(tokens)

    def _read(self, layout: BatchLayout, sequence: int, length: int) -> tuple[Any, Any]:
        """Return the tokens and positions [length] of a sequence. Tokens stored at other positions
        are shifted to those at which they are used.
        """
        size = self.backend.spec.block_size
        tokens = np.full(length, POISON)
        positions = np.full(length, POISON)
        rows = [[sequence, 0, 0, 0, 0]] if layout.segments is None else layout.segments.tolist()
        parts = [part for part in (Segment(*row) for row in rows) if part.sequence == sequence]
        for part, end in zip(
            parts, [*(other.valid_from for other in parts[1:]), length], strict=True
        ):
            slots = np.arange(part.valid_from, min(end, length)) - part.first_position
            blocks = layout.block_tables[sequence][part.first_index + slots // size]
            assert (blocks >= 0).all(), "a block of the sequence is missing from its table"
            tokens[part.valid_from : end] = self.backend.tokens[blocks, slots % size]
            positions[part.valid_from : end] = (
                self.backend.positions[blocks, slots % size] + part.delta
            )
        return tokens, positions

    def close(self) -> None:
        self.closed = True


_SHARED: dict[Any, Any] = {}


class FakeTokenizer(Tokenizer):
    """A tokenizer for tests, which make hundreds of each kind. A chat template is compiled and
    examined only for the first one.
    """

    def _shared(self, name: str, make: Callable[[], Any]) -> Any:
        key = name, self.chat_template, self.codec.special_texts()[0]
        if key not in _SHARED:
            _SHARED[key] = make()
        return _SHARED[key]

    @functools.cached_property
    def turn_format(self) -> TurnFormat:
        return self._shared("turn_format", lambda: Tokenizer.turn_format.func(self))

    @functools.cached_property
    def _compiled(self) -> ChatTemplate | str:
        return self._shared("_compiled", lambda: Tokenizer._compiled.func(self))


def fake_tokenizer() -> Tokenizer:
    """Make a tokenizer in which tokens 0..255 are bytes in the alphabet's order. Later tokens are
    special and have no text in answers.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([f"<|special {number}|>" for number in range(256, VOCAB_SIZE)])
    return FakeTokenizer.from_transformers(raw)


def fake_parts(
    num_blocks: int = 64,
    block_size: int = 16,
    max_context: int = CONTEXT,
    max_num_seqs: int | None = None,
    max_pinned_blocks: int | None = None,
    tiers: Sequence[Tier] = (),
) -> EngineParts:
    """Make all parts of an engine around a `FakeRunner`."""
    backend = FakeBackend(num_blocks, block_size)
    return EngineParts(
        runner=FakeRunner(backend, max_context),
        backend=backend,
        manager=KVCacheManager(
            num_blocks, block_size, policy=TenantFloors, max_pinned_blocks=max_pinned_blocks
        ),
        tokenizer=fake_tokenizer(),
        eos_token_ids=frozenset({EOS_ID}),
        root=ROOT,
        identity=ROOT,
        memory_report=MemoryReport(1000, backend.pool_bytes),
        backend_reason="a test",
        max_num_seqs=max_num_seqs or 16,
        tiers=tuple(tiers),
    )


def fake_engine(
    num_blocks: int = 64, max_context: int = CONTEXT, *, tiers: Sequence[Tier] = (), **options: Any
) -> CPUPagedEngine:
    """Start an engine around a `FakeRunner`, with debug checks on and the reuse gate off by
    default. The caller closes it.
    """
    # A test may hold a pass for any time, which must not change the size of the next one.
    usual = {"debug_checks": True, "reuse_gate": "off", "target_tpot": 0.0}
    config = EngineConfig.from_options(**{**usual, **options})

    def build(chosen: EngineConfig) -> EngineParts:
        return fake_parts(
            chosen.num_blocks or num_blocks,
            chosen.block_size,
            max_context,
            chosen.max_num_seqs,
            chosen.max_pinned_blocks,
            tiers if chosen is config else (),
        )

    return CPUPagedEngine._built_by(build, config)


def runner_of(engine: CPUPagedEngine) -> FakeRunner:
    runner = engine._parts.runner
    assert isinstance(runner, FakeRunner)
    return runner


class Bench:
    """An engine core without its thread: tests submit requests and call `step`, which checks the
    invariants each time.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        *,
        max_num_seqs: int = 16,
        max_batch_tokens: int = 64,
        target_tpot: float | None = 0.0,
        debug_checks: bool = True,
        tiers: Sequence[Tier] = (),
        parts: EngineParts | None = None,
    ) -> None:
        self.parts = parts or fake_parts(num_blocks)
        self.manager = self.parts.manager
        self.runner = self.parts.runner
        self.io_thread = HandIOThread(
            tiers, self.parts.backend.spec.bytes_per_block, self.parts.backend.spec.bytes_per_state
        )
        loads = PrefetchQueue(self.manager, self.io_thread) if tiers else Prefetcher()
        self.scheduler, speculation = make_scheduler(
            self.manager,
            loads,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_batch_tokens,
            remembers=bool(tiers),
            target_tpot=target_tpot,
            models=make_model_drafts(self.parts.drafter, self.manager, self.runner.info),
        )
        sequences = Sequences(
            self.parts.tokenizer, speculation, VOCAB_SIZE, self.parts.eos_token_ids
        )
        self.core = EngineCore(
            self.parts.runner, self.parts.backend, self.scheduler, sequences, debug_checks
        )
        if tiers:
            drafter = self.parts.drafter
            kept = drafter if drafter is not None and drafter.has_kv else None
            self.core.use_tiers(
                Tiering(self.manager, self.parts.backend, loads, self.io_thread, kept)
            )
        self.num_requests = 0
        self._asked: dict[
            int, tuple[Any, ...]
        ] = {}  # data that `answer` needs for a request, by its index

    def submit(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int = 8,
        mode: GenerationMode = GenerationMode.PREFIX_CACHE,
        stop_ids: frozenset[int] = frozenset(),
        *,
        priority: int = 0,
        deadline: float | None = None,
        tenant: str = "",
        weight: float = 1.0,
        pin: bool = False,
        ttl: float | None = None,
        terms: Mapping[str, Any] | None = None,
        repair: Repair | None = None,
        **options: Any,
    ) -> RequestHandle:
        """Submit a request.

        Args:
            terms: other fields of `Request` and `Terms`, such as cache_key.
        """
        params = SamplingParams(max_new_tokens=max_new_tokens, **options)
        self.num_requests += 1
        self._asked[self.num_requests] = prompt_ids, max_new_tokens, stop_ids
        root = narrowed_root(ROOT, "tenant", tenant) if tenant else ROOT
        request = make_request(
            index=self.num_requests,
            prompt_ids=tuple(prompt_ids),
            params=params,
            mode=mode,
            max_tokens=len(prompt_ids) + max_new_tokens,
            seed=params.seed or 0,
            stop_ids=stop_ids,
            tenant=tenant.encode(),
            weight=weight,
            priority=priority,
            deadline=deadline,
            pin=pin,
            ttl=ttl,
            repair=repair,
            **{"root": root, **(terms or {})},
        )
        return self.core.submit(request)

    def ask(
        self, prompt_ids: Sequence[int], max_new_tokens: int = 8, *args: Any, **options: Any
    ) -> GenerationResult:
        """Run one more request to its end. The arguments are those of `submit`, the result that of
        `answer`.
        """
        handle = self.submit(prompt_ids, max_new_tokens, *args, **options)
        self.run()
        return self.answer(handle)

    def answer(self, handle: RequestHandle) -> GenerationResult:
        """Return the result of a greedy request, after checking that its tokens are the expected
        ones, or the first of them if it was cut short.
        """
        result = handle.result(0)
        tokens = list(result.output_token_ids)
        expected = self.runner.expected(*self._asked[handle.index])
        is_whole = result.finish_reason not in ("cancelled", "timeout")
        assert tokens == (expected if is_whole else expected[: len(tokens)]), (
            f"request {handle.index}"
        )
        return result

    def submit_logits(
        self, token_ids: Sequence[int], start: int = 0, *, terms: Mapping[str, Any] | None = None
    ) -> tuple[RequestHandle, list[npt.NDArray[np.float32]]]:
        """Submit a request for the logits of token_ids[start:]. The list holds them when the handle
        is done.

        Args:
            terms: as for `submit`.
        """
        self.num_requests += 1
        request = make_request(
            index=self.num_requests,
            prompt_ids=tuple(token_ids),
            params=SamplingParams(),
            max_tokens=len(token_ids),
            logits_start=start,
            root=ROOT,
            **(terms or {}),
        )
        return self.core.submit_logits(request)

    def step(self) -> bool:
        worked = self.core.step()
        self.check()
        return worked

    def check(self) -> None:
        running = self.scheduler.running
        loads = self.scheduler.loads
        tables = [s.table for s in running if s.table is not None] + [load.table for load in loads]
        self.manager.check_invariants(tables)
        assert all(loads.of(load.sequence) is load for load in loads)
        assert all(s.table is None for s in self.scheduler.waiting)
        assert [s.rank for s in running] == sorted(s.rank for s in running)

    def run(self, limit: int = 10_000) -> int:
        """Step until no work is left and all blocks are saved to their tiers. Return the number of
        steps.
        """
        for count in range(limit):
            if not self.step() and not self.io_thread.pump():
                self.core.tiering.save_more()
                if not self.io_thread.pump():
                    return count
        raise AssertionError(f"not done after {limit} steps")


def hold_passes(engine: CPUPagedEngine, go: threading.Event) -> None:
    """Make every forward pass wait until `go` is set."""

    def hold(batch: ForwardBatch) -> None:
        assert go.wait(30)

    runner_of(engine).on_forward = hold


def checked(
    engine: CPUPagedEngine, prompt: Sequence[int], max_new_tokens: int, **options: Any
) -> GenerationResult:
    """Run a greedy request, check that its tokens are the expected ones, and return the result."""
    result = engine.generate(prompt, max_new_tokens, **options)
    assert list(result.output_token_ids) == expected_tokens(prompt, max_new_tokens)
    return result


CANARY = list(range(100, 140))


def assert_clean(engine: CPUPagedEngine) -> None:
    """Assert that every block was returned and that a canary prompt gives its known output."""
    stats = engine.paged_stats()
    assert (stats["used_blocks"], stats["num_running"], stats["num_waiting"]) == (0, 0, 0)
    with engine._core.reading():
        engine._parts.manager.check_invariants([])
    assert not engine._core._live
    checked(engine, CANARY, 9)


def wait_until_idle(engine: CPUPagedEngine) -> None:
    """Wait until earlier cancellations are done, by running one short request after them."""
    engine.generate([1], max_new_tokens=1)
