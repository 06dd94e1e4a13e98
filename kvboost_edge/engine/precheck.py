"""Checks of a request before a model is loaded, packed or compiled."""

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

_FEW = 512  # tokens; not worth reading the file: 40 ms for a GGUF file with 49,000 tokens


def check_request(options: Mapping[str, Any]) -> None:
    """Check options of `CPUPagedEngine.submit`.

    Raises:
        RequestError: an option is unknown or out of range, or the grammar is invalid.
        BackendUnavailable: the package for structured output is missing.
    """
    given = dict(options)
    Terms.taken_from(given)
    params = resolve_sampling(None, given)
    grammar = read_grammar({kind: getattr(params, kind) for kind in KINDS})
    if grammar is not None:
        check_grammar(grammar)


def check_limit(path: Path, config: EngineConfig, max_new_tokens: int | None) -> None:
    """Check `max_new_tokens` against the context of the model at a path.

    Small values are left to the engine.

    Raises:
        RequestError: no room is left for a prompt.
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
