"""Recent requests of each tenant, with which new prompts are compared.

Token ids and texts of a request's fields are kept in memory for a limited time, never on disk or in
logs. Requests of different tenants are never compared. `--request-history 0` keeps nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.host.tenant_lru import TenantLRU
from kvboost_edge.server.response_types import Cause, PromptCache

__all__ = ["NOT_SAID", "Diagnosis", "History", "PromptField", "PromptInputs", "RequestRecord"]

Ids = npt.NDArray[np.int32]

_MAX_REQUESTS = 256  # per tenant; comparing with this many of 30,000 tokens takes up to 2 ms
_MAX_BYTES = 64 << 20  # of all tenants
_MAX_TENANT_BYTES = 16 << 20
_HEAD = 64  # tokens compared first, which distinguish most pairs
_OBJECT_BYTES = 500


class PromptField(NamedTuple):
    """A text in the prompt.

    Attributes:
        name: name in the request, such as "system", "tool 3 (search)" or "message 7".
        text: the text.
    """

    name: str
    text: str


class PromptInputs(NamedTuple):
    """Inputs from which a prompt was rendered.

    Attributes:
        fields: texts, in the order of the request.
        tools: names of the tools, in the order of the request.
        settings: variables of the chat template, as text.
        normalised: kinds of normalization that changed the request, see normalization.py.
    """

    fields: tuple[PromptField, ...] = ()
    tools: tuple[str, ...] = ()
    settings: str = ""
    normalised: tuple[str, ...] = ()


NOT_SAID = PromptInputs()


@dataclasses.dataclass(slots=True, eq=False)
class RequestRecord:
    """One request.

    Attributes:
        request_id: id of the request.
        asked: inputs of the prompt.
        ids: token ids of the prompt, later followed by the computed ones of the answer.
        num_prompt: tokens of the prompt.
        at: time of the request, in seconds since the epoch.
        num_reasoning: tokens of the answer that are reasoning.
        loading: number of the loading of the model that answers it.
        diagnosis: the report, once the request has ended.
    """

    request_id: str
    asked: PromptInputs
    ids: Ids
    num_prompt: int
    at: float = dataclasses.field(default_factory=time.time)
    num_reasoning: int = 0
    loading: int = 0
    diagnosis: Diagnosis | None = None

    @property
    def nbytes(self) -> int:
        return (
            int(self.ids.nbytes)
            + 4 * sum(len(field.text) for field in self.asked.fields)
            + _OBJECT_BYTES
        )

    def common(self, ids: Ids) -> int:
        """Return the length of the common prefix in tokens."""
        length = min(len(self.ids), len(ids))
        start = 0
        end = min(_HEAD, length)
        while start < end:
            differ = self.ids[start:end] != ids[start:end]
            first = int(differ.argmax())
            if differ[first]:
                return start + first
            start = end
            end = length
        return length


@dataclasses.dataclass(frozen=True, slots=True)
class Diagnosis:
    """Cache-miss report of one prompt.

    Attributes:
        request_id: id of the request.
        at: time of the request, in seconds since the epoch.
        cause: one of `diagnosis.CAUSES`.
        prompt_tokens: tokens of the prompt.
        hit_tokens: prompt tokens found in each tier.
        reused_span_tokens: prompt tokens reused at other positions.
        computed_tokens: prompt tokens that were computed.
        seconds: time that this took.
        position: first token that differs from the earlier request with the longest common prefix.
        field: part of the request at this position, such as "message 7".
        field_before: part of the earlier request at this position.
        text: text around the position.
        text_before: text of the earlier request around the position.
        compared_with: id of the earlier request; "" without one.
        evicted_from: the pool and tiers that evicted the block.
        normalised: kinds of normalization that changed the request.
        model: name of the model.
        step_share: mean share of the request in the tokens of its steps, 0 to 1.
    """

    request_id: str
    at: float
    cause: Cause
    prompt_tokens: int
    hit_tokens: dict[str, int]
    reused_span_tokens: int
    computed_tokens: int
    seconds: float
    position: int
    field: str = ""
    field_before: str = ""
    text: str = ""
    text_before: str = ""
    compared_with: str = ""
    evicted_from: tuple[str, ...] = ()
    normalised: tuple[str, ...] = ()
    model: str = ""
    step_share: float = 0.0

    def as_json(self) -> PromptCache:
        """Return all fields, with times rounded to milliseconds."""
        return {
            "request_id": self.request_id,
            "at": round(self.at, 3),
            "cause": self.cause,
            "prompt_tokens": self.prompt_tokens,
            "hit_tokens": self.hit_tokens,
            "reused_span_tokens": self.reused_span_tokens,
            "computed_tokens": self.computed_tokens,
            "seconds": round(self.seconds, 3),
            "step_share": round(self.step_share, 4),
            "position": self.position,
            "field": self.field,
            "field_before": self.field_before,
            "text": self.text,
            "text_before": self.text_before,
            "compared_with": self.compared_with,
            "evicted_from": list(self.evicted_from),
            "normalised": list(self.normalised),
            "model": self.model,
        }


class _Kept(NamedTuple):
    salt: str | None
    record: RequestRecord


class History:
    """Requests by tenant, used by the event loop's thread only.

    Attributes:
        seconds: time that a record is kept; 0 keeps none.
        kept: records of each tenant, oldest first.
    """

    def __init__(
        self,
        seconds: float,
        max_bytes: int = _MAX_BYTES,
        max_tenant_bytes: int = _MAX_TENANT_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create an empty history.

        Args:
            seconds: time that a record is kept; 0 keeps none.
            max_bytes: limit for all tenants together.
            max_tenant_bytes: limit for each tenant. It holds for all salts together, so that many
                salts neither evict other tenants' records nor slow down comparisons.
            clock: source of the time in seconds.
        """
        self.seconds = seconds
        self.kept: TenantLRU[_Kept] = TenantLRU(
            max_tenant_bytes,
            max_bytes,
            max_root_values=_MAX_REQUESTS,
            root_bytes=0,
            seconds=seconds,
            clock=clock,
        )
        self._sweep: asyncio.TimerHandle | None = None

    @property
    def nbytes(self) -> int:
        """Approximate bytes of all records."""
        return self.kept.num_bytes

    def add(self, tenant: str | None, salt: str | None, record: RequestRecord) -> None:
        """Add a record with a new id."""
        if self.seconds:
            self.kept.keep(tenant, tenant, record.request_id, _Kept(salt, record), record.nbytes)

    def extend(self, tenant: str | None, record: RequestRecord, answer: Sequence[int]) -> None:
        """Append the computed tokens of a record's answer, if it is still kept."""
        if self._keeps(tenant, record):
            record.ids = np.concatenate([record.ids, np.asarray(answer, dtype=np.int32)])
            self.kept.resize(tenant, record.request_id, record.nbytes)

    def closest(
        self, tenant: str | None, salt: str | None, record: RequestRecord
    ) -> list[tuple[RequestRecord, int]]:
        """Return the earlier records of the same salt with a common prefix.

        Each comes with the length of the prefix in tokens; the longest come first, then the latest.
        """
        ids = record.ids[: record.num_prompt]
        earlier = list(
            itertools.takewhile(lambda kept: kept.record is not record, self.kept.values(tenant))
        )
        others = (kept.record for kept in reversed(earlier) if kept.salt == salt)
        alike = [(other, count) for other in others if (count := other.common(ids))]
        return sorted(alike, key=lambda one: -one[1])

    def remove(self, tenant: str | None, record: RequestRecord) -> None:
        """Remove a record, if it is still kept."""
        if self._keeps(tenant, record):
            self.kept.drop(tenant, record.request_id)

    def sweep_later(self) -> None:
        """Start the timer that drops expired records."""
        # Records must expire even if no request arrives or their model is unloaded.
        if self.seconds and self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(self.seconds, self._swept)

    def _swept(self) -> None:
        self._sweep = None
        self.kept.expire()
        if self.nbytes:
            self.sweep_later()

    def find(self, tenant: str | None, request_id: str) -> RequestRecord | None:
        """Return the tenant's record of a request, under any salt."""
        found = self.kept.peek(tenant, request_id)
        return None if found is None else found.record

    def latest(self, tenant: str | None) -> list[RequestRecord]:
        """Return the tenant's records, latest first."""
        records = [kept.record for kept in self.kept.values(tenant)]
        return sorted(records, key=lambda record: record.at, reverse=True)

    def _keeps(self, tenant: str | None, record: RequestRecord) -> bool:
        return self.find(tenant, record.request_id) is record
