"""Digests of large files, computed in parts to use all cores."""

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
    """Return a hexadecimal digest of a file, computed from the digests of its parts.

    The file's position is undefined afterwards.

    Args:
        file: An open binary file.
        stop: Number of bytes to digest, from the start of the file.
        part_bytes: Size of a part in bytes.
        num_threads: Number of threads.
        algorithm: Hash function. SHA-256 identifies content, even from untrusted writers.
            `xxhash.xxh3_128` is about 30 times as fast and only detects damage.

    Raises:
        OSError: The file ends early or cannot be read.
    """
    source = FileAt(file)

    def digest(start: int) -> bytes:
        found = algorithm()
        end = min(start + part_bytes, stop)
        # Read into one buffer, because mapped pages would count as this process's memory.
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
