"""Checks of a request that need no model: refused before anything is loaded, packed or compiled."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.grammar.compiler import check_grammar
from kvboost_edge.engine.memory.selection import bounded_context, usable_context
from kvboost_edge.engine.request.grammar import KINDS, read_grammar
from kvboost_edge.engine.request.prompts import LIMIT_ADVICE
from kvboost_edge.engine.request.request import resolve_sampling
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.errors import RequestError
from kvboost_edge.host.file_memo import NO_CACHE
from kvboost_edge.models.checkpoint import Checkpoint

__all__ = ["check_limit", "check_request"]

_FEW = 512  # not worth another look at the file: 40 ms for a vocabulary of 49,000 in a GGUF file


def check_request(options: Mapping[str, Any]) -> None:
    """Options of `CPUPagedEngine.submit`; raises what it would: RequestError for an unknown one or
    a value out of range, and for what no answer can fit; BackendUnavailable where the package for
    that is missing.
    """
    given = dict(options)
    Terms.taken_from(given)
    params = resolve_sampling(None, given)
    grammar = read_grammar({kind: getattr(params, kind) for kind in KINDS})
    if grammar is not None:
        check_grammar(grammar)


def check_limit(path: Path, config: EngineConfig, max_new_tokens: int | None) -> None:
    """RequestError for more tokens than the context of the model at a path has beside a prompt, by
    its config. Few are left to the engine.
    """
    if max_new_tokens is None or max_new_tokens <= _FEW:
        return
    cache_dir = None if config.pack_cache else NO_CACHE
    checkpoint = Checkpoint.open(path, cache_dir=cache_dir, rope_range=config.rope_range)
    context = bounded_context(usable_context(checkpoint.config), config)
    if max_new_tokens >= context:
        raise RequestError(
            f"max_new_tokens={max_new_tokens} leaves no room for a prompt: the model's context is "
            f"{context} tokens; {LIMIT_ADVICE}"
        )
