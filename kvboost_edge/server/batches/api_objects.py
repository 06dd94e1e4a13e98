"""Stored files and batches, with their JSON forms on disk and in responses."""

from __future__ import annotations

import dataclasses
import re
import secrets
from typing import Any

from kvboost_edge.server.response_types import BatchObject, BatchStatus, FileObject

__all__ = [
    "BATCH_ID",
    "FILE_ID",
    "Batch",
    "StoredFile",
    "new_batch_id",
    "new_file_id",
]

_FINISHED = ("failed", "completed", "expired", "cancelled")
FILE_ID = re.compile(r"file-[0-9a-f]{32}")
BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")


def new_file_id() -> str:
    """Return a new random id of a file."""
    return f"file-{secrets.token_hex(16)}"


def new_batch_id() -> str:
    """Return a new random id of a batch."""
    return f"batch_{secrets.token_hex(16)}"


@dataclasses.dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that a client uploaded or a batch wrote.

    Attributes:
        id: id, which is also the name on disk.
        filename: the client's name, only shown.
        purpose: purpose by OpenAI's names.
        num_bytes: size.
        created_at: time of the upload, in seconds since the epoch.
        expires_at: time of its removal.
    """

    id: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int
    expires_at: int

    def as_answer(self) -> FileObject:
        """Return OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


@dataclasses.dataclass(slots=True)
class Batch:
    """A batch and its progress. Times are seconds since the epoch.

    Attributes:
        id: id, which is also the name of its folder on disk.
        endpoint: path of the route that answers the lines.
        input_file_id: file with the lines.
        completion_window: time limit as the client gave it.
        created_at: time of creation.
        expires_at: end of the time limit.
        metadata: the client's labels.
        output_seconds: lifetime of the output files.
        status: status by OpenAI's names.
        outcome: status that the batch will have once its files are written.
        errors: reasons of a failed batch.
        total: number of lines.
        completed: number of lines in the output file.
        failed: number of lines in the error file.
        output_file_id: file with the answers.
        error_file_id: file with the failed lines.
        in_progress_at: start of the first line.
        finalizing_at: end of the last line.
        completed_at: end of a complete batch.
        failed_at: end of a batch that failed.
        expired_at: end of a batch whose time was over.
        cancelling_at: time of the request to cancel.
        cancelled_at: end of a cancelled batch.
    """

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    output_seconds: int
    metadata: dict[str, str] | None = None
    status: BatchStatus = "validating"
    outcome: BatchStatus | None = None
    errors: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None

    @property
    def is_finished(self) -> bool:
        return self.status in _FINISHED

    @property
    def finished_at(self) -> int | None:
        """Time of the end, or None while the batch is not finished."""
        return self.completed_at or self.failed_at or self.expired_at or self.cancelled_at

    def end(self, status: BatchStatus, now: int) -> None:
        """Set the final status and its time."""
        self.status = status
        setattr(self, f"{status}_at", now)

    def explain(self, code: str, message: str) -> None:
        """Set an error that concerns no single line."""
        self.errors = [{"code": code, "line": None, "message": message, "param": None}]

    def as_answer(self) -> BatchObject:
        """Return OpenAI's batch object."""
        errors: Any = {"object": "list", "data": self.errors} if self.errors else None
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": errors,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "in_progress_at": self.in_progress_at,
            "expires_at": self.expires_at,
            "finalizing_at": self.finalizing_at,
            "completed_at": self.completed_at,
            "failed_at": self.failed_at,
            "expired_at": self.expired_at,
            "cancelling_at": self.cancelling_at,
            "cancelled_at": self.cancelled_at,
            "request_counts": {
                "total": self.total,
                "completed": self.completed,
                "failed": self.failed,
            },
            "metadata": self.metadata,
        }
