"""Named sessions: conversations whose cached prefix a client saved under a name.

A session is a record of the conversation's tokens. The KV itself stays in the pool and the tiers,
where the prefix is found by its tokens. If the tiers evicted a part, restoring recomputes it.

Records are files in the cache directory, or in memory without one:

<cache directory>/sessions/<SHA-256 of the tenant>/<SHA-256 of salt and name>.session
    line 1  magic, and the xxh3-128 of line 2
    line 2  header as JSON, with the xxh3-128 of the rest
    line 3  messages, tools and template variables as JSON
    rest    token ids as int32, little endian

Names are never used as file names. Each file is written whole under a unique name and then renamed,
so a reader finds either the old or the new record, and several processes may write.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from kvboost_edge.config import MAX_SESSION_BYTES, MAX_SESSIONS, SESSION_SECONDS
from kvboost_edge.errors import CapacityError, ConfigError
from kvboost_edge.shareable import ALL_TOKENS
from kvboost_edge.tiers.disk.directory import check_owner
from kvboost_edge.tiers.disk.system_calls import Files, read_file, write_whole

__all__ = [
    "Session",
    "SessionInfo",
    "SessionRecord",
    "SessionStore",
    "delete_record",
    "find_records",
]

_MAGIC = b"KVBOOST-SESSION 1 "
_DIRECTORY = "sessions"
_SUFFIX = ".session"
_OWN = re.compile(r"[0-9a-f]{64}\.session(\.[0-9a-f]{16}\.new)?")
_TENANT = re.compile(r"[0-9a-f]{64}")
_HEADER_BYTES = 1 << 16  # the first two lines are shorter, because names have bounds
_MAX_FILE_BYTES = 1 << 30
_STALE_SECONDS = 60.0  # age at which an unfinished file belongs to a process that died


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """Properties of a session.

    Attributes:
        name: name that the client chose.
        model: name of the model.
        num_tokens: number of tokens of the conversation.
        kv_bytes: size of its full blocks that are shared, and recurrent state.
        record_bytes: size of the record; 0 before it is stored.
        prefix: SHA-256 of the tokens in these blocks, which identifies the pinned blocks.
        created: time when the session was first saved, in seconds since the epoch.
        expires: time when it ends.
        ttl: lifetime in seconds. Restoring a session starts it again.
        prefill: prefill of its blocks; None for the default of the engine.
    """

    name: str
    model: str
    num_tokens: int
    kv_bytes: int
    prefix: str
    created: float
    expires: float
    ttl: float
    prefill: str | None = None
    record_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """Size of KV and record, which counts towards the tenant's limit."""
        return self.kv_bytes + self.record_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class SessionRecord:
    """File of a session, of any tenant.

    Attributes:
        path: the file.
        name: name of the session; "" if the record is damaged.
        model: name of the model; "" if the record is damaged.
        nbytes: size of the file.
        changed: time of the last write, in seconds since the epoch.
        expires: time when the session ends; None if the record is damaged.
    """

    path: Path
    name: str
    model: str
    nbytes: int
    changed: float
    expires: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class Session:
    """A session and its conversation.

    Attributes:
        info: properties of the session.
        token_ids: tokens of the conversation.
        content: messages, tools and template variables that the tokens were rendered from. Empty
            for a session of token ids.
    """

    info: SessionInfo
    token_ids: list[int]
    content: dict[str, Any]

    @classmethod
    def of(
        cls,
        name: str,
        model: str,
        token_ids: Sequence[int],
        content: dict[str, Any],
        *,
        num_shareable: int = ALL_TOKENS,
        block_size: int,
        block_bytes: int,
        state_bytes: int = 0,
        prefill: str | None = None,
        ttl: float = SESSION_SECONDS,
        now: float | None = None,
    ) -> Session:
        """Create a session that is not stored yet.

        Args:
            name: name of the session.
            model: name of the model.
            token_ids: tokens of the conversation.
            content: what the tokens were rendered from.
            num_shareable: number of leading tokens whose KV is kept, see `shareable_end`.
            block_size: number of tokens per block.
            block_bytes: size of a block.
            state_bytes: size of a sequence's recurrent state; 0 without recurrent layers.
            prefill: prefill of its blocks; None for the default of the engine.
            ttl: lifetime in seconds.
            now: current time in seconds since the epoch; None for the clock.
        """
        full = min(len(token_ids), num_shareable) // block_size
        now = float(int(time.time() if now is None else now))  # so that sizes do not vary
        info = SessionInfo(
            name=name,
            model=model,
            num_tokens=len(token_ids),
            kv_bytes=full * block_bytes + state_bytes,
            prefix=hashlib.sha256(_packed(token_ids[: full * block_size])).hexdigest(),
            created=now,
            expires=now + ttl,
            ttl=ttl,
            prefill=prefill,
        )
        return cls(info, list(token_ids), content)


def find_records(cache_directory: Path) -> list[SessionRecord]:
    """Return the records of all tenants, oldest first. May raise OSError."""
    root = cache_directory / _DIRECTORY
    if not root.is_dir() or root.is_symlink():
        return []
    tenants = [path for path in root.iterdir() if _TENANT.fullmatch(path.name)]
    paths = (
        path
        for tenant in tenants
        if tenant.is_dir() and not tenant.is_symlink()
        for path in tenant.iterdir()
        if _OWN.fullmatch(path.name)
    )
    records = [record for record in map(_record, paths) if record is not None]
    return sorted(records, key=lambda record: (record.changed, record.path))


def delete_record(record: SessionRecord, files: Files) -> None:
    """Delete a record, and its tenant's directory if that is then empty. May raise OSError."""
    files.unlink(record.path)
    with contextlib.suppress(OSError):
        record.path.parent.rmdir()


def _record(path: Path) -> SessionRecord | None:
    try:
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            header = _header_of(file.read(_HEADER_BYTES))
    except FileNotFoundError:  # deleted meanwhile
        return None
    if header is None:
        return SessionRecord(path, "", "", stat.st_size, stat.st_mtime, None)
    info = header[1]
    return SessionRecord(path, info.name, info.model, stat.st_size, stat.st_mtime, info.expires)


class SessionStore:
    """Sessions of all tenants. Thread-safe. May block on the disk.

    The directory is read at each call, so several processes may use one directory. Damaged and
    expired records count as missing. The limits hold for each tenant, across its salts.

    Attributes:
        max_sessions: maximum number of a tenant's sessions.
        max_bytes: maximum size of a tenant's sessions in bytes.
    """

    def __init__(
        self,
        cache_directory: Path | None,
        *,
        max_sessions: int = MAX_SESSIONS,
        max_bytes: int = MAX_SESSION_BYTES,
        files: Files | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create a store.

        Args:
            cache_directory: directory of the disk tier; None keeps the records in memory.
            max_sessions: maximum number of a tenant's sessions.
            max_bytes: maximum size of a tenant's sessions.
            files: system calls to use.
            clock: function that returns the time in seconds since the epoch.
        """
        self.max_sessions = max_sessions
        self.max_bytes = max_bytes
        self._root = None if cache_directory is None else cache_directory / _DIRECTORY
        self._files = files or Files()
        self._clock = clock
        self._lock = threading.Lock()
        self._in_memory: dict[str, dict[str, bytes]] = {}

    @property
    def on_disk(self) -> bool:
        """True if sessions survive a restart."""
        return self._root is not None

    def all(self, tenant: str | None, salt: str | None = None) -> list[SessionInfo]:
        """Return a tenant's sessions with this salt, by name."""
        scope = _scope(salt)
        with self._lock:
            found = [info for _, of, info in self._live(_digest(tenant or "")) if of == scope]
        return sorted(found, key=lambda info: info.name)

    def usage(self, tenant: str | None) -> tuple[int, int]:
        """Return the number and bytes of a tenant's sessions, whatever their salts."""
        with self._lock:
            found = [info for _, _, info in self._live(_digest(tenant or ""))]
        return len(found), sum(info.num_bytes for info in found)

    def find(self, tenant: str | None, salt: str | None, name: str) -> Session | None:
        """Return a session, or None if it does not exist, has expired or is damaged."""
        with self._lock:
            return self._find(_digest(tenant or ""), _key(salt, name))

    def check(self, tenant: str | None, salt: str | None, session: Session) -> None:
        """Raise CapacityError if a session would exceed the tenant's limits."""
        with self._lock:
            self._check(_digest(tenant or ""), _key(salt, session.info.name), session, salt)

    def put(
        self, tenant: str | None, salt: str | None, session: Session
    ) -> tuple[SessionInfo, Session | None]:
        """Store a session, which replaces one of the same name.

        The time of its creation is that of the session it replaces.

        Returns:
            The properties of the session, and the session that it replaced.

        Raises:
            CapacityError: it exceeds the tenant's limits, or the disk cannot be written.
        """
        owner = _digest(tenant or "")
        key = _key(salt, session.info.name)
        with self._lock:
            before = self._find(owner, key)
            if before is not None:
                info = dataclasses.replace(session.info, created=before.info.created)
                session = dataclasses.replace(session, info=info)
            data = self._check(owner, key, session, salt)
            self._write(owner, key, data)
        return dataclasses.replace(session.info, record_bytes=len(data)), before

    def remove(self, tenant: str | None, salt: str | None, name: str) -> Session | None:
        """Delete a session and return it, or None if it does not exist."""
        owner = _digest(tenant or "")
        key = _key(salt, name)
        with self._lock:
            found = self._find(owner, key)
            self._unlink(owner, key)
        return found

    def sweep(self) -> None:
        """Delete the expired records of all tenants."""
        with self._lock:
            for owner in self._owners():
                for _ in self._live(owner):
                    pass

    def _find(self, owner: str, key: str) -> Session | None:
        found = _decoded(self._read(owner, key, _MAX_FILE_BYTES))
        return found if found is not None and found.info.expires > self._clock() else None

    def _check(self, owner: str, key: str, session: Session, salt: str | None) -> bytes:
        """Return the encoded record. Raises CapacityError if it exceeds the limits."""
        data = _encoded(session, _scope(salt))
        others = [info for other, _, info in self._live(owner) if other != key]
        if len(others) >= self.max_sessions:
            raise CapacityError(
                f"the session cannot be saved: {len(others)} sessions are stored and the limit is "
                f"max_sessions={self.max_sessions}; delete one, or raise --max-sessions"
            )
        taken = sum(info.num_bytes for info in others)
        size = session.info.kv_bytes + len(data)
        if taken + size > self.max_bytes:
            raise CapacityError(
                f"the session cannot be saved: it takes {size} bytes, other sessions take {taken}, "
                f"and the limit is max_session_bytes={self.max_bytes}; delete sessions, or raise "
                "--max-session-bytes"
            )
        return data

    def _live(self, owner: str) -> Iterator[tuple[str, str, SessionInfo]]:
        """Yield key, scope and properties of an owner's sessions. Deletes expired records."""
        now = self._clock()
        for key in self._keys(owner):
            found = _header_of(self._read(owner, key, _HEADER_BYTES))
            if found is None:
                continue
            scope, info = found
            if info.expires <= now:
                self._unlink(owner, key)
            else:
                yield key, scope, info

    def _owners(self) -> list[str]:
        if self._root is None:
            return list(self._in_memory)
        try:
            return [path.name for path in self._root.iterdir() if _TENANT.fullmatch(path.name)]
        except OSError:
            return []

    def _keys(self, owner: str) -> list[str]:
        if self._root is None:
            return list(self._in_memory.get(owner, ()))
        directory = self._root / owner
        try:
            names = [path.name for path in directory.iterdir() if _OWN.fullmatch(path.name)]
        except OSError:
            return []
        for name in names:
            if not name.endswith(_SUFFIX):
                self._remove_stale(directory / name)
        return [name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)]

    def _remove_stale(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                self._files.unlink(path)

    def _read(self, owner: str, key: str, most: int) -> bytes | None:
        if self._root is None:
            return self._in_memory.get(owner, {}).get(key)
        try:
            return read_file(self._files, self._path(owner, key), most, cuts=True)
        except OSError:
            return None

    def _write(self, owner: str, key: str, data: bytes) -> None:
        if self._root is None:
            self._in_memory.setdefault(owner, {})[key] = data
            return
        try:
            for path in (self._root, self._root / owner):
                self._files.make_directory(path)
                if path.is_symlink():
                    raise CapacityError(
                        f"the session cannot be saved: {path} is a symbolic link; remove it"
                    )
                check_owner(path)
                self._files.make_private(path)
            # Other processes may write the same record, because there is no lock.
            write_whole(self._files, self._path(owner, key), data, mark=f".{secrets.token_hex(8)}")
        except ConfigError as error:
            raise CapacityError(f"the session cannot be saved: {error}") from error
        except OSError as error:
            raise CapacityError(
                f"the session cannot be saved to {self._root}: {error.strerror or error}; free "
                "space there, or choose another disk_cache_dir"
            ) from error

    def _unlink(self, owner: str, key: str) -> None:
        if self._root is None:
            self._in_memory.get(owner, {}).pop(key, None)
            return
        with contextlib.suppress(OSError):
            self._files.unlink(self._path(owner, key))

    def _path(self, owner: str, key: str) -> Path:
        assert self._root is not None
        return self._root / owner / f"{key}{_SUFFIX}"


def _packed(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, dtype="<i4").tobytes()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _scope(salt: str | None) -> str:
    """Return the digest of a salt, so that the salt itself is never stored."""
    return "" if salt is None else _digest(salt)


def _key(salt: str | None, name: str) -> str:
    return _digest(f"{_scope(salt)}/{name}")


def _encoded(session: Session, scope: str) -> bytes:
    content = json.dumps(session.content, ensure_ascii=True, separators=(",", ":")).encode()
    body = content + b"\n" + _packed(session.token_ids)
    fields = dataclasses.asdict(session.info)
    del fields["record_bytes"]
    if fields["prefill"] is None:
        del fields["prefill"]  # earlier versions cannot read it
    described = {**fields, "scope": scope, "body": len(body)}
    described["sum"] = xxhash.xxh3_128_hexdigest(body)
    header = json.dumps(described, ensure_ascii=True).encode()
    return b"\n".join((_MAGIC + xxhash.xxh3_128_hexdigest(header).encode(), header, body))


def _header_of(data: bytes | None) -> tuple[str, SessionInfo] | None:
    """Return the scope and the properties in a record, or None if the header is damaged."""
    found = _fields_of(data)
    if found is None:
        return None
    fields, at = found
    try:
        scope = fields.pop("scope")
        size = fields.pop("body")
        del fields["sum"]
        return scope, SessionInfo(**fields, record_bytes=at + size)
    except (KeyError, TypeError):  # written by another version
        return None


def _fields_of(data: bytes | None) -> tuple[dict[str, Any], int] | None:
    """Return the header's fields and the position of the body, or None if it is damaged."""
    first, _, rest = (data or b"").partition(b"\n")
    header, sign, _ = rest.partition(b"\n")
    if not sign or first != _MAGIC + xxhash.xxh3_128_hexdigest(header).encode():
        return None
    fields: dict[str, Any] = json.loads(header)
    return fields, len(first) + len(header) + 2


def _decoded(data: bytes | None) -> Session | None:
    """Return the session in a record, or None if any part of it is damaged."""
    fields = _fields_of(data)
    found = _header_of(data)
    if data is None or fields is None or found is None:
        return None
    body = data[fields[1] :]
    if len(body) != fields[0]["body"] or xxhash.xxh3_128_hexdigest(body) != fields[0]["sum"]:
        return None
    content, _, tokens = body.partition(b"\n")
    return Session(found[1], np.frombuffer(tokens, dtype="<i4").tolist(), json.loads(content))
