"""Digests of large files, in parts, so that one file uses every core."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, Protocol

from kvboost_edge.host.file_at import FileAt

__all__ = ["digest_in_parts"]

_READ_BYTES = 1 << 20


class _Digest(Protocol):
    def update(self, data: memoryview, /) -> Any: ...
    def digest(self) -> bytes: ...


def digest_in_parts(
    file: IO[bytes],
    stop: int,
    *,
    part_bytes: int,
    num_threads: int,
    algorithm: Callable[[], _Digest] = hashlib.sha256,
) -> str:
    """The digest, in hexadecimal digits, over the digests of every `part_bytes` of the first `stop`
    bytes of an open file.

    algorithm: SHA-256 names content, whoever wrote it; `xxhash.xxh3_128`, some 30 times as fast,
    finds damage. Where the file's position is afterwards is undefined. OSError where the file ends
    early or cannot be read.
    """
    source = FileAt(file)

    def digest(start: int) -> bytes:
        found = algorithm()
        end = min(start + part_bytes, stop)
        # Reading into one buffer, not mapping: mapped pages would count as this process's memory.
        view = memoryview(bytearray(min(_READ_BYTES, end - start)))
        while start < end:
            count = source.read_into(view[: min(len(view), end - start)], start)
            if not count:
                raise OSError(f"the file ends {end - start} bytes early")
            found.update(view[:count])
            start += count
        return found.digest()

    with ThreadPoolExecutor(num_threads, thread_name_prefix="kvboost-digest") as pool:
        whole = algorithm()
        whole.update(memoryview(b"".join(pool.map(digest, range(0, stop, part_bytes)))))
        return whole.digest().hex()
