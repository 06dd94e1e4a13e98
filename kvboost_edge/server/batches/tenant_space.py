"""Files and batches of one tenant, kept in a folder of their own.

Names on disk are random ids that this module makes. Ids and names from clients are only compared
with the known ones.

    files/ID.jsonl, files/ID.json              contents and description of a file
    batches/ID/batch.json                      the batch and its progress
    batches/ID/answers.jsonl, errors.jsonl     records, until they become files
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from kvboost_edge.host.atomic_files import (
    finish_file,
    new_file,
    open_unfinished,
    replace_file,
)
from kvboost_edge.server.api_errors import ApiError
from kvboost_edge.server.batches.api_objects import (
    BATCH_ID,
    FILE_ID,
    Batch,
    StoredFile,
    new_batch_id,
    new_file_id,
)

if TYPE_CHECKING:
    from kvboost_edge.server.settings import ServerSettings

__all__ = ["TenantSpace", "Upload"]

_MAX_FINISHED = 1000  # finished batches that are remembered
_MAX_NAME = 255  # characters of a file's shown name


class Upload:
    """A file that arrives piece by piece. Close it if it does not become a stored file."""

    def __init__(self, space: TenantSpace, file: IO[bytes]) -> None:
        self.num_bytes = 0
        self._space = space
        self._file = file

    def write(self, data: bytes) -> None:
        """Append bytes.

        Raises:
            ApiError: the tenant's files are too large (413).
            OSError: the disk is full.
        """
        self._space._hold(len(data))
        self.num_bytes += len(data)
        self._file.write(data)

    def finish(self, filename: str, seconds: int) -> StoredFile:
        """Store the file and return its description.

        Args:
            filename: the client's name.
            seconds: lifetime of the file.

        Raises:
            OSError: the file cannot be written.
        """
        return self._space._add(self, filename, "batch", seconds)

    def close(self) -> None:
        """Remove the file unless it is stored."""
        self._space._drop(self)


class TenantSpace:
    """Files and batches of one tenant. Safe to use from any thread.

    Attributes:
        tenant: the tenant; None without API keys.
    """

    def __init__(
        self,
        directory: Path,
        settings: ServerSettings,
        tenant: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Read the files and batches in a folder, which is created if it is missing.

        Args:
            directory: folder of the tenant.
            settings: settings with the limits.
            tenant: the tenant.
            clock: function that returns seconds since the epoch.

        Raises:
            OSError: the folder cannot be used.
        """
        self.tenant = tenant
        self._directory = directory
        self._files_directory = directory / "files"
        self._batches_directory = directory / "batches"
        self._settings = settings
        self._clock = clock
        self._lock = threading.RLock()
        for folder in (directory, self._files_directory, self._batches_directory):
            folder.mkdir(mode=0o700, exist_ok=True)
        self._files: dict[str, StoredFile] = {}
        self._batches: dict[str, Batch] = {}
        self._num_uploads = self._upload_bytes = 0
        self._record_bytes: dict[str, int] = {}
        self._undeleted: list[Path] = []
        self._load()

    def now(self) -> int:
        """Return the time in seconds since the epoch."""
        return int(self._clock())

    # Files.

    @property
    def num_bytes(self) -> int:
        """Size of all files, including those that are being written."""
        with self._lock:
            return (
                sum(one.num_bytes for one in self._files.values())
                + self._upload_bytes
                + sum(self._record_bytes.values())
            )

    def upload(self) -> Upload:
        """Begin a new file.

        Raises:
            ApiError: the tenant has too many files or bytes (400 or 413).
            OSError: the file cannot be created.
        """
        with self._lock:
            count = len(self._files) + self._num_uploads
            if count >= self._settings.max_files:
                raise ApiError(
                    400,
                    f"{count} files are stored, which is the limit (--max-files); delete files",
                    code="file_limit",
                )
            self._hold(0)
            self._num_uploads += 1
        try:
            return Upload(self, open_unfinished(self._files_directory))
        except BaseException:
            with self._lock:
                self._num_uploads -= 1
            raise

    def files(self) -> list[StoredFile]:
        """Return all files, oldest first."""
        with self._lock:
            return sorted(self._files.values(), key=lambda one: (one.created_at, one.id))

    def file(self, file_id: str) -> StoredFile:
        """Return a file by its id.

        Raises:
            ApiError: the tenant has no such file (404).
        """
        with self._lock:
            found = self._files.get(file_id)
        if found is None or found.expires_at <= self.now():
            raise ApiError(
                404,
                f"there is no file {file_id[:80]!r}; GET /v1/files lists the files",
                code="file_not_found",
                param="file_id",
            )
        return found

    def path_of(self, file: StoredFile) -> Path:
        """Return the path of a file's contents."""
        return self._files_directory / f"{file.id}.jsonl"

    def delete_file(self, file_id: str) -> None:
        """Remove a file.

        Raises:
            ApiError: there is no such file (404), or a running batch reads it (409).
        """
        with self._lock:
            file = self.file(file_id)
            for batch in self._batches.values():
                if not batch.is_finished and batch.input_file_id == file_id:
                    raise ApiError(
                        409,
                        f"the batch {batch.id!r} reads the file; cancel it, or wait for its end",
                        code="file_in_use",
                        param="file_id",
                    )
            self._remove(file)

    # Batches.

    def input_path(self, batch: Batch) -> Path | None:
        """Return the path of a batch's input file, or None if it is missing."""
        # A file in use stays after its time is over.
        file = self._files.get(batch.input_file_id)
        return None if file is None else self.path_of(file)

    def create_batch(
        self,
        input_file_id: str,
        endpoint: str,
        window: str,
        window_seconds: int,
        output_seconds: int,
        metadata: Mapping[str, str] | None,
    ) -> Batch:
        """Store a new batch.

        Raises:
            ApiError: the input file is missing (404), or the tenant has too many batches (400).
            OSError: the batch cannot be written.
        """
        with self._lock:
            try:
                self.file(input_file_id)
            except ApiError as error:
                error.param = "input_file_id"
                raise
            running = sum(not one.is_finished for one in self._batches.values())
            if running >= self._settings.max_batches:
                raise ApiError(
                    400,
                    f"{running} batches are unfinished, and the limit is "
                    f"{self._settings.max_batches} (--max-batches); wait for one to finish, or "
                    "cancel one",
                    code="batch_limit",
                )
            now = self.now()
            batch = Batch(
                new_batch_id(),
                endpoint,
                input_file_id,
                window,
                now,
                now + window_seconds,
                output_seconds,
                None if metadata is None else dict(metadata),
            )
            self.batch_directory(batch).mkdir(mode=0o700)
            self._batches[batch.id] = batch
            self.save(batch)
            self._forget_finished()
            return batch

    def batches(self) -> list[Batch]:
        """Return all batches, newest first."""
        with self._lock:
            return sorted(
                self._batches.values(), key=lambda one: (one.created_at, one.id), reverse=True
            )

    def batch(self, batch_id: str) -> Batch:
        """Return a batch by its id.

        Raises:
            ApiError: the tenant has no such batch (404).
        """
        with self._lock:
            found = self._batches.get(batch_id)
        if found is None:
            raise ApiError(
                404,
                f"there is no batch {batch_id[:80]!r}; GET /v1/batches lists the batches",
                code="batch_not_found",
                param="batch_id",
            )
        return found

    def batch_directory(self, batch: Batch) -> Path:
        """Return the folder of a batch."""
        return self._batches_directory / batch.id

    def save(self, batch: Batch) -> None:
        """Write a batch to disk. Raises OSError."""
        with self._lock:
            _write_json(self.batch_directory(batch) / "batch.json", dataclasses.asdict(batch))

    def wrote(self, batch: Batch, num_bytes: int) -> bool:
        """Note the size of a batch's records, and return whether the tenant's files still fit."""
        with self._lock:
            self._record_bytes[batch.id] = num_bytes
            return self.num_bytes <= self._settings.max_file_bytes

    def publish(self, batch: Batch) -> None:
        """Make files of the records of a batch whose `finalizing_at` is set.

        A second call continues where a crash interrupted the first.

        Raises:
            OSError: a file cannot be moved or written.
        """
        with self._lock:
            records = self.batch_directory(batch)
            kinds = (("answers", "output"), ("errors", "error"))
            for name, kind in kinds:
                path = records / f"{name}.jsonl"
                field = f"{kind}_file_id"
                if getattr(batch, field) is None:
                    if not (path.exists() and path.stat().st_size):
                        continue
                    setattr(batch, field, new_file_id())
                    self.save(batch)
                file_id = getattr(batch, field)
                if file_id in self._files:
                    continue
                target = self._files_directory / f"{file_id}.jsonl"
                if path.exists():
                    replace_file(path, target)
                elif not target.exists():
                    continue  # a client deleted the file before the crash
                self._keep(
                    StoredFile(
                        file_id,
                        f"{batch.id}_{kind}.jsonl",
                        "batch_output",
                        target.stat().st_size,
                        self.now(),
                        self.now() + batch.output_seconds,
                    )
                )
            self._record_bytes.pop(batch.id, None)

    def expire(self) -> None:
        """Remove files and finished batches whose time is over."""
        with self._lock:
            now = self.now()
            self._undeleted, left = [], self._undeleted
            for path in left:
                self._unlink(path)
            used = {one.input_file_id for one in self._batches.values() if not one.is_finished}
            for file in list(self._files.values()):
                if file.expires_at <= now and file.id not in used:
                    self._remove(file)
            for batch in list(self._batches.values()):
                if (end := batch.finished_at) and end + self._settings.batch_retention <= now:
                    self._forget(batch)

    # Private: the folder.

    def _load(self) -> None:
        for path in self._files_directory.glob("*.json"):
            if FILE_ID.fullmatch(path.stem) and (found := _read_json(path)) is not None:
                with contextlib.suppress(TypeError):
                    file = StoredFile(**found)
                    if file.id == path.stem and self.path_of(file).exists():
                        self._files[file.id] = file
        for path in list(self._batches_directory.iterdir()):
            if BATCH_ID.fullmatch(path.name) and not (path / "batch.json").exists():
                shutil.rmtree(path, ignore_errors=True)  # its process died at once
            if BATCH_ID.fullmatch(path.name) and (found := _read_json(path / "batch.json")):
                with contextlib.suppress(TypeError):
                    batch = Batch(**found)
                    if batch.id == path.name:
                        self._batches[batch.id] = batch
        moved = {
            file_id
            for batch in self._batches.values()
            if not batch.is_finished
            for file_id in (batch.output_file_id, batch.error_file_id)
        }
        for path in self._files_directory.glob("file-*.jsonl"):
            # A description that cannot be read may be that of a newer version.
            has_description = path.with_suffix(".json").exists()
            if path.stem not in self._files and path.stem not in moved and not has_description:
                path.unlink()  # its process died before the description was written

    def _hold(self, num_bytes: int) -> None:
        """Count the bytes of an upload. Raises ApiError (413) if they are too many."""
        limit = self._settings.max_file_bytes
        with self._lock:
            if self.num_bytes + num_bytes > limit:
                raise ApiError(
                    413,
                    f"the files would take more than {limit} bytes (--max-file-bytes); delete "
                    "files, or send a smaller one",
                    code="file_bytes_limit",
                    headers={"Connection": "close"},
                )
            self._upload_bytes += num_bytes

    def _add(self, upload: Upload, filename: str, purpose: str, seconds: int) -> StoredFile:
        file_id = new_file_id()
        now = self.now()
        shown = "".join(one for one in filename if one.isprintable())[:_MAX_NAME]
        file = StoredFile(file_id, shown or "file", purpose, upload.num_bytes, now, now + seconds)
        finish_file(upload._file, self.path_of(file))
        with self._lock:
            try:
                self._keep(file)
            except OSError:
                self._unlink(self.path_of(file))
                raise
        return file

    def _drop(self, upload: Upload) -> None:
        with self._lock:
            self._num_uploads -= 1
            self._upload_bytes -= upload.num_bytes
        if not upload._file.closed:
            upload._file.close()
            with contextlib.suppress(OSError):
                os.unlink(upload._file.name)

    def _keep(self, file: StoredFile) -> None:
        _write_json(self._files_directory / f"{file.id}.json", dataclasses.asdict(file))
        self._files[file.id] = file

    def _remove(self, file: StoredFile) -> None:
        del self._files[file.id]
        # Without its description, the contents are removed at the next start.
        for suffix in ("json", "jsonl"):
            self._unlink(self._files_directory / f"{file.id}.{suffix}")

    def _unlink(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except PermissionError:
            # On Windows, a client that downloads the file keeps it. `expire` tries again.
            self._undeleted.append(path)

    def _forget_finished(self) -> None:
        """Forget the oldest finished batches if there are too many."""
        finished = [one for one in self.batches() if one.is_finished]
        for batch in finished[_MAX_FINISHED:]:
            self._forget(batch)

    def _forget(self, batch: Batch) -> None:
        del self._batches[batch.id]
        self._record_bytes.pop(batch.id, None)
        shutil.rmtree(self.batch_directory(batch), ignore_errors=True)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    with new_file(path) as file:
        file.write(json.dumps(value).encode())


def _read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a file, or None if there is none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
