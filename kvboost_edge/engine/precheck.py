"""Request checks that run before a model is loaded, packed or compiled."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.grammar.compiler import check_grammar
from kvboost_edge.engine.memory.selection import bounded_context, open_checkpoint, usable_context
from kvboost_edge.engine.request.prompts import LIMIT_ADVICE
from kvboost_edge.engine.request.request import resolve_sampling
from kvboost_edge.engine.request.requested_grammar import KINDS, read_grammar
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.errors import RequestError

__all__ = ["check_limit", "check_request"]

# Limits up to this many tokens are not checked here. Reading a GGUF file with 49,000 tokens takes
# 40 ms.
_FEW = 512


def check_request(options: Mapping[str, Any]) -> None:
    """Check the options of a `CPUPagedEngine.submit` call.

    Raises:
        RequestError: an option is unknown or out of range, or the grammar is invalid.
        BackendUnavailable: the package for structured output is not installed.
    """
    given = dict(options)
    Terms.taken_from(given)
    params = resolve_sampling(None, given)
    grammar = read_grammar({kind: getattr(params, kind) for kind in KINDS})
    if grammar is not None:
        check_grammar(grammar)


def check_limit(path: Path, config: EngineConfig, max_new_tokens: int | None) -> None:
    """Check that `max_new_tokens` is less than the context of the model at `path`.

    Small values are not checked here. The engine checks them later.

    Raises:
        RequestError: `max_new_tokens` leaves no room for a prompt.
    """
    if max_new_tokens is None or max_new_tokens <= _FEW:
        return
    checkpoint = open_checkpoint(path, config)
    context = bounded_context(usable_context(checkpoint.config), config)
    if max_new_tokens >= context:
        raise RequestError(
            f"max_new_tokens={max_new_tokens} leaves no room for a prompt in the model's context "
            f"of {context} tokens; {LIMIT_ADVICE}"
        )
