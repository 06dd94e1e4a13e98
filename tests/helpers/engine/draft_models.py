"""Draft models without weights that deliberately propose right, wrong or random tokens."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from helpers.engine.fake_hybrid import ZEROS, next_state, state_logits
from helpers.engine.fake_runner import (
    POISON,
    VOCAB_SIZE,
    Bench,
    FakeBackend,
    FakeRunner,
    token_logits,
)
from helpers.engine.model_kinds import PLAIN, ModelKind
from helpers.engine.native_bench import NativeBench
from helpers.random_ids import random_ids
from kvboost_edge.engine.spec_decode.draft_lengths import DraftProposal
from kvboost_edge.engine.spec_decode.draft_model import DraftParts
from kvboost_edge.engine.spec_decode.model_drafts import ModelDrafts
from kvboost_edge.engine.spec_decode.pass_costs import PassCosts
from kvboost_edge.engine.spec_decode.prompt_lookup import PromptLookup
from kvboost_edge.runners.base import ForwardBatch

DRAFT_KINDS = ("right", "wrong", "random", "one off")
Drafter = DraftParts | Callable[[FakeBackend], DraftParts]
MTP = "mtp"
"""A kind of drafter besides these: a head, which is right where no KV is missing."""


ASSISTANT = "assistant"
"""A kind of drafter that reads the engine's pool, and is always right."""


class FakeDraftRunner(FakeRunner):
    """A `FakeRunner` whose logits are those of the engine's model or of other tokens.

    Args:
        kind: "right"; "wrong" (each token is replaced by the next one in the vocabulary); "random";
            or "one off" (wrong after every third token).
        of: kind of the engine's model.
        vocab_size: size of its vocabulary, which may differ from the engine's.
        short_vocabulary: see `RunnerInfo`.

    Attributes:
        num_short: number of passes with the short vocabulary.
    """

    def __init__(
        self,
        backend: FakeBackend,
        kind: str = "right",
        *,
        of: ModelKind = PLAIN,
        vocab_size: int = VOCAB_SIZE,
        short_vocabulary: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(backend, **options)
        self.kind = kind
        self._of = of
        self.num_short = 0
        self.info = dataclasses.replace(
            self.info,
            vocab_size=vocab_size,
            weight_bytes=200,
            short_vocabulary=short_vocabulary,
        )

    def forward(self, batch: ForwardBatch) -> npt.NDArray[np.float32]:
        logits = super().forward(batch)
        if self.kind == "wrong":
            logits = np.roll(logits, 1, axis=1)
        elif self.kind == "one off":
            for place, row in enumerate(batch.logit_rows):
                if batch.positions[row] % 3 == 0:
                    logits[place] = np.roll(logits[place], 1)
        elif self.kind == "random":
            logits = np.random.default_rng(self.computed).normal(size=logits.shape)
        size = self.info.vocab_size
        padding = np.full((len(logits), max(0, size - VOCAB_SIZE)), 100.0)
        logits = np.hstack([logits[:, :size], padding]).astype(np.float32)
        if batch.is_short:
            self.num_short += 1
            assert 0 < self.info.short_vocabulary < size
            return logits[:, : self.info.short_vocabulary]
        return logits

    def _logits(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        if self._of is PLAIN:
            return token_logits(tokens)
        return state_logits(functools.reduce(next_state, tokens.tolist(), ZEROS), tokens)


class FakeHeadRunner(FakeDraftRunner):
    """A `FakeDraftRunner` that needs the hidden state of the token before each token, and reads
    zeros for an unknown one.

    Its sequences may begin at any block; it is right for those that begin at 0. `unknown` counts
    rows without a state.
    """

    def __init__(self, backend: FakeBackend, **options: Any) -> None:
        super().__init__(backend, **options)
        self.info = dataclasses.replace(self.info, joins_hidden_states=True, hidden_size=2)
        self.unknown = 0

    def forward(self, batch: ForwardBatch) -> npt.NDArray[np.float32]:
        logits = super().forward(batch)
        assert batch.joined is not None
        known = batch.joined.any(axis=1)
        self.unknown += np.count_nonzero(~known)
        assert (batch.joined[known, 1] == batch.positions[known]).all(), (
            "the draft model got the hidden state of another token"
        )
        starts = batch.layout.cu_seqlens_q
        for first, stop in itertools.pairwise(starts.tolist()):
            rows = np.arange(first + 1, stop)
            rows = rows[known[rows]]
            assert (batch.joined[rows, 0] == 1 + batch.token_ids[rows - 1]).all()
        return logits

    def _row(self, batch: ForwardBatch, row: int) -> npt.NDArray[np.float32]:
        layout = batch.layout
        sequence = int(np.searchsorted(layout.cu_seqlens_q, row, side="right")) - 1
        stop = int(layout.cu_seqlens_q[sequence + 1])
        length = int(layout.seq_lens[sequence]) - (stop - row) + 1
        tokens, positions = self._read(layout, sequence, length)
        first = int(batch.positions[row]) - length + 1
        assert first % self.backend.spec.block_size == 0
        assert (tokens != POISON).all(), "the runner read memory that was never written"
        assert (positions == np.arange(first, first + length)).all(), (
            "a slot holds a token of another position"
        )
        assert batch.joined is not None
        if length > 1 and batch.joined[row].any():
            assert batch.joined[row, 0] == 1 + tokens[-2], (
                "the draft model got the hidden state of another token"
            )
        return self._logits(tokens) if first == 0 else token_logits(tokens)


class FakeAssistantRunner(FakeDraftRunner):
    """A `FakeDraftRunner` that reads the engine's pool, stores nothing, and is always right.

    A row must have the state of the last computed token, or the runner's own state of the token
    drafted before. `unknown` counts rows without a state.
    """

    def __init__(self, backend: FakeBackend, **options: Any) -> None:
        super().__init__(backend, **options)
        self.info = dataclasses.replace(
            self.info, joins_hidden_states=True, borrows_kv=True, hidden_size=2
        )
        self.unknown = 0
        self._chains: list[list[int]] = []  # tokens after the computed ones, by own state

    def forward(self, batch: ForwardBatch) -> npt.NDArray[np.float32]:
        layout = batch.layout
        count = len(batch.token_ids)
        assert not layout.stores
        assert batch.joined is not None
        assert (np.diff(layout.cu_seqlens_q) == 1).all()
        assert batch.logit_rows.tolist() == batch.hidden_state_rows.tolist() == list(range(count))
        self.computed += count
        rows = []
        for row, (length, state) in enumerate(
            zip(layout.seq_lens.tolist(), batch.joined.tolist(), strict=True)
        ):
            if not any(state):
                self.unknown += 1
                rows.append(np.zeros(VOCAB_SIZE, np.float32))
                continue
            tokens, positions = self._read(layout, row, length)
            assert (tokens != POISON).all(), "memory that was never written was read"
            assert (positions == np.arange(length)).all(), "a token of another position"
            assert batch.positions[row] == length
            chain = []
            if state[1] < 0:
                chain = self._chains[int(state[0])]
            else:
                assert state == [1 + tokens[-1], length], "a state of another token"
            self._chains.append([*chain, int(batch.token_ids[row])])
            batch.hidden_states[row] = len(self._chains) - 1, -1
            rows.append(self._logits(np.array([*tokens.tolist(), *self._chains[-1]])))
        return np.stack(rows)


def fake_assistant(backend: FakeBackend, **options: Any) -> DraftParts:
    """Make an assistant that reads an engine's pool."""
    return DraftParts(FakeAssistantRunner(backend, **options), backend, bytes(32))


def fake_drafter(
    num_blocks: int, kind: str = "right", *, num_open: int | None = None, **options: Any
) -> Drafter:
    """Make a draft model for an engine with `num_blocks` blocks of 16 tokens. Its digest depends on
    the kind.

    Args:
        num_open: number of blocks that may be partly written, as in a quantized pool, or None.
        options: options of the runner.
    """
    if kind == ASSISTANT:
        return functools.partial(fake_assistant, **options)
    backend = FakeBackend(num_blocks, 16, num_open)
    digest = hashlib.sha256(kind.encode()).digest()
    made = FakeHeadRunner if kind == MTP else functools.partial(FakeDraftRunner, kind=kind)
    parts = DraftParts(made(backend, **options), backend, digest)
    return parts if num_open is None else parts._replace(num_open=num_open)


def gives_states(bench: Bench) -> None:
    """Make the runner of a bench return hidden states, which an MTP head needs."""
    bench.runner.info = dataclasses.replace(bench.runner.info, hidden_size=2)


def drafting_bench(
    kind: ModelKind,
    drafts: str = "right",
    num_blocks: int = 64,
    *,
    closes_blocks: bool = False,
    **options: Any,
) -> Bench:
    """Make a bench whose draft tokens come from a draft model and not from prompt lookup.

    Args:
        closes_blocks: whether the pools are used like quantized ones.
    """
    draft_options = {
        name: options.pop(name)
        for name in ("vocab_size", "max_context", "short_vocabulary")
        if name in options
    }
    if closes_blocks:
        draft_options["num_open"] = options.get("max_num_seqs", 16) + 1
    drafter = fake_drafter(num_blocks, drafts, of=kind, **draft_options)
    bench = kind.bench(num_blocks, drafter=drafter, **options)
    if closes_blocks:
        close_blocks(bench)
    if drafts in (MTP, ASSISTANT):
        gives_states(bench)
        draft_runner(bench).unknown = 0
    without_lookup(bench)
    with_typical_times(bench)
    draft_runner(bench).computed = draft_runner(bench).num_short = 0
    return bench


def close_blocks(bench: Bench) -> None:
    """Make a bench never rewrite full blocks, as if its pool were quantized."""
    bench.scheduler.speculation._closes_blocks = bench.manager._lookup.whole_blocks = True


def with_typical_times(bench: Bench | NativeBench) -> None:
    """Make draft lengths independent of the measured times of a fake runner."""
    made = [PassCosts() for _ in range(3)]
    for costs in made:
        costs.observe = lambda num_rows, depth, seconds: None
    bench.scheduler.speculation.costs, *models_of(bench)._costs = made
    models_of(bench)._weight_ratio = 0.2


def without_lookup(bench: Bench | NativeBench) -> None:
    """Make prompt lookup find nothing in the requests of a bench."""
    with_lookup(bench, lambda lookup, token_ids, most: None)


def with_lookup(
    bench: Bench | NativeBench,
    propose: Callable[[PromptLookup, list[int], int], DraftProposal | None],
) -> None:
    """Replace `PromptLookup.propose` by a function with the same arguments."""
    speculation = bench.scheduler.speculation
    make = speculation.prompt_lookup

    def drafter(request: Any) -> Any:
        made = make(request)
        if made is not None:
            made.propose = functools.partial(propose, made)
        return made

    speculation.prompt_lookup = drafter


def prompt(seed: int, length: int) -> list[int]:
    """Draw a prompt."""
    return random_ids(length, seed, 0, 250)


def assert_all_accepted(bench: Bench, least: int = 1) -> None:
    """Assert that drafting is on, and that all of at least `least` draft tokens were accepted."""
    speculation = bench.scheduler.speculation
    assert models_of(bench).is_on
    assert speculation.num_accepted == speculation.num_drafted >= least


def models_of(bench: Bench) -> ModelDrafts:
    """Return the object that drafts with the draft model of a bench."""
    models = bench.scheduler.speculation._models
    assert models is not None
    return models


def draft_runner(bench: Bench) -> FakeDraftRunner:
    """Return the runner of a bench's draft model."""
    runner = bench.parts.drafter.runner
    assert isinstance(runner, FakeDraftRunner)
    return runner
