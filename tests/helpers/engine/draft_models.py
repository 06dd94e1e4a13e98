"""Draft models without weights, which propose right, wrong and other tokens on purpose."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from helpers.engine.fake_hybrid import ZEROS, next_state, state_logits
from helpers.engine.fake_runner import (
    VOCAB_SIZE,
    Bench,
    FakeBackend,
    FakeRunner,
    token_logits,
)
from helpers.engine.model_kinds import PLAIN, ModelKind
from helpers.engine.native_bench import NativeBench
from kvboost_edge.engine.spec_decode.draft_model import DraftParts
from kvboost_edge.engine.spec_decode.model_drafts import ModelDrafts
from kvboost_edge.engine.spec_decode.pass_costs import PassCosts
from kvboost_edge.runners.base import ForwardBatch

DRAFT_KINDS = ("right", "wrong", "random", "one off")


class FakeDraftRunner(FakeRunner):
    """A `FakeRunner` whose logits are those of the engine's model, or of other tokens.

    kind: "right"; "wrong", with each token the next one in the vocabulary; "random"; or "one off",
    which is wrong after every third token. `of` is the kind of the engine's model, and `vocab_size`
    may differ from the engine's.
    """

    def __init__(
        self,
        backend: FakeBackend,
        kind: str = "right",
        *,
        of: ModelKind = PLAIN,
        vocab_size: int = VOCAB_SIZE,
        **options: Any,
    ) -> None:
        super().__init__(backend, **options)
        self.kind = kind
        self._of = of
        self.info = dataclasses.replace(self.info, vocab_size=vocab_size, weight_bytes=200)

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
        return np.hstack([logits[:, :size], padding]).astype(np.float32)

    def _logits(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        if self._of is PLAIN:
            return token_logits(tokens)
        return state_logits(functools.reduce(next_state, tokens.tolist(), ZEROS), tokens)


def fake_drafter(num_blocks: int, kind: str = "right", **options: Any) -> DraftParts:
    """A draft model for an engine with so many blocks of 16 tokens. Kinds differ in their digest."""
    backend = FakeBackend(num_blocks, 16)
    digest = hashlib.sha256(kind.encode()).digest()
    return DraftParts(FakeDraftRunner(backend, kind, **options), backend, digest)


def drafting_bench(
    kind: ModelKind, drafts: str = "right", num_blocks: int = 64, **options: Any
) -> Bench:
    """A bench whose requests get drafts of a draft model and none of prompt lookup."""
    draft_options = {
        name: options.pop(name) for name in ("vocab_size", "max_context") if name in options
    }
    drafter = fake_drafter(num_blocks, drafts, of=kind, **draft_options)
    bench = kind.bench(num_blocks, drafter=drafter, **options)
    without_lookup(bench)
    with_typical_times(bench)
    draft_runner(bench).computed = 0
    return bench


def with_typical_times(bench: Bench | NativeBench) -> None:
    """Let the lengths of drafts not depend on the measured times of a fake runner."""
    for part in (bench.scheduler.speculation, models_of(bench)):
        part.costs = PassCosts()
        part.costs.observe = lambda num_rows, depth, seconds: None
    models_of(bench)._weight_ratio = 0.2


def without_lookup(bench: Bench | NativeBench) -> None:
    """Let prompt lookup find nothing in the requests of a bench."""
    speculation = bench.scheduler.speculation
    make = speculation.drafter

    def drafter(request: Any) -> Any:
        made = make(request)
        if made is not None:
            made.propose = lambda token_ids, most: None
        return made

    speculation.drafter = drafter


def models_of(bench: Bench) -> ModelDrafts:
    """The draft model's drafts of a bench."""
    models = bench.scheduler.speculation._models
    assert models is not None
    return models


def draft_runner(bench: Bench) -> FakeDraftRunner:
    """The runner of a bench's draft model."""
    runner = bench.parts.drafter.runner
    assert isinstance(runner, FakeDraftRunner)
    return runner
