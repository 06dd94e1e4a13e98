"""Execution of the lines of a batch, several at once, with a record for each."""

from __future__ import annotations

import asyncio
import functools
import secrets
from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

from kvboost_edge.errors import KVBoostError
from kvboost_edge.server.batches.answered_lines import RecordFile
from kvboost_edge.server.batches.input_lines import BatchLine
from kvboost_edge.server.batches.route_calls import LineAnswer
from kvboost_edge.server.work.streams import dumps

__all__ = ["LineRecords", "LinesStopped", "run_lines"]

_MAX_WAIT = 30.0  # seconds until a line that a busy server rejected is tried again
_MAX_TRIES = 5
# Reasons that end the run of all lines, which continue later.
_STOPPING = frozenset({"shutting_down", "engine_stopped", "no_replica"})

Call = Callable[[str, dict[str, Any]], Awaitable[LineAnswer]]
T = TypeVar("T")


class LinesStopped(KVBoostError):
    """The server or its engine stops, so the remaining lines cannot be answered now."""


class LineRecords:
    """The two files of a batch's records: answers and errors.

    Args:
        answers: file for lines that were answered.
        errors: file for lines that failed.
    """

    def __init__(self, answers: RecordFile, errors: RecordFile) -> None:
        self._answers = answers
        self._errors = errors

    @property
    def completed(self) -> int:
        """Number of answers."""
        return len(self._answers.answered)

    @property
    def failed(self) -> int:
        """Number of lines that failed."""
        return len(self._errors.answered)

    @property
    def num_bytes(self) -> int:
        return self._answers.num_bytes + self._errors.num_bytes

    def has(self, line: BatchLine) -> bool:
        """Return whether a line has a record."""
        return line.custom_id in self._answers.answered or line.custom_id in self._errors.answered

    def add(self, line: BatchLine, answer: LineAnswer) -> None:
        """Write the record of an answered line. Raises OSError."""
        head = dumps({"id": _new_record_id(), "custom_id": line.custom_id})
        response = dumps({"status_code": answer.status, "request_id": answer.request_id})
        # The body is JSON already, and may be large.
        body = b',"body":' + answer.body
        record = head[:-1] + b',"response":' + response[:-1] + body + b'},"error":null}'
        (self._answers if answer.status == 200 else self._errors).append(line.custom_id, record)

    def fail(self, line: BatchLine, code: str, message: str) -> None:
        """Write the record of a line that was not sent. Raises OSError."""
        record = {
            "id": _new_record_id(),
            "custom_id": line.custom_id,
            "response": None,
            "error": {"code": code, "message": message},
        }
        self._errors.append(line.custom_id, dumps(record))

    def close(self) -> None:
        """Sync and close both files. Raises OSError."""
        try:
            self._answers.close()
        finally:
            self._errors.close()


async def run_lines(
    lines: Generator[tuple[BatchLine, dict[str, Any]], None, None],
    call: Call,
    records: LineRecords,
    at_once: Callable[[], int],
    progress: Callable[[], None],
) -> None:
    """Answer lines in order, several at once, and write a record for each.

    If the caller is cancelled, the lines in flight are cancelled too and have no record.

    Args:
        lines: lines with their bodies. They are closed at the end.
        call: function that sends a body to a route.
        records: files for the records.
        at_once: function that returns the number of lines to run now.
        progress: function to call after each record.

    Raises:
        LinesStopped: the server stops.
        OSError: a record cannot be written.
    """
    running: dict[asyncio.Task[LineAnswer], BatchLine] = {}
    exhausted = False
    try:
        while running or not exhausted:
            while not exhausted and len(running) < max(1, at_once()):
                # The file is read in a thread, because a disk may be slow.
                found = await _whole(lambda: next(lines, None))
                if found is None:
                    exhausted = True
                    break
                line, body = found
                running[asyncio.ensure_future(_answered(call, line, body))] = line
            if not running:
                break
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                line = running.pop(task)
                answer = task.result()
                await _whole(functools.partial(records.add, line, answer))
                progress()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        lines.close()


async def _answered(call: Call, line: BatchLine, body: dict[str, Any]) -> LineAnswer:
    """Send a line, again after a while if the server rejects it because it is busy."""
    for number in range(_MAX_TRIES):
        answer = await call(line.url, body)
        if answer.code in _STOPPING:
            raise LinesStopped(f"the batch stops: {answer.code}")
        if answer.status != 503 or number == _MAX_TRIES - 1:
            break
        await asyncio.sleep(min(_MAX_WAIT, answer.retry_after or 1.0))
    return answer


async def _whole(work: Callable[[], T]) -> T:
    """Return the result of `work`, which runs in a thread to its end, also if the caller is
    cancelled.
    """
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def _new_record_id() -> str:
    return f"batch_req_{secrets.token_hex(12)}"
