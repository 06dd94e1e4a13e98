"""Keeps what was asked, and says of each request why its prompt was read again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvboost_edge.engine.results import GenerationResult
from kvboost_edge.errors import KVBoostError
from kvboost_edge.server.doctor.diagnosis import diagnose, placed
from kvboost_edge.server.doctor.records import Asked, Diagnosis, History, Record

if TYPE_CHECKING:
    from kvboost_edge.engine.engine import CPUPagedEngine

__all__ = ["Doctor", "Watch"]


class Doctor:
    """One server's; only the event loop's thread touches it.

    seconds   how long a request is kept, 0: none is, and only what the engine says itself is known
    count     is told the cause of each request
    """

    def __init__(self, engine: CPUPagedEngine, seconds: float, count: Callable[[str], None]) -> None:
        self.history = History(seconds)
        self._engine, self._count = engine, count
        stats = engine.paged_stats()
        self._block_size = int(stats["block_size"])

    def watch(
        self, request_id: str, tenant: str | None, salt: str | None, token_ids: Sequence[int], asked: Asked
    ) -> Watch:
        """A request that begins to run."""
        record = Record(request_id, asked, np.asarray(token_ids, dtype=np.int32), len(token_ids))
        self.history.add(tenant, salt, record)
        return Watch(self, tenant, salt, record)

    def diagnose(self, tenant: str | None, salt: str | None, record: Record, result: GenerationResult) -> Diagnosis:
        """What became of a request, counted."""
        closest, common = self.history.closest(tenant, salt, record)
        tokenizer = self._engine.tokenizer
        found = diagnose(
            record,
            closest,
            common,
            result,
            block_size=self._block_size,
            tiers=self._tiers() if result.miss_reason == "evicted" else (),
            decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
            thinks=self._thinks(),
        )
        self._count(found.cause)
        return found

    def explained(self, tenant: str | None, record: Record) -> Callable[[], Diagnosis] | None:
        """What says, in any thread, what became of a record, with the texts; None while it runs."""
        found, tokenizer = record.diagnosis, self._engine.tokenizer
        if found is None:
            return None
        if found.cause in ("none", "bypassed", "not_started"):
            return lambda: found
        other = self.history.find(tenant, found.compared_with) if found.compared_with else None
        return lambda: placed(found, record, other, lambda ids: tokenizer.decode(ids, skip_special_tokens=False))

    def _tiers(self) -> tuple[str, ...]:
        return tuple(self._engine.paged_stats().get("tiers", {}))

    def _thinks(self) -> str:
        """How reasoning begins in this model's chats, "" where it has none."""
        try:
            reasoning = self._engine.tokenizer.turn_format.reasoning
        except KVBoostError:  # there is no chat template
            return ""
        return reasoning[0] if reasoning else ""


class Watch:
    """One request under observation."""

    def __init__(self, doctor: Doctor, tenant: str | None, salt: str | None, record: Record) -> None:
        self._doctor, self._tenant, self._salt, self._record = doctor, tenant, salt, record

    def finish(self, result: GenerationResult) -> None:
        """The end of the request."""
        self._record.diagnosis = self._doctor.diagnose(self._tenant, self._salt, self._record, result)
        self._doctor.history.extend(self._tenant, self._salt, self._record, result.output_token_ids)

    def reasoned(self, num_tokens: int) -> None:
        """How many tokens of the answer are reasoning."""
        self._record.num_reasoning = num_tokens

    def explained(self) -> Callable[[], Diagnosis] | None:
        """What says, in any thread, what became of the prompt; None before the end."""
        return self._doctor.explained(self._tenant, self._record)
