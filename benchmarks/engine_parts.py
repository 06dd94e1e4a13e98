"""Parts of an engine that have no public API and that benchmarks read or replace.

They are all here, so that a change of the engine's structure affects only this module.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy.typing as npt

from kvboost_edge import CPUPagedEngine, SamplingParams
from kvboost_edge.config import EngineConfig, GenerationMode
from kvboost_edge.engine.build import build_from_path
from kvboost_edge.engine.request.results import GenerationResult
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.engine.spec_decode.pass_costs import PassCosts
from kvboost_edge.kvcache.recurrent.slots import StateSlots
from kvboost_edge.reuse.recompute import Repair
from kvboost_edge.reuse.span_search import prepare_search
from kvboost_edge.text.tokenizer import Tokenizer

__all__ = [
    "held_state_slots",
    "logits_with",
    "pass_costs",
    "runner_of",
    "with_tokenizer",
]


def runner_of(engine: CPUPagedEngine) -> Any:
    """Return the engine's runner, which computes passes without the scheduler."""
    return engine._parts.runner


def pass_costs(engine: CPUPagedEngine) -> dict[str, PassCosts]:
    """Return the engine's estimates of the time of a pass, by model and draft model."""
    speculation = engine._core.scheduler.speculation
    costs = {"model": speculation.costs}
    if speculation._models is not None:
        costs["draft model"] = speculation._models.costs
    return costs


@contextlib.contextmanager
def held_state_slots(engine: CPUPagedEngine) -> Iterator[StateSlots]:
    """Yield the slots of a hybrid model's states, while no step runs."""
    states = engine._parts.manager.states
    if states is None:
        raise RuntimeError("the model has no recurrent states; take a hybrid model")
    with engine._core.reading():
        yield states.slots


def with_tokenizer(
    model: str, config: EngineConfig, tokenizer: Tokenizer, end: int
) -> CPUPagedEngine:
    """Return an engine with another tokenizer, whose answers end with a token."""
    parts = dataclasses.replace(
        build_from_path(model, config), tokenizer=tokenizer, eos_token_ids=frozenset({end})
    )
    return CPUPagedEngine._built_by(lambda _: parts, config)


def logits_with(
    engine: CPUPagedEngine, tokens: list[int], start: int, salt: str, repair: Repair | None
) -> tuple[list[npt.NDArray[Any]], GenerationResult]:
    """Return the logits of tokens[start:] in parts, and the result of the request.

    Unlike `CPUPagedEngine.logits`, it reuses text at other positions if a rule is given.

    Args:
        salt: cache salt of the request.
        repair: how reused text is recomputed, or None for exact logits.
    """
    request = engine._builder.make(
        tokens, Terms(cache_salt=salt), SamplingParams(), logits_start=start
    )
    if repair is not None:
        prepare_search()
        terms = dataclasses.replace(request.terms, mode=GenerationMode.CHUNK_KV_REUSE)
        request = dataclasses.replace(request, terms=terms, repair=repair)
    handle, rows = engine._core.submit_logits(request)
    return rows, handle.result()
