"""Traces of requests for `simulators/eviction.py`, generated with fixed seeds or recorded.

A trace consists of block ids, not tokens. An id stands for one block and all blocks before it, so
equal ids mean equal prefixes. The `hash_ids` in Mooncake's published traces are such ids, one per
512 tokens. `read_mooncake` reads them.

The generators do not depend on any policy. Their parameters are typical sizes and habits of chats
and agents. The turns of a conversation are seconds to minutes apart, and many conversations run at
a time.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["BLOCK_TOKENS", "TRACES", "Access", "read_mooncake"]

BLOCK_TOKENS = 512


class Access(NamedTuple):
    """One request.

    Attributes:
        at: Seconds since the start of the trace.
        tenant: Tenant of the request. Ids of different tenants are never equal.
        prompt_ids: Block ids of the prompt.
        output_ids: Ids of the full blocks that the answer adds. If they are known, a later prompt
            contains them.
        num_tokens: Number of prompt tokens.
    """

    at: float
    tenant: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    num_tokens: int


Session = Iterator[tuple[float, Access]]
"""One user's requests in order: (seconds until it comes, the request)."""


class _Maker:
    """Generator of random sizes, times and unique ids."""

    def __init__(self, seed: int, tenant: str = "") -> None:
        self.rng = random.Random(seed)
        self.tenant = tenant
        self._ids = itertools.count(1 + (seed << 20))

    def blocks(self, low: int, high: int) -> tuple[int, ...]:
        """Return between `low` and `high` new block ids."""
        return tuple(next(self._ids) for _ in range(self.rng.randint(low, high)))

    def pause(self, mean: float) -> float:
        return self.rng.expovariate(1 / mean)

    def ask(self, prompt: tuple[int, ...], answer: tuple[int, ...]) -> Access:
        return Access(0.0, self.tenant, prompt, answer, len(prompt) * BLOCK_TOKENS)

    def pick(self, choices: list[tuple[int, ...]]) -> tuple[int, ...]:
        """Pick one of several heads, the first twice as often as the second, and so on."""
        return self.rng.choices(choices, [1 / (rank + 1) for rank in range(len(choices))])[0]


def _chat(make: _Maker, head: tuple[int, ...], *, turns: float = 6, pause: float = 60) -> Session:
    """Generate a conversation, in which each prompt extends the one before by a new message."""
    history = head
    wait = 0.0
    while True:
        history += make.blocks(1, 2)
        answer = make.blocks(0, 2)
        yield wait, make.ask(history, answer)
        history += answer
        if make.rng.random() < 1 / turns:
            return
        wait = 5 + make.pause(pause)


def _agent(make: _Maker, head: tuple[int, ...], side_head: tuple[int, ...]) -> Session:
    """Generate an agent with a long head and many steps, seconds apart.

    Between them are title requests and independent side requests.
    """
    history = head + make.blocks(1, 3)
    wait = 0.0
    for step in range(make.rng.randint(8, 30)):
        answer = make.blocks(0, 1)
        yield wait, make.ask(history, answer)
        history += answer + make.blocks(1, 4)
        wait = 1 + make.pause(8)
        if step == 0:
            yield 0.5, make.ask(make.blocks(1, 2), ())
        if step % 5 == 4:
            for _ in range(3):
                yield 0.5, make.ask(side_head + make.blocks(2, 12), make.blocks(0, 1))


def _scan(make: _Maker, head: tuple[int, ...]) -> Session:
    """Generate a document that is read once."""
    yield 0.0, make.ask(head + make.blocks(20, 60), make.blocks(0, 1))


def _questions(make: _Maker, head: tuple[int, ...]) -> Session:
    """Generate one to six separate questions about a document, minutes apart."""
    document = head + make.blocks(10, 40)
    for number in range(make.rng.choice((1, 1, 2, 3, 4, 6))):
        yield (
            (make.pause(90) if number else 0.0),
            make.ask(document + make.blocks(1, 1), make.blocks(0, 1)),
        )


def _question(make: _Maker, head: tuple[int, ...]) -> Session:
    """Generate one question after a head."""
    yield 0.0, make.ask(head + make.blocks(1, 1), make.blocks(0, 1))


def _play(sessions: Iterable[tuple[float, Session]], until: float) -> list[Access]:
    """Return the requests of all sessions, each with its start time, in order of time."""
    order = itertools.count()
    due: list[tuple[float, int, Access, Session]] = []

    def push(start: float, session: Session) -> None:
        following = next(session, None)
        if following is not None:
            at = start + following[0]
            heapq.heappush(due, (at, next(order), following[1], session))

    for start, session in sessions:
        push(start, session)
    found: list[Access] = []
    while due and due[0][0] <= until:
        at, _, access, session = heapq.heappop(due)
        found.append(access._replace(at=at))
        push(at, session)
    return found


def _arrivals(make: _Maker, every: float, until: float, start: float = 0.0) -> Iterator[float]:
    """Yield start times of sessions, on average `every` seconds apart."""
    at = start + make.pause(every)
    while at < until:
        yield at
        at += make.pause(every)


def chats(seed: int = 1, until: float = 7200.0) -> list[Access]:
    """Return chats with four heads, about 40 at a time."""
    make = _Maker(seed)
    heads = [make.blocks(1, 8) for _ in range(4)]
    return _play([(at, _chat(make, make.pick(heads))) for at in _arrivals(make, 10, until)], until)


def agents(seed: int = 2, until: float = 3600.0) -> list[Access]:
    """Return agents of three kinds with side requests, about eight at a time."""
    make = _Maker(seed)
    heads = [make.blocks(15, 25) for _ in range(3)]
    sides = [make.blocks(4, 10) for _ in range(3)]
    starts = list(_arrivals(make, 25, until))
    return _play([(at, _agent(make, make.pick(heads), make.pick(sides))) for at in starts], until)


def scans(seed: int = 3, until: float = 7200.0) -> list[Access]:
    """Return chats, and documents that are read once and make up most computed blocks."""
    make = _Maker(seed)
    heads = [make.blocks(1, 8) for _ in range(4)]
    reader = make.blocks(2, 2)
    talk = [(at, _chat(make, make.pick(heads))) for at in _arrivals(make, 15, until)]
    return _play([*talk, *((at, _scan(make, reader)) for at in _arrivals(make, 6, until))], until)


def questions(seed: int = 4, until: float = 7200.0) -> list[Access]:
    """Return questions about documents, which are often asked again much later."""
    make = _Maker(seed)
    head = make.blocks(2, 2)
    return _play([(at, _questions(make, head)) for at in _arrivals(make, 8, until)], until)


def tenants(seed: int = 5, until: float = 7200.0) -> list[Access]:
    """Return five chat tenants with their own heads, an agent tenant and a document tenant."""
    sessions: list[tuple[float, Session]] = []
    for number in range(5):
        make = _Maker(100 * seed + number, f"chats {number}")
        heads = [make.blocks(2, 10) for _ in range(2)]
        sessions += [
            (at, _chat(make, make.pick(heads))) for at in _arrivals(make, 60 + 30 * number, until)
        ]
    make = _Maker(100 * seed + 50, "agents")
    head = make.blocks(20, 20)
    side = make.blocks(6, 6)
    sessions += [(at, _agent(make, head, side)) for at in _arrivals(make, 240, until)]
    make = _Maker(100 * seed + 51, "reader")
    reader = make.blocks(2, 2)
    sessions += [(at, _scan(make, reader)) for at in _arrivals(make, 15, until)]
    return _play(sessions, until)


def drift(seed: int = 6, until: float = 9000.0) -> list[Access]:
    """Return three days of traffic, where all heads change every day."""
    make = _Maker(seed)
    sessions: list[tuple[float, Session]] = []
    for day in range(3):
        heads = [make.blocks(8, 20) for _ in range(6)]
        starts = _arrivals(make, 8, (day + 1) * until / 3, start=day * until / 3)
        sessions += [(at, _chat(make, make.pick(heads), turns=4)) for at in starts]
    return _play(sessions, until)


def floods(seed: int = 7, until: float = 7200.0) -> list[Access]:
    """Return questions on four long heads, and every 20 minutes 60 documents that are read once."""
    make = _Maker(seed)
    heads = [make.blocks(10, 20) for _ in range(4)]
    sessions = [(at, _question(make, make.pick(heads))) for at in _arrivals(make, 20, until)]
    for start in range(1200, int(until), 1200):
        sessions += [(float(start + number), _scan(make, ())) for number in range(60)]
    return _play(sessions, until)


TRACES: dict[str, Callable[[], list[Access]]] = {
    "chats": chats,
    "agents": agents,
    "scans": scans,
    "questions": questions,
    "tenants": tenants,
    "drift": drift,
    "floods": floods,
}


def read_mooncake(path: Path) -> list[Access]:
    """Read a trace in Mooncake's format.

    It consists of JSON lines with timestamp (ms), input_length, output_length (tokens) and
    hash_ids. The blocks of answers are not recorded, so they get ids that do not occur again.

    Raises:
        ValueError: A line does not have this form.
    """
    found: list[Access] = []
    fresh = itertools.count(1 << 31)
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                ids = tuple(int(one) for one in record["hash_ids"])
                at, num_tokens, num_output = (
                    record[k] for k in ("timestamp", "input_length", "output_length")
                )
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number} is not a record of a trace: {error!r}"
                ) from error
            if not ids or min(ids) < 0 or max(ids) >= 1 << 31:
                raise ValueError(
                    f"{path}, line {number}: hash_ids must be a non-empty list of "
                    "integers in 0..2^31 - 1"
                )
            output = tuple(next(fresh) for _ in range(int(num_output) // BLOCK_TOKENS))
            found.append(Access(at / 1000, "", ids, output, int(num_tokens)))
    return found
