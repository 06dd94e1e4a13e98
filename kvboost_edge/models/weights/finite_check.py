"""Search for NaN and infinity in a tensor on disk, in one streaming pass over its bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.models.weights.nvfp4_parts import bad_scales

__all__ = ["DTYPE_BITS", "first_bad_scale", "first_non_finite"]

# Element type and exponent bits, by dtype name in the file format.
DTYPE_BITS: dict[str, int] = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 8),
    "F4": 4,
}
# All exponent bits of NaN and infinity are set.
_EXPONENTS: dict[str, tuple[type[np.unsignedinteger], int]] = {
    "F64": (np.uint64, 0x7FF0_0000_0000_0000),
    "F32": (np.uint32, 0x7F80_0000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
}
# Fits in the L2 cache, and is large enough to amortize the cost of calls.
_CHUNK_BYTES = 1 << 18


def first_non_finite(path: Path, dtype: str, start: int, stop: int) -> int | None:
    """Return the index of the first NaN or infinite element in bytes [start, stop) of a file, or
    None.

    Integers and 8-bit types are not searched.

    Raises:
        OSError: the file ends early.
    """
    if dtype not in _EXPONENTS or start == stop:
        return None
    kind, exponent = _EXPONENTS[dtype]
    mask = kind(exponent)
    scratch: npt.NDArray[Any] = np.empty(_CHUNK_BYTES // np.dtype(kind).itemsize, dtype=kind)
    done = 0
    for values in _chunks(path, kind, start, stop):
        bits = np.bitwise_and(values, mask, out=scratch[: len(values)])
        if bits.max() == mask:
            return done + int(np.argmax(bits))
        done += len(values)
    return None


def first_bad_scale(path: Path, start: int, stop: int) -> int | None:
    """Return the index of the first NaN or negative NVFP4 scale in bytes [start, stop) of a file,
    or None.

    Raises:
        OSError: the file ends early.
    """
    done = 0
    for bits in _chunks(path, np.uint8, start, stop):
        found = bad_scales(bits)
        if found is not None:
            return done + int(np.argmax(found))
        done += len(bits)
    return None


def _chunks(
    path: Path, kind: type[np.unsignedinteger], start: int, stop: int
) -> Iterator[npt.NDArray[Any]]:
    """Yield the elements in bytes [start, stop) of a file, in views of one buffer."""
    # Read into a private buffer, because mapped pages would count as memory of this process.
    chunk: npt.NDArray[Any] = np.empty(_CHUNK_BYTES // np.dtype(kind).itemsize, dtype=kind)
    raw = chunk.data.cast("B")
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while start < stop:
            count = min(_CHUNK_BYTES, stop - start)
            filled = 0
            while filled < count:
                read = file.readinto(raw[filled:count])
                if not read:
                    raise OSError(f"the file ends {stop - start - filled} bytes early")
                filled += read
            yield chunk[: count // chunk.itemsize]
            start += count
