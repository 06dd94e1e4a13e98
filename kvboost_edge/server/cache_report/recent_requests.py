"""Recent requests of each tenant, to compare new prompts with.

Token ids and texts of a request's fields are kept in memory for a limited time, and never written
to disk or logs. Requests of different tenants are never compared. `--request-history 0` turns the
history off.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.host.tenant_lru import TenantLRU
from kvboost_edge.server.response_types import Cause, PromptCache
from kvboost_edge.shareable import ALL_TOKENS

__all__ = ["NOT_SAID", "Diagnosis", "History", "PromptField", "PromptInputs", "RequestRecord"]

Ids = npt.NDArray[np.int32]

# Maximum number of records per tenant; comparing a prompt of 30,000 tokens with all of them takes
# up to 2 ms.
_MAX_REQUESTS = 256
_MAX_BYTES = 64 << 20  # bytes, for all tenants together
_MAX_TENANT_BYTES = 16 << 20
_CHUNK = 1024  # number of tokens between two digests of a record
_DIGEST_BYTES = 60  # of one digest as a Python object
_OBJECT_BYTES = 500


class PromptField(NamedTuple):
    """A field of the request whose text is part of the prompt.

    Attributes:
        name: name of the field, such as "system", "tool 3 (search)" or "message 7".
        text: text of the field.
    """

    name: str
    text: str


class PromptInputs(NamedTuple):
    """Inputs that a prompt was rendered from.

    Attributes:
        fields: text fields, in the order of the request.
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
    """A request in the history.

    Attributes:
        request_id: id of the request.
        asked: inputs of the prompt.
        ids: token ids of the prompt, later also the computed token ids of the answer.
        num_prompt: number of prompt tokens.
        at: time of the request, in seconds since the epoch.
        num_reasoning: number of reasoning tokens in the answer.
        loading: number of the model load that serves the request; it changes when the model is
            loaded again.
        slot: llama.cpp's slot of the request, whose content it is until another request has this
            slot; -1 for none.
        num_shareable: number of leading tokens whose KV is shared, see `shareable_end`.
        prefill: how the prompt is computed, "exact" or "sparse".
        diagnosis: cache-miss report, once the request has ended.
        serial: number of the record, in the order of creation.
    """

    request_id: str
    asked: PromptInputs
    ids: Ids
    num_prompt: int
    at: float = dataclasses.field(default_factory=time.time)
    num_reasoning: int = 0
    loading: int = 0
    slot: int = -1
    num_shareable: int = ALL_TOKENS
    prefill: str = "exact"
    diagnosis: Diagnosis | None = None
    serial: int = dataclasses.field(default_factory=itertools.count().__next__, init=False)
    _digests: list[bytes] = dataclasses.field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        self._extend_digests()

    def append(self, answer: Ids) -> None:
        """Append token ids of the answer."""
        self.ids = np.concatenate([self.ids, answer])
        self._extend_digests()

    def _extend_digests(self) -> None:
        """Compute a digest of the first token ids for each multiple of `_CHUNK`."""
        for start in range(len(self._digests) * _CHUNK, len(self.ids) - _CHUNK + 1, _CHUNK):
            before = self._digests[-1] if self._digests else b""
            chunk = self.ids[start : start + _CHUNK].tobytes()
            self._digests.append(hashlib.blake2b(before + chunk, digest_size=16).digest())

    @property
    def has_started(self) -> bool:
        """False if the request ended while it waited, so that none of its prompt was computed."""
        return self.diagnosis is None or self.diagnosis.cause != "not_started"

    @property
    def nbytes(self) -> int:
        return (
            int(self.ids.nbytes)
            + _DIGEST_BYTES * len(self._digests)
            + 4 * sum(len(field.text) for field in self.asked.fields)
            + _OBJECT_BYTES
        )

    def common(self, other: RequestRecord) -> int:
        """Return the length in tokens of the prefix that another record's prompt shares."""
        length = min(len(self.ids), other.num_prompt)
        # Digests skip the chunks that are equal, because comparing all ids of a long history takes
        # longer than a request should wait.
        equal = 0
        differing = length // _CHUNK + 1
        while differing - equal > 1:
            middle = (equal + differing) // 2
            if self._digests[middle - 1] == other._digests[middle - 1]:
                equal = middle
            else:
                differing = middle
        start = equal * _CHUNK
        end = min(start + _CHUNK, length)
        differ = self.ids[start:end] != other.ids[start:end]
        first = int(differ.argmax()) if len(differ) else 0
        return start + first if len(differ) and differ[first] else end


@dataclasses.dataclass(frozen=True, slots=True)
class Diagnosis:
    """Cache-miss report of one prompt.

    Attributes:
        request_id: id of the request.
        at: time of the request, in seconds since the epoch.
        cause: one of `diagnosis.CAUSES`.
        prompt_tokens: number of prompt tokens.
        hit_tokens: number of prompt tokens found in each tier.
        reused_span_tokens: number of prompt tokens reused at other positions.
        computed_tokens: number of prompt tokens that were computed.
        seconds: time spent on computing these tokens.
        position: index of the first token that differs from the earlier request with the longest
            common prefix.
        field: field of the request at this position, such as "message 7".
        field_before: field of the earlier request at this position.
        text: text around the position.
        text_before: text of the earlier request around the position.
        compared_with: id of the earlier request; "" without an earlier request.
        evicted_from: the pool and tiers that evicted the block.
        normalised: kinds of normalization that changed the request.
        model: name of the model.
        step_share: mean share of the request in the tokens of its engine steps, 0 to 1.
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
        """Return all fields as a dict, with times rounded to milliseconds."""
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
    """Recent requests by tenant, used only by the event loop's thread.

    Attributes:
        seconds: time that a record is kept; 0 keeps no records.
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
            seconds: time that a record is kept; 0 keeps no records.
            max_bytes: maximum bytes of the records of all tenants.
            max_tenant_bytes: maximum bytes of the records of one tenant. The limit covers all of
                the tenant's salts. A tenant with many salts therefore cannot evict other tenants'
                records or slow down comparisons.
            clock: function that returns the time in seconds.
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
        """Approximate size of all records in bytes."""
        return self.kept.num_bytes

    def add(self, tenant: str | None, salt: str | None, record: RequestRecord) -> None:
        """Add a record with a new id."""
        if self.seconds:
            self.kept.keep(tenant, tenant, record.request_id, _Kept(salt, record), record.nbytes)

    def extend(self, tenant: str | None, record: RequestRecord, answer: Sequence[int]) -> None:
        """Append the computed tokens of an answer to its record, if the record is still kept."""
        if self._keeps(tenant, record):
            record.append(np.asarray(answer, dtype=np.int32))
            self.kept.resize(tenant, record.request_id, record.nbytes)

    def closest(
        self, tenant: str | None, salt: str | None, record: RequestRecord
    ) -> list[tuple[RequestRecord, int]]:
        """Return the earlier records with the same salt and prefill and a common prefix.

        Requests that never started are left out. Each record comes with the length of the common
        prefix in tokens. The longest prefixes come first, and among equal ones the latest record.
        """
        # The record itself may have been dropped, so it does not mark a place among the others.
        earlier = [kept for kept in self.kept.values(tenant) if kept.record.serial < record.serial]
        others = (
            kept.record
            for kept in reversed(earlier)
            if (kept.salt, kept.record.prefill) == (salt, record.prefill)
            and kept.record.has_started
        )
        alike = [(other, count) for other in others if (count := other.common(record))]
        return sorted(alike, key=lambda one: -one[1])

    def in_slot(self, tenant: str | None, salt: str | None, slot: int) -> list[RequestRecord]:
        """Return the finished records with this salt and slot that had started, latest first."""
        records = [
            kept.record
            for kept in self.kept.values(tenant)
            if kept.salt == salt
            and kept.record.slot == slot
            and kept.record.diagnosis is not None
            and kept.record.has_started
        ]
        return sorted(records, key=lambda record: record.at, reverse=True)

    def remove(self, tenant: str | None, record: RequestRecord) -> None:
        """Remove a record, if it is still kept."""
        if self._keeps(tenant, record):
            self.kept.drop(tenant, record.request_id)

    def sweep_later(self) -> None:
        """Start the timer that drops expired records."""
        # Records must expire even if no request arrives, or if their model is unloaded.
        if self.seconds and self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(self.seconds, self._swept)

    def _swept(self) -> None:
        self._sweep = None
        self.kept.expire()
        if self.nbytes:
            self.sweep_later()

    def find(self, tenant: str | None, request_id: str) -> RequestRecord | None:
        """Return the tenant's record of a request, whatever its salt."""
        found = self.kept.peek(tenant, request_id)
        return None if found is None else found.record

    def latest(self, tenant: str | None) -> list[RequestRecord]:
        """Return the tenant's records, latest first."""
        records = [kept.record for kept in self.kept.values(tenant)]
        return sorted(records, key=lambda record: record.at, reverse=True)

    def _keeps(self, tenant: str | None, record: RequestRecord) -> bool:
        return self.find(tenant, record.request_id) is record
