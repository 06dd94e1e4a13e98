"""The tracker of prompts: keeps the latest ones and explains the cache misses of new ones."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvboost_edge.engine.handle import RequestHandle
from kvboost_edge.engine.request.results import GenerationResult
from kvboost_edge.errors import KVBoostError
from kvboost_edge.server.cache_report.diagnosis import diagnose, placed
from kvboost_edge.server.cache_report.records import Diagnosis, History, PromptInputs, RequestRecord

if TYPE_CHECKING:
    from kvboost_edge.server.engines import Engine

__all__ = ["Doctor", "Watch"]


_loadings = itertools.count(1)


class Doctor:
    """One loaded model's; only the event loop's thread touches it.

    Attributes:
        model: its name.
        history: what was asked before; one that keeps nothing: only what the engine says itself is
            known.
        count: is told the cause of each request.
    """

    def __init__(
        self, engine: Engine, model: str, history: History, count: Callable[[str], None]
    ) -> None:
        self.history = history
        self._engine = engine
        self._model = model
        self._count = count
        self._left: list[tuple[Watch, RequestHandle]] = []
        self._loading = next(_loadings)

    def watch(
        self,
        request_id: str,
        tenant: str | None,
        salt: str | None,
        token_ids: Sequence[int],
        asked: PromptInputs,
    ) -> Watch:
        """A request that begins to run."""
        self.settle()
        self.history.sweep_later()
        ids = np.asarray(token_ids, dtype=np.int32)
        record = RequestRecord(request_id, asked, ids, len(token_ids), loading=self._loading)
        self.history.add(tenant, salt, record)
        return Watch(self, tenant, salt, record)

    def diagnose(
        self, tenant: str | None, salt: str | None, record: RequestRecord, result: GenerationResult
    ) -> Diagnosis:
        """What became of a request, counted."""
        tokenizer = self._engine.tokenizer
        found = diagnose(
            record,
            self.history.closest(tenant, salt, record),
            result,
            block_size=self._engine.config.block_size,
            decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
            thinks=self._thinks(),
            compares=self.history.seconds > 0,
        )
        found = dataclasses.replace(found, model=self._model)
        self._count(found.cause)
        return found

    def left(self, watch: Watch, handle: RequestHandle) -> None:
        """A request that nobody waits for: it was cancelled, and what became of it is known within
        a step.
        """
        self._left.append((watch, handle))

    def explained(
        self, tenant: str | None, record: RequestRecord
    ) -> Callable[[], Diagnosis] | None:
        """What says, in any thread, what became of a record, with the texts; None while it runs."""
        found = record.diagnosis
        tokenizer = self._engine.tokenizer
        if found is None:
            return None
        if found.cause in ("none", "bypassed", "not_started"):
            return lambda: found
        other = self.history.find(tenant, found.compared_with) if found.compared_with else None
        return lambda: placed(
            found, record, other, lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
        )

    def settle(self) -> None:
        """Requests that were left and have ended: what was computed of them is in the cache, so
        they count; one that never began, or broke, is forgotten.
        """
        left = self._left
        self._left = []
        for watch, handle in left:
            if not handle.done:
                self._left.append((watch, handle))
                continue
            with contextlib.suppress(Exception):  # its own client was told, or is gone
                result = handle.result(timeout=0)
                if result.token_times_ms:
                    watch.finish(result)
                    continue
            watch.forget()

    def _thinks(self) -> str:
        """How reasoning begins in this model's chats, "" where it has none."""
        try:
            reasoning = self._engine.tokenizer.turn_format.reasoning
        except KVBoostError:  # there is no chat template
            return ""
        return reasoning[0] if reasoning else ""


class Watch:
    """One request under observation."""

    def __init__(
        self, doctor: Doctor, tenant: str | None, salt: str | None, record: RequestRecord
    ) -> None:
        self._doctor = doctor
        self._tenant = tenant
        self._salt = salt
        self._record = record

    def finish(self, result: GenerationResult) -> None:
        """The end of the request."""
        self._record.diagnosis = self._doctor.diagnose(
            self._tenant, self._salt, self._record, result
        )
        computed = result.output_token_ids[
            :-1
        ]  # the last was said, and nothing was computed behind it
        self._doctor.history.extend(self._tenant, self._record, computed)

    @property
    def finished(self) -> bool:
        """Whether its end was seen."""
        return self._record.diagnosis is not None

    @property
    def cause(self) -> str:
        """Why the rest of the prompt was computed; "" before the end."""
        found = self._record.diagnosis
        return "" if found is None else found.cause

    def forget(self) -> None:
        """The request ended and left nothing in the cache."""
        self._doctor.history.remove(self._tenant, self._record)

    def reasoned(self, num_tokens: int) -> None:
        """How many tokens of the answer are reasoning."""
        self._record.num_reasoning = num_tokens

    def explained(self) -> Callable[[], Diagnosis] | None:
        """What says, in any thread, what became of the prompt; None before the end."""
        return self._doctor.explained(self._tenant, self._record)
