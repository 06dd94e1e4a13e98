"""Preparation of an engine before the first request."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvboost_edge.config import GenerationMode
from kvboost_edge.errors import ConfigError, KVBoostError, RequestError
from kvboost_edge.server.logs import log_facts
from kvboost_edge.text.message_boundaries import system_prefix, user_starts

if TYPE_CHECKING:
    from kvboost_edge.engine.engine import CPUPagedEngine
    from kvboost_edge.engine.request.prompts import Prompt
    from kvboost_edge.text.tokenizer import Tokenizer

__all__ = ["learn_template", "prepare"]


def prepare(
    engine: CPUPagedEngine,
    warm: Sequence[str],
    warm_documents: Sequence[str],
    tenants: Sequence[str | None],
    mode: GenerationMode = GenerationMode.PREFIX_CACHE,
    *,
    warm_systems: Sequence[str] = (),
) -> None:
    """Run the model once, and cache the warm texts.

    The run loads the kernels, which saves the first client the wait.

    Args:
        warm: prompts to cache.
        warm_documents: documents to cache as chunks for non-prefix reuse.
        tenants: tenants that each get a separate copy; empty for a server without API keys.
        mode: default mode of requests.
        warm_systems: system messages to cache as the chat template writes them.

    Raises:
        ConfigError: the chat template rejects system messages.
        RequestError: the quality gate rejects `mode`.
    """
    learn_template(engine.tokenizer)
    if engine.pooling.source:
        engine.embed([[0, 0]])
    else:
        engine.generate([0, 0], max_new_tokens=2, mode="baseline")
        if mode is GenerationMode.CHUNK_KV_REUSE:
            engine.generate([0, 0], max_new_tokens=2, mode=mode)
    prompts: list[Prompt] = [
        *warm,
        *(_system_prefix(engine.tokenizer, text) for text in warm_systems),
    ]
    for tenant in tenants or [None]:
        warmed = [engine.warm(prompt, tenant=tenant) for prompt in prompts]
        if warm_documents:
            warmed.append(engine.warm(documents=warm_documents, tenant=tenant))
        for stored in warmed:
            log_facts(
                logging.INFO, "warmed", tokens=stored.token_count, chunks=stored.chunks_stored
            )


def _system_prefix(tokenizer: Tokenizer, text: str) -> list[int]:
    try:
        return system_prefix(tokenizer, text)
    except RequestError as error:
        raise ConfigError(
            f"--warm-system cannot be used with this model: {error}; use --warm for texts without "
            "a chat template"
        ) from error


def learn_template(tokenizer: Tokenizer) -> None:
    """Detect how the chat template writes turns."""
    # This must happen before requests arrive. Running a template may take arbitrarily long, and the
    # event loop must not wait for it.
    if tokenizer.chat_template is None:
        return
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
    except KVBoostError as error:
        log_facts(logging.WARNING, "the chat template refuses a plain message", reason=str(error))
    with contextlib.suppress(KVBoostError):
        _ = tokenizer.turn_format
        user_starts(tokenizer, ())
