"""What a tenant asked lately, in memory and for a bounded time: what a new prompt is compared with.

Token ids and the texts of a request's fields are kept, never on disk and never in logs; no tenant's are compared with
another's. `--request-history 0` keeps nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["NOT_SAID", "Asked", "Diagnosis", "Field", "History", "Record"]

Ids = npt.NDArray[np.int32]

_MAX_REQUESTS = 256  # of one tenant: comparing with as many of 30,000 tokens takes up to some 2 ms
_MAX_BYTES = 64 << 20  # of all
_MAX_TENANT_BYTES = 16 << 20
_HEAD = 64  # tokens that tell most pairs apart before all of them are looked at
_OBJECT_BYTES = 500


class Field(NamedTuple):
    """A text that stands in the prompt, and what the request calls it: "system", "tool 3 (search)", "message 7"."""

    name: str
    text: str


class Asked(NamedTuple):
    """What a prompt was made of.

    fields     in the order of the request
    tools      their names, in its order
    settings   what else the template was given, as text
    normalised what was put into another order or left out so that the prompt begins as before, see normalise.py
    """

    fields: tuple[Field, ...] = ()
    tools: tuple[str, ...] = ()
    settings: str = ""
    normalised: tuple[str, ...] = ()


NOT_SAID = Asked()


@dataclasses.dataclass(slots=True, eq=False)
class Record:
    """One request. `ids` are the prompt's, with those computed of the answer behind them once it is there;
    `num_reasoning` of these are reasoning. `diagnosis`: what became of it."""

    request_id: str
    asked: Asked
    ids: Ids
    num_prompt: int
    at: float = dataclasses.field(default_factory=time.time)
    num_reasoning: int = 0
    diagnosis: Diagnosis | None = None

    @property
    def nbytes(self) -> int:
        return int(self.ids.nbytes) + 4 * sum(len(field.text) for field in self.asked.fields) + _OBJECT_BYTES

    def common(self, ids: Ids) -> int:
        """How many first tokens both have in common."""
        length = min(len(self.ids), len(ids))
        start, end = 0, min(_HEAD, length)
        while start < end:
            differ = self.ids[start:end] != ids[start:end]
            first = int(differ.argmax())
            if differ[first]:
                return start + first
            start, end = end, length
        return length


@dataclasses.dataclass(frozen=True, slots=True)
class Diagnosis:
    """What became of one prompt in the cache. `cause`: one of `diagnosis.CAUSES`.

    position         the token at which it left the longest prefix that was asked before
    field            the part of the request it lies in, such as "message 7"; before: where the earlier one was then
    text, text_before    what stands there, and what stood there
    compared_with    the id of that earlier request, "" without one
    computed_tokens  prompt tokens computed; seconds: the time that took
    evicted_from     tiers the blocks were dropped from
    """

    request_id: str
    at: float
    cause: str
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

    def as_json(self) -> dict[str, Any]:
        """All of it, with times rounded to milliseconds."""
        fields = dataclasses.asdict(self)
        return {**fields, "at": round(self.at, 3), "seconds": round(self.seconds, 3)}


class History:
    """Records by tenant and salt; only the event loop's thread touches it.

    `seconds`: how long a record is kept, 0: nothing is.
    """

    def __init__(self, seconds: float, max_bytes: int = _MAX_BYTES, max_tenant_bytes: int = _MAX_TENANT_BYTES) -> None:
        self.seconds = seconds
        self._max_bytes, self._max_tenant_bytes = max_bytes, max_tenant_bytes
        self._spaces: OrderedDict[tuple[str | None, str | None], OrderedDict[str, Record]] = OrderedDict()
        self._sizes: dict[tuple[str | None, str | None], int] = {}
        self._sweep: asyncio.TimerHandle | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that all records take, about."""
        return sum(self._sizes.values())

    def add(self, tenant: str | None, salt: str | None, record: Record) -> None:
        """Keep a record, of an id that is new; the oldest of the tenant, and then the tenant that asked longest ago,
        make room."""
        if not self.seconds:
            return
        space = (tenant, salt)
        records = self._spaces.setdefault(space, OrderedDict())
        self._spaces.move_to_end(space)
        records[record.request_id] = record
        self._sizes[space] = self._sizes.get(space, 0) + record.nbytes
        self.forget_old()
        while len(records) > _MAX_REQUESTS or (self._sizes.get(space, 0) > self._max_tenant_bytes and records):
            self._drop(space, next(iter(records)))
        while self.nbytes > self._max_bytes:
            oldest = next(iter(self._spaces))
            self._drop(oldest, next(iter(self._spaces[oldest])))

    def extend(self, tenant: str | None, salt: str | None, record: Record, answer: Sequence[int]) -> None:
        """What was computed of a record's answer, if it is still kept."""
        space = (tenant, salt)
        if space in self._spaces and self._spaces[space].get(record.request_id) is record:
            self._sizes[space] += 4 * len(answer)
            record.ids = np.concatenate([record.ids, np.asarray(answer, dtype=np.int32)])

    def closest(self, tenant: str | None, salt: str | None, record: Record) -> tuple[Record | None, int]:
        """The earlier record that begins like this one for the most tokens, of equal ones the latest, and how many."""
        best, most = None, 0
        ids = record.ids[: record.num_prompt]
        earlier = list(itertools.takewhile(lambda other: other is not record, self._of((tenant, salt))))
        for other in reversed(earlier):
            # One token tells most that cannot be better, without reading all before it.
            if most < min(len(other.ids), len(ids)) and other.ids[most] == ids[most]:
                count = other.common(ids)
                if count > most:
                    best, most = other, count
        return best, most

    def remove(self, tenant: str | None, salt: str | None, record: Record) -> None:
        """Forget a record, if it is still kept."""
        if any(other is record for other in self._of((tenant, salt))):
            self._drop((tenant, salt), record.request_id)

    def forget_old(self) -> None:
        """Forget what is older than `seconds`."""
        before = time.time() - self.seconds
        for space in list(self._spaces):
            for record in list(itertools.takewhile(lambda record: record.at < before, self._of(space))):
                self._drop(space, record.request_id)

    def sweep_later(self) -> None:
        """Records end in time where no request comes either, and whether or not their model is still loaded."""
        if self.seconds and self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(self.seconds, self._swept)

    def _swept(self) -> None:
        self._sweep = None
        self.forget_old()
        if self.nbytes:
            self.sweep_later()

    def find(self, tenant: str | None, request_id: str) -> Record | None:
        """The tenant's record of a request, under any salt."""
        self.forget_old()
        found = (records.get(request_id) for (owner, _), records in self._spaces.items() if owner == tenant)
        return next((record for record in found if record is not None), None)

    def latest(self, tenant: str | None) -> list[Record]:
        """The tenant's requests, the latest first."""
        self.forget_old()
        mine = [record for space in self._spaces if space[0] == tenant for record in reversed(list(self._of(space)))]
        return sorted(mine, key=lambda record: record.at, reverse=True)

    def _of(self, space: tuple[str | None, str | None]) -> Iterable[Record]:
        """The records of a space, the oldest first."""
        return self._spaces[space].values() if space in self._spaces else ()

    def _drop(self, space: tuple[str | None, str | None], request_id: str) -> None:
        record = self._spaces[space].pop(request_id)
        self._sizes[space] -= record.nbytes
        if not self._spaces[space]:
            del self._spaces[space], self._sizes[space]
