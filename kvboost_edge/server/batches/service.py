"""Service that runs the batches of all tenants in the background of the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvboost_edge.errors import KVBoostError
from kvboost_edge.server.api_errors import ApiError
from kvboost_edge.server.batches.answered_lines import RecordFile
from kvboost_edge.server.batches.api_objects import Batch
from kvboost_edge.server.batches.execution import LineRecords, run_lines
from kvboost_edge.server.batches.input_lines import BatchLine, by_prefix, read_bodies, read_lines
from kvboost_edge.server.batches.route_calls import LineAnswer, LineCaller
from kvboost_edge.server.logs import failure_place, log_facts
from kvboost_edge.server.response_types import BatchStatus

if TYPE_CHECKING:
    from kvboost_edge.server.batches.batch_store import BatchStore
    from kvboost_edge.server.batches.tenant_space import TenantSpace
    from kvboost_edge.server.settings import ServerSettings

__all__ = ["BatchService"]

_LOOK_SECONDS = 60.0  # time between looks for expired files
_RETRY_SECONDS = 1.0  # time until a batch that stopped is tried again, doubled by each failure
_MAX_RETRY_SECONDS = 60.0


class _StorageFull(Exception):
    """The tenant's files have reached their limit."""


class _Failure(NamedTuple):
    """The last error of a batch.

    Attributes:
        answered: number of lines with a record.
        seconds: time until the batch is tried again.
    """

    answered: int
    seconds: float


class BatchService:
    """Runner of batches. Only the event loop's thread uses it.

    Each tenant's oldest unfinished batch runs. The batches of several tenants share the places. A
    batch that stops after an error is tried again after a delay. Meanwhile, the next one runs.

    Attributes:
        store: files and batches of all tenants.
    """

    def __init__(
        self,
        store: BatchStore,
        call: LineCaller,
        settings: ServerSettings,
        places: Callable[[], int],
    ) -> None:
        """Create the service. `start` runs it.

        Args:
            store: files and batches.
            call: function that sends a line to its route.
            settings: settings of the server.
            places: function that returns the number of lines that may run at once.
        """
        self.store = store
        self._call = call
        self._settings = settings
        self._places = places
        self._task: asyncio.Task[None] | None = None
        self._running: dict[str, asyncio.Task[None]] = {}
        self._lines: dict[str, asyncio.Task[None]] = {}
        self._failures: dict[str, _Failure] = {}
        self._delayed: set[str] = set()
        self._changed = asyncio.Event()
        self._is_closed = False

    @property
    def retention(self) -> int:
        """Maximum lifetime of a file, in seconds."""
        return self._settings.batch_retention

    def start(self) -> None:
        """Begin or continue to run batches, and look at new ones."""
        self._changed.set()
        if self._task is None and not self._is_closed:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def cancel(self, space: TenantSpace, batch: Batch) -> None:
        """Cancel a batch. Its lines in flight end, and the answers so far become a file.

        Raises:
            ApiError: the batch is finished (409).
        """
        if batch.is_finished:
            raise ApiError(
                409,
                f"the batch is {batch.status} and cannot be cancelled",
                code="batch_finished",
                param="batch_id",
            )
        if batch.status != "cancelling":
            batch.status = "cancelling"
            batch.cancelling_at = space.now()
            await asyncio.to_thread(space.save, batch)
        if (lines := self._lines.get(batch.id)) is not None:
            lines.cancel()
        self._delayed.discard(batch.id)
        self.start()

    async def stop(self) -> None:
        """Stop all batches. They continue after a restart."""
        tasks = [*self._running.values(), *([self._task] if self._task else [])]
        if not self._is_closed:
            self._is_closed = True
            for task in tasks:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Stop all batches and close the store."""
        await self.stop()
        self.store.close()

    async def _run(self) -> None:
        # `wait_for` of Python 3.11 drops a cancellation that arrives together with a change.
        while not self._is_closed:
            self._changed.clear()
            for space in self.store:
                try:
                    await asyncio.to_thread(space.expire)
                except OSError as error:
                    _log_failure("expired files cannot be removed", error)
                self._begin_next(space)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _LOOK_SECONDS)

    def _begin_next(self, space: TenantSpace) -> None:
        """Run the oldest unfinished batch of a tenant, and end cancelled ones.

        Batches that are to be tried again later are left out.
        """
        unfinished = [
            one
            for one in reversed(space.batches())
            if not one.is_finished and one.id not in self._delayed
        ]
        cancelled = [one for one in unfinished if one.status == "cancelling"]
        for batch in (*unfinished[:1], *cancelled):
            if batch.id not in self._running:
                task = asyncio.get_running_loop().create_task(self._run_batch(space, batch))
                self._running[batch.id] = task
                task.add_done_callback(functools.partial(self._ended, batch))

    def _ended(self, batch: Batch, task: asyncio.Task[None]) -> None:
        del self._running[batch.id]
        error = None if task.cancelled() else task.exception()
        if error is None:
            self._failures.pop(batch.id, None)
        else:
            self._try_later(batch, error)
        self._changed.set()

    def _try_later(self, batch: Batch, error: BaseException) -> None:
        answered = batch.completed + batch.failed
        last = self._failures.get(batch.id)
        seconds = _RETRY_SECONDS
        if last is not None and answered <= last.answered:
            seconds = min(2 * last.seconds, _MAX_RETRY_SECONDS)
        self._failures[batch.id] = _Failure(answered, seconds)
        self._delayed.add(batch.id)
        asyncio.get_running_loop().call_later(seconds, self._try_again, batch.id)
        event = "a batch stopped and continues later"
        _log_failure(event, error, batch=batch.id, seconds=seconds)

    def _try_again(self, batch_id: str) -> None:
        self._delayed.discard(batch_id)
        self._changed.set()

    async def _run_batch(self, space: TenantSpace, batch: Batch) -> None:
        try:
            await self._answer_and_finish(space, batch)
        except Exception as error:
            # A cancelled or expired batch ends without the step that failed.
            if batch.outcome is not None:
                raise
            if batch.status == "cancelling":
                outcome: BatchStatus = "cancelled"
            elif batch.expires_at <= space.now():
                outcome = "expired"
            else:
                raise
            _log_failure("a batch ends after an error", error, batch=batch.id)
            await self._finish(space, batch, outcome)

    async def _answer_and_finish(self, space: TenantSpace, batch: Batch) -> None:
        if batch.outcome is not None:  # a crash interrupted the end
            await self._finish(space, batch, batch.outcome)
            return
        path = space.input_path(batch)
        if path is None:
            batch.explain("input_file_missing", "the input file was deleted")
            await self._finish(space, batch, "failed")
            return
        settings = self._settings
        lines, problems = await asyncio.to_thread(
            read_lines, path, batch.endpoint, settings.max_batch_lines, settings.max_body_bytes
        )
        if problems:
            batch.errors = [one._asdict() for one in problems]
            await self._finish(space, batch, "failed")
            return
        folder = space.batch_directory(batch)
        records = await asyncio.to_thread(
            lambda: LineRecords(
                RecordFile(folder / "answers.jsonl"), RecordFile(folder / "errors.jsonl")
            )
        )
        try:
            batch.total = len(lines)
            batch.completed, batch.failed = records.completed, records.failed
            if batch.status == "validating":
                batch.status, batch.in_progress_at = "in_progress", space.now()
            await asyncio.to_thread(space.save, batch)
            left = by_prefix([line for line in lines if not records.has(line)])
            log_facts(logging.INFO, "batch", batch=batch.id, lines=len(lines), left=len(left))
            outcome = await self._answer(space, batch, records, path, left)
            if outcome == "expired":
                await asyncio.to_thread(_expire, records, left)
            batch.completed, batch.failed = records.completed, records.failed
        finally:
            await asyncio.to_thread(records.close)
        await self._finish(space, batch, outcome)

    async def _answer(
        self,
        space: TenantSpace,
        batch: Batch,
        records: LineRecords,
        path: Path,
        lines: list[BatchLine],
    ) -> BatchStatus:
        """Answer lines until all are answered or the batch ends early. Return the outcome."""
        if batch.status == "cancelling":
            return "cancelled"

        async def call(url: str, body: dict[str, Any]) -> LineAnswer:
            # The batch expires first, and cancels its lines.
            left = max(0, batch.expires_at - space.now()) + 1
            return await self._call(url, body, tenant=space.tenant, seconds=left)

        def progress() -> None:
            batch.completed, batch.failed = records.completed, records.failed
            if not space.wrote(batch, records.num_bytes):
                raise _StorageFull

        if not space.wrote(batch, records.num_bytes):
            return self._storage_full(batch)
        task = asyncio.ensure_future(
            run_lines(read_bodies(path, lines), call, records, self._at_once, progress)
        )
        self._lines[batch.id] = task
        try:
            await asyncio.wait({task}, timeout=max(0, batch.expires_at - space.now()))
            is_over = task.done()
        finally:
            del self._lines[batch.id]
            task.cancel()
            await asyncio.wait({task})
        if task.cancelled():
            return "expired" if not is_over else "cancelled"
        error = task.exception()
        if isinstance(error, _StorageFull):
            return self._storage_full(batch)
        if error is not None:
            raise error
        return "completed"

    def _at_once(self) -> int:
        """Return the number of lines of each batch to run at once."""
        return max(1, self._places() // max(1, len(self._lines)))

    def _storage_full(self, batch: Batch) -> BatchStatus:
        batch.explain(
            "file_bytes_limit",
            f"the files would take more than {self._settings.max_file_bytes} bytes "
            "(--max-file-bytes); delete files, and run the other lines in a new batch",
        )
        return "failed"

    async def _finish(self, space: TenantSpace, batch: Batch, outcome: BatchStatus) -> None:
        if batch.outcome is None:
            batch.outcome, batch.finalizing_at = outcome, space.now()
            if outcome in ("completed", "expired"):
                batch.status = "finalizing"
            await asyncio.to_thread(space.save, batch)
        await asyncio.to_thread(space.publish, batch)
        batch.end(outcome, space.now())
        await asyncio.to_thread(space.save, batch)
        log_facts(
            logging.INFO,
            "batch ended",
            batch=batch.id,
            status=batch.status,
            completed=batch.completed,
            failed=batch.failed,
            of=batch.total,
        )


def _expire(records: LineRecords, lines: list[BatchLine]) -> None:
    """Write a record for each line without one."""
    for line in lines:
        if not records.has(line):
            message = "the line was not answered before the batch expired"
            records.fail(line, "batch_expired", message)


def _log_failure(event: str, error: BaseException, **facts: str | float) -> None:
    reason = str(error) if isinstance(error, KVBoostError) else None
    log_facts(
        logging.ERROR,
        event,
        error=type(error).__name__,
        reason=reason,
        place=failure_place(error),
        **facts,
    )
