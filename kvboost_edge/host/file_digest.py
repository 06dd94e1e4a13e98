"""SHA-256 of large files, in parts, so that one file uses every core."""

from __future__ import annotations

import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import IO

__all__ = ["digest_in_parts"]

_READ_BYTES = 1 << 20


def digest_in_parts(file: IO[bytes], stop: int, *, part_bytes: int, num_threads: int) -> str:
    """SHA-256, 64 hexadecimal digits, over the SHA-256 of every `part_bytes` of the first `stop` bytes of an open file.

    Where its position is afterwards is undefined. OSError where the file ends early or cannot be read.
    """
    turn = threading.Lock()

    def digest(start: int) -> bytes:
        found, end = hashlib.sha256(), min(start + part_bytes, stop)
        # Reading into one buffer, not mapping: mapped pages would count as this process's memory.
        view = memoryview(bytearray(min(_READ_BYTES, end - start)))
        while start < end:
            count = _read(file, view[: min(len(view), end - start)], start, turn)
            if not count:
                raise OSError(f"the file ends {end - start} bytes early")
            found.update(view[:count])
            start += count
        return found.digest()

    with ThreadPoolExecutor(num_threads, thread_name_prefix="kvboost-digest") as pool:
        return hashlib.sha256(b"".join(pool.map(digest, range(0, stop, part_bytes)))).hexdigest()


def _read(file: IO[bytes], view: memoryview, start: int, turn: threading.Lock) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(file.fileno(), [view], start)
    with turn:  # systems without it have one position for all threads
        file.seek(start)
        return int(file.readinto(view))  # type: ignore[attr-defined]
