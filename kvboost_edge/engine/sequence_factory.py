"""Factories for the scheduler and the sequences of an engine, with their optional features."""

from __future__ import annotations

import numpy as np

from kvboost_edge.engine.grammar.compiler import GrammarCompiler
from kvboost_edge.engine.handle import RequestHandle
from kvboost_edge.engine.non_prefix_reuse import SequenceSpans, SpanSharing
from kvboost_edge.engine.request.request import Request
from kvboost_edge.engine.schedule.feature import (
    Constraint,
    SequenceFeatures,
    SharedSpans,
)
from kvboost_edge.engine.schedule.pacing import StepPacing
from kvboost_edge.engine.schedule.planners import Prefetcher
from kvboost_edge.engine.schedule.scheduler import Scheduler
from kvboost_edge.engine.schedule.sequence import Sequence
from kvboost_edge.engine.sparse_prefill import make_prefill
from kvboost_edge.engine.spec_decode.assistant import Assistant
from kvboost_edge.engine.spec_decode.draft_model import DraftModel, DraftParts
from kvboost_edge.engine.spec_decode.model_drafts import ModelDrafts
from kvboost_edge.engine.spec_decode.mtp_head import MtpHead
from kvboost_edge.engine.spec_decode.speculation import Speculation
from kvboost_edge.engine.thinking import ReasoningBudget
from kvboost_edge.kvcache.manager import KVCacheManager
from kvboost_edge.runners.base import RunnerInfo
from kvboost_edge.text.tokenizer import Tokenizer

__all__ = ["Sequences", "make_model_drafts", "make_scheduler"]


def make_scheduler(
    manager: KVCacheManager,
    loads: Prefetcher,
    *,
    max_num_seqs: int,
    max_batch_tokens: int,
    target_tpot: float | None = 0.0,
    min_chunk_tokens: int = 32,
    num_layers: int = 1,
    closes_blocks: bool = False,
    whole: bool = False,
    remembers: bool = False,
    history_bytes: int | None = None,
    models: ModelDrafts | None = None,
) -> tuple[Scheduler, Speculation]:
    """Return a scheduler with all features, and its draft planner.

    Args:
        num_layers: number of layers with KV.
        target_tpot: maximum step time in milliseconds while sequences decode, see `StepPacing`.
        closes_blocks: whether full blocks are quantized. Only accepted tokens may then fill a
            block.
        whole: whether each step must compute all tokens of a sequence at once.
        history_bytes: byte limit of the draft history, or None for the default.
        models: drafts of a draft model, or None without one.
    """
    speculation = Speculation(
        manager, closes_blocks=closes_blocks, history_bytes=history_bytes, models=models
    )
    scheduler = Scheduler(
        manager,
        max_num_seqs=max_num_seqs,
        max_batch_tokens=max_batch_tokens,
        loads=loads,
        sharing=SpanSharing(manager, min_chunk_tokens, num_layers, remembers=remembers),
        speculation=speculation,
        pacing=StepPacing(0.0 if whole else target_tpot and target_tpot / 1e3),
        whole=whole,
    )
    return scheduler, speculation


def make_model_drafts(
    drafter: DraftParts | None, manager: KVCacheManager, info: RunnerInfo
) -> ModelDrafts | None:
    """Return the drafts of a draft model, whose speed is measured, or None without one.

    Args:
        drafter: the draft model.
        manager: manager of the engine's blocks.
        info: description of the engine's model.
    """
    if drafter is None:
        return None
    models = ModelDrafts(_kind_of(drafter)(drafter, manager), info.vocab_size, info.weight_bytes)
    models.measure()
    return models


def _kind_of(drafter: DraftParts) -> type[DraftModel]:
    if not drafter.has_kv:
        return Assistant
    return MtpHead if drafter.runner.info.joins_hidden_states else DraftModel


class Sequences:
    """A thread-safe factory for an engine's sequences."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        speculation: Speculation,
        vocab_size: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._speculation = speculation
        self._grammars = GrammarCompiler(tokenizer, vocab_size, eos_token_ids)
        self._masked = np.empty(vocab_size, np.float32)

    def make(self, request: Request, handle: RequestHandle) -> Sequence:
        """Create the sequence of a request.

        Raises:
            RequestError: the request's grammar is invalid.
            BackendUnavailable: the package for structured output is not installed.
        """
        return Sequence(
            request,
            handle,
            self._tokenizer,
            SequenceFeatures(
                drafting=self._speculation.drafting(request),
                grammar=self._constraint(request),
                spans=SharedSpans() if request.repair is None else SequenceSpans(request),
                prefill=make_prefill(request),
            ),
        )

    def _constraint(self, request: Request) -> Constraint:
        """Return the constraint on a request's tokens, which may combine several."""
        grammar = request.grammar
        made = Constraint() if grammar is None else self._grammars.make(grammar)
        if request.reasoning is None:
            return made
        most = request.max_tokens - request.num_prompt_tokens
        return ReasoningBudget(request.reasoning, most, self._tokenizer, made, self._masked)

    def read_ahead(self) -> None:
        """Prepare structured output in the background."""
        self._grammars.read_ahead()

    def close(self) -> None:
        """Stop background work and wait for it."""
        self._grammars.close()
