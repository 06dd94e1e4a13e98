"""Tracking of requests, to explain their cache misses."""

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
from kvboost_edge.server.cache_report.diagnosis import add_diverging_texts, diagnose
from kvboost_edge.server.cache_report.recent_requests import (
    Diagnosis,
    History,
    PromptInputs,
    RequestRecord,
)
from kvboost_edge.shareable import shareable_end

if TYPE_CHECKING:
    from kvboost_edge.server.engines import Engine

__all__ = ["Doctor", "Watch"]


_loadings = itertools.count(1)


class Doctor:
    """Tracker for the requests of a loaded model, used only by the event loop's thread.

    Attributes:
        history: earlier requests. If the history is off, reports contain only the engine's reason.
    """

    def __init__(
        self, engine: Engine, model: str, history: History, count: Callable[[str], None]
    ) -> None:
        """Create a tracker.

        Args:
            engine: engine of the model.
            model: name of the model.
            history: earlier requests.
            count: function called with the cause of each request's cache miss.
        """
        self.history = history
        self._engine = engine
        self._model = model
        self._count = count
        self._left: list[tuple[Watch, RequestHandle, bool]] = []
        self._loading = next(_loadings)

    def watch(
        self,
        request_id: str,
        tenant: str | None,
        salt: str | None,
        token_ids: Sequence[int],
        asked: PromptInputs,
        slot: int = -1,
        prefill: str | None = None,
    ) -> Watch:
        """Record a request that starts, and return its `Watch`."""
        self.settle()
        self.history.sweep_later()
        ids = np.asarray(token_ids, dtype=np.int32)
        config = self._engine.config
        record = RequestRecord(
            request_id,
            asked,
            ids,
            len(token_ids),
            loading=self._loading,
            slot=slot,
            num_shareable=shareable_end(config, len(token_ids), prefill),
            prefill=config.prefill_of(prefill),
        )
        self.history.add(tenant, salt, record)
        return Watch(self, tenant, salt, record)

    def diagnose(
        self,
        tenant: str | None,
        salt: str | None,
        record: RequestRecord,
        result: GenerationResult,
        num_computed: int | None = None,
    ) -> Diagnosis:
        """Return the report of a request that has ended, and count its cause.

        `num_computed` is explained at `Watch.finish`.
        """
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
        if num_computed is not None:
            found = dataclasses.replace(found, computed_tokens=num_computed)
        self._count(found.cause)
        return found

    def left(self, watch: Watch, handle: RequestHandle, *, is_late: bool) -> None:
        """Take over a cancelled request until the engine has stopped it, which takes at most one
        step.

        Args:
            watch: tracking of the request.
            handle: handle of the request.
            is_late: True if the request exceeded its time limit.
        """
        self._left.append((watch, handle, is_late))

    def explained(
        self, tenant: str | None, record: RequestRecord
    ) -> Callable[[], Diagnosis] | None:
        """Return a function that makes the report with texts, or None while the request runs.

        The function may be called in any thread.
        """
        found = record.diagnosis
        tokenizer = self._engine.tokenizer
        if found is None:
            return None
        if found.cause in ("none", "bypassed", "not_started"):
            return lambda: found
        other = self.history.find(tenant, found.compared_with) if found.compared_with else None
        return lambda: add_diverging_texts(
            found, record, other, lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
        )

    def settle(self) -> None:
        """Finish the records of cancelled requests that the engine has stopped."""
        # The blocks that they computed are in the cache, so their records are kept. A request that
        # exceeded its time limit is kept in any case, because its client got an error to explain.
        # Other requests without a token, and those that failed, are removed.
        left = self._left
        self._left = []
        for watch, handle, is_late in left:
            if not handle.done:
                self._left.append((watch, handle, is_late))
                continue
            with contextlib.suppress(Exception):  # its client got the error or has disconnected
                result = handle.result(timeout=0)
                if result.token_times_ms:
                    watch.finish(result)
                    continue
                if is_late or result.finish_reason == "timeout":
                    progress = handle.progress()
                    watch.finish(result, progress.computed - progress.cached)
                    continue
            watch.forget()

    def _thinks(self) -> str:
        """Return the opening marker of reasoning, or "" if the template has no reasoning."""
        try:
            reasoning = self._engine.tokenizer.turn_format.reasoning
        except KVBoostError:  # no chat template
            return ""
        return reasoning[0] if reasoning else ""


class Watch:
    """Tracking of a single request."""

    def __init__(
        self, doctor: Doctor, tenant: str | None, salt: str | None, record: RequestRecord
    ) -> None:
        self._doctor = doctor
        self._tenant = tenant
        self._salt = salt
        self._record = record

    def finish(self, result: GenerationResult, num_computed: int | None = None) -> None:
        """Record the result of the request.

        Args:
            result: the engine's result.
            num_computed: number of prompt tokens that were computed, if the request ended before
                its first token. By default, all tokens that were not cached.
        """
        self._record.diagnosis = self._doctor.diagnose(
            self._tenant, self._salt, self._record, result, num_computed
        )
        computed = result.output_token_ids[:-1]  # the KV of the last token was never computed
        self._doctor.history.extend(self._tenant, self._record, computed)

    @property
    def finished(self) -> bool:
        """True once the result is recorded."""
        return self._record.diagnosis is not None

    @property
    def cause(self) -> str:
        """Cause of the cache miss, or "" before the request has ended."""
        found = self._record.diagnosis
        return "" if found is None else found.cause

    def forget(self) -> None:
        """Remove a request that left nothing in the cache."""
        self._doctor.history.remove(self._tenant, self._record)

    def reasoned(self, num_tokens: int) -> None:
        """Set the number of reasoning tokens in the answer."""
        self._record.num_reasoning = num_tokens

    def explained(self) -> Callable[[], Diagnosis] | None:
        """Return a function that makes the report with texts, or None while the request runs.

        The function may be called in any thread.
        """
        return self._doctor.explained(self._tenant, self._record)
