"""What a tenant asked lately, in memory and for a bounded time: what a new prompt is compared with.

Token ids and the texts of a request's fields are kept, never on disk and never in logs; no tenant's
are compared with another's. `--request-history 0` keeps nothing.
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

_MAX_REQUESTS = 256  # of one tenant: comparing with as many of 30,000 tokens takes up to some 2 ms
_MAX_BYTES = 64 << 20  # of all
_MAX_TENANT_BYTES = 16 << 20
_HEAD = 64  # tokens that tell most pairs apart before all of them are looked at
_OBJECT_BYTES = 500


class PromptField(NamedTuple):
    """A text that stands in the prompt, and what the request calls it: "system", "tool 3 (search)",
    "message 7".
    """

    name: str
    text: str


class PromptInputs(NamedTuple):
    """What a prompt was made of.

    fields     in the order of the request
    tools      their names, in its order
    settings   what else the template was given, as text
    normalised what was put into another order or left out so that the prompt begins as before, see
    normalise.py
    """

    fields: tuple[PromptField, ...] = ()
    tools: tuple[str, ...] = ()
    settings: str = ""
    normalised: tuple[str, ...] = ()


NOT_SAID = PromptInputs()


@dataclasses.dataclass(slots=True, eq=False)
class RequestRecord:
    """One request. `ids` are the prompt's, with those computed of the answer behind them once it is
    there; `num_reasoning` of these are reasoning. `loading`: which loading of its model answers it.
    `diagnosis`: what became of it.
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
        """How many first tokens both have in common."""
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
    """What became of one prompt in the cache. `cause`: one of `diagnosis.CAUSES`.

    Attributes:
        position: the token at which it left the longest prefix that was asked before.
        field: the part of the request it lies in, such as "message 7"; before: where the earlier
            one was then.
        text, text_before: what stands there, and what stood there.
        compared_with: the id of that earlier request, "" without one.
        computed_tokens: prompt tokens computed; seconds: the time that took.
        step_share: mean share of the tokens of the request's steps, 0 to 1.
        evicted_from: the pool and tiers that had the block and dropped it.
        model: which was asked.
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
        """All of it, with times rounded to milliseconds."""
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
    """Records by tenant; only the event loop's thread touches it. A tenant's bounds are of all its
    salts together, so that no number of salts makes the others' records leave, or what is done here
    slow.

    Attributes:
        seconds: how long a record is kept, 0: nothing is.
        kept: the records of each tenant, the oldest first.
    """

    def __init__(
        self,
        seconds: float,
        max_bytes: int = _MAX_BYTES,
        max_tenant_bytes: int = _MAX_TENANT_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
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
        """Bytes that all records take, approximately."""
        return self.kept.num_bytes

    def add(self, tenant: str | None, salt: str | None, record: RequestRecord) -> None:
        """Keep a record, of an id that is new."""
        if self.seconds:
            self.kept.keep(tenant, tenant, record.request_id, _Kept(salt, record), record.nbytes)

    def extend(self, tenant: str | None, record: RequestRecord, answer: Sequence[int]) -> None:
        """Add what was computed of a record's answer, if it is still kept."""
        if self._keeps(tenant, record):
            record.ids = np.concatenate([record.ids, np.asarray(answer, dtype=np.int32)])
            self.kept.resize(tenant, record.request_id, record.nbytes)

    def closest(
        self, tenant: str | None, salt: str | None, record: RequestRecord
    ) -> list[tuple[RequestRecord, int]]:
        """Return the earlier records of the same salt that begin like this one.

        Each comes with the length of the common prefix: the longest first, the latest first among
        equal ones.
        """
        ids = record.ids[: record.num_prompt]
        earlier = list(
            itertools.takewhile(lambda kept: kept.record is not record, self.kept.values(tenant))
        )
        others = (kept.record for kept in reversed(earlier) if kept.salt == salt)
        alike = [(other, count) for other in others if (count := other.common(ids))]
        return sorted(alike, key=lambda one: -one[1])

    def remove(self, tenant: str | None, record: RequestRecord) -> None:
        """Drop a record, if it is still kept."""
        if self._keeps(tenant, record):
            self.kept.drop(tenant, record.request_id)

    def sweep_later(self) -> None:
        """Drop records in time where no request comes either, and whether or not their model is
        still loaded.
        """
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
        """Return the tenant's records, the latest first."""
        records = [kept.record for kept in self.kept.values(tenant)]
        return sorted(records, key=lambda record: record.at, reverse=True)

    def _keeps(self, tenant: str | None, record: RequestRecord) -> bool:
        return self.find(tenant, record.request_id) is record
