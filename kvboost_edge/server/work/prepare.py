"""What an engine does before it takes requests."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvboost_edge.server.logs import log_facts

if TYPE_CHECKING:
    from kvboost_edge.engine.engine import CPUPagedEngine

__all__ = ["prepare"]


def prepare(
    engine: CPUPagedEngine,
    warm: Sequence[str],
    warm_documents: Sequence[str],
    tenants: Sequence[str | None],
) -> None:
    """Run the model once, so that the first client does not wait for kernels to load, and cache the
    warm texts, for each tenant its own copy: none shares with another. No tenants: for who comes
    without a key.
    """
    if engine.pooling.source:
        engine.embed([[0, 0]])
    else:
        engine.generate([0, 0], max_new_tokens=2, mode="baseline")
    for tenant in tenants or [None]:
        warmed = [engine.warm(text, tenant=tenant) for text in warm]
        if warm_documents:
            warmed.append(engine.warm(documents=warm_documents, tenant=tenant))
        for stored in warmed:
            log_facts(
                logging.INFO, "warmed", tokens=stored.token_count, chunks=stored.chunks_stored
            )
