"""Reader for GGUF files (versions 2 and 3) that checks every length, offset, type and count before
use.

    "GGUF" | u32 version | u64 tensor count | u64 key count | metadata | tensor infos | padding |
    tensor data

Files are not read with the `gguf` package, which trusts counts, offsets and string lengths. With
it, a damaged file can cause an endless loop, a huge allocation or a wrong view instead of an error.
The tests compare results with those of the `gguf` package.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.host.file_memo import FileStamp
from kvboost_edge.models.gguf.blocks import BLOCKS, EARLY_TYPES, TYPE_NAMES, refusal
from kvboost_edge.models.weights.file_bytes import read_bytes

__all__ = ["GgufHeader", "GgufPart", "GgufTensor", "read_gguf"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# Limit for metadata and tensor infos. The largest vocabularies take about 10 MB, so a larger header
# is damaged.
_MAX_HEADER_BYTES = 100_000_000
_MAX_KEY_BYTES = 65_535
_MAX_NAME_BYTES = 1024
_MAX_DIMS = 4
_MAX_ALIGNMENT = 1 << 20
_MAX_PADDING = 4096  # zeros after the last tensor, from tools that pad to a page
_MAX_KEYS = 10_000  # real files have about a hundred
_MAX_STRINGS = 4_000_000  # in all arrays; the largest vocabularies with merges have 800,000
_MANY_TENSORS = (
    10_000  # above this, files must have _MIN_TENSOR_BYTES per tensor, because checks take seconds
)
_MIN_TENSOR_BYTES = 1024  # minimum average size of a tensor and its info
_MAX_NESTED = 100_000  # arrays in an array; no key used here has any
_DEFAULT_ALIGNMENT = 32
# Prefix of keys of models whose activations are multiplied by a Hadamard matrix.
_ROTATED = "prism.hadamard."
_BOOL = 7
_STRING = 8
_ARRAY = 9
_FLOAT32 = 6
_SCALARS: dict[int, npt.DTypeLike] = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    _FLOAT32: "<f4",
    _BOOL: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
# A key consists of a length, a type and a value. A tensor info consists of a length, a number of
# dimensions, at least one dimension, a type and an offset.
_MIN_KEY_BYTES = 8 + 4 + 1
_MIN_INFO_BYTES = 8 + 4 + 8 + 4 + 8
_LENGTH = struct.Struct("<Q")


class _Nested(NamedTuple):
    """Array of arrays, whose contents are skipped. Reading it raises an error."""

    length: int


class _Strings(NamedTuple):
    """Array of strings that was not read, at bytes [start, stop) of the file.

    Vocabularies are large and are needed only once.
    """

    start: int
    stop: int
    length: int


@dataclasses.dataclass(frozen=True, slots=True)
class GgufTensor:
    """Location of a tensor.

    Attributes:
        shape: shape with the outermost axis first.
        start: byte offset of the data in the file.
        stop: byte offset of the end of the data.
        part: index of the file among the model's files.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    start: int
    stop: int
    part: int = 0


class _Info(NamedTuple):
    """A tensor as the header describes it: name, type, shape and offset of its data."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int


class GgufPart(NamedTuple):
    """One of the files of a model.

    Attributes:
        stamp: stamp of the file when its header was read. If the file now has another stamp, the
            offsets in the header are invalid.
    """

    path: Path
    stamp: FileStamp


@dataclasses.dataclass(frozen=True, slots=True)
class GgufHeader:
    """Contents of a GGUF model without the tensor data.

    A metadata value is an int, float, bool, str or NumPy array, an array of strings (see
    `strings`), or an array of arrays, which is not kept. A split model has its metadata in the
    first file.

    Attributes:
        tensors: tensors in the order of their data.
        parts: files of the model, more than one if it is split.
    """

    parts: tuple[GgufPart, ...]
    version: int
    values: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def path(self) -> Path:
        """Path of the file that contains the metadata: the only file, or the first of a split
        model.
        """
        return self.parts[0].path

    def path_of(self, tensor: GgufTensor) -> Path:
        return self.parts[tensor.part].path

    def strings(self, key: str) -> list[str]:
        """Return an array of strings.

        Raises:
            ModelFormatError: the key is missing or has another type.
        """
        found = self.values.get(key)
        if not isinstance(found, _Strings):
            raise ModelFormatError(
                f"{self.path}: key {key!r} must be an array of strings, {_described(found)}"
            )
        data = read_bytes(self.path, found.start, found.stop)
        return _decoded(self.path, key, data.tobytes(), found.length)

    def value(self, key: str, *kinds: type) -> Any:
        """Return the value of a key, or None if it is missing.

        Raises:
            ModelFormatError: the type of the value is not one of `kinds`.
        """
        found = self.values.get(key)
        if found is None or (
            isinstance(found, kinds) and not (isinstance(found, bool) and bool not in kinds)
        ):
            return found
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise ModelFormatError(f"{self.path}: key {key!r} must be {wanted}, {_described(found)}")

    def has_strings(self, key: str) -> bool:
        return isinstance(self.values.get(key), _Strings)

    def length(self, key: str) -> int:
        """Return the length of an array of strings."""
        return int(self.values[key].length)


def read_gguf(path: Path | str) -> GgufHeader:
    """Return the header of one GGUF file.

    Raises:
        ModelFormatError: the file is invalid; the message names the key or tensor.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                raise ModelFormatError(
                    f"{path} has {size} bytes, too few for a GGUF file; it is truncated"
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                return _read(path, FileStamp.of_open(file, path), mapped)
    except OSError as error:
        raise ModelFormatError(f"{path} cannot be read: {error}") from error


class _Cursor:
    """Reading position in the header, which never passes its end."""

    def __init__(self, path: Path, data: mmap.mmap | bytes, end: int) -> None:
        self.path = path
        self.data = data
        self.end = end
        self.at = 0
        self.num_strings = 0

    def left(self) -> int:
        return self.end - self.at

    def take(self, count: int, what: str) -> int:
        """Advance by `count` bytes and return the previous position."""
        if count > self.left():
            raise ModelFormatError(
                f"{self.path}: {what} needs {count} bytes at byte {self.at}, but only "
                f"{self.left()} remain for the header; the file is truncated or damaged"
            )
        at = self.at
        self.at += count
        return at

    def number(self, size: int, what: str) -> int:
        at = self.take(size, what)
        return int.from_bytes(self.data[at : at + size], "little")

    def text(self, what: str, limit: int) -> str:
        length = self.number(8, what)
        if length > limit:
            raise ModelFormatError(
                f"{self.path}: {what} has {length} bytes, more than the limit of {limit}"
            )
        at = self.take(length, what)
        try:
            return str(self.data[at : at + length], "utf-8")
        except UnicodeDecodeError as error:
            raise ModelFormatError(f"{self.path}: {what} is not UTF-8: {error}") from error

    def strings(self, count: int, what: str) -> _Strings:
        if count > self.left() // 8:
            self.take(8 * count, what)
        self.num_strings += count
        if self.num_strings > _MAX_STRINGS:
            raise ModelFormatError(
                f"{self.path}: the file contains more than {_MAX_STRINGS} strings, including {what}"
            )
        start = self.at
        at = self.at
        unpack = _LENGTH.unpack_from
        for _ in range(count):
            if at + 8 > self.end:
                break
            at += 8 + unpack(self.data, at)[0]
        self.take(at - start, what)
        return _Strings(start, at, count)


def _read(path: Path, stamp: FileStamp, mapped: mmap.mmap) -> GgufHeader:
    size = len(mapped)
    cursor = _Cursor(path, mapped, min(size, _MAX_HEADER_BYTES))
    if mapped[:4] != _MAGIC:
        raise ModelFormatError(
            f"{path} is not a GGUF file: it begins with {bytes(mapped[:4])!r}, not {_MAGIC!r}"
        )
    cursor.take(4, "the magic")
    version = cursor.number(4, "the version")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        why = "it is big-endian" if swapped in _VERSIONS else f"supported: {_VERSIONS}"
        raise ModelFormatError(f"{path} has GGUF version {version}, which is not supported: {why}")
    counts = cursor.number(8, "the number of tensors"), cursor.number(8, "the number of keys")
    for count, least, what in zip(
        counts, (_MIN_INFO_BYTES, _MIN_KEY_BYTES), ("tensors", "keys"), strict=True
    ):
        if count > cursor.left() // least:
            raise ModelFormatError(
                f"{path} claims {count} {what}, more than its {size} bytes can hold; it is "
                "truncated or damaged"
            )
    if counts[1] > _MAX_KEYS:
        raise ModelFormatError(
            f"{path} claims {counts[1]} keys, more than the limit of {_MAX_KEYS}; real models have "
            "about a hundred"
        )
    if counts[0] > max(_MANY_TENSORS, size // _MIN_TENSOR_BYTES):
        raise ModelFormatError(
            f"{path} claims {counts[0]} tensors, too many for its {size} bytes; download the "
            "file again"
        )
    values = _read_values(cursor, counts[1])
    rotated = next((key for key in values if key.startswith(_ROTATED)), None)
    if rotated is not None:
        raise ModelFormatError(
            f"{path}: key {rotated!r} says that activations must be rotated, which is not "
            "supported; use a Q2_0 or Q1_0 file of this model"
        )
    alignment = values.get("general.alignment", _DEFAULT_ALIGNMENT)
    if (
        not isinstance(alignment, int)
        or not 1 <= alignment <= _MAX_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        raise ModelFormatError(
            f"{path}: general.alignment={alignment!r} is not a power of two up to {_MAX_ALIGNMENT}"
        )
    infos = [_read_info(cursor, alignment) for _ in range(counts[0])]
    start = -(-cursor.at // alignment) * alignment
    tensors = _place_any(path, infos, start, alignment, mapped)
    return GgufHeader(
        (GgufPart(path, stamp),), version, MappingProxyType(values), MappingProxyType(tensors)
    )


def _read_values(cursor: _Cursor, count: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for index in range(count):
        key = cursor.text(f"key number {index}", _MAX_KEY_BYTES)
        if key in values:
            raise ModelFormatError(f"{cursor.path}: key {key!r} appears twice")
        kind = cursor.number(4, f"the type of key {key!r}")
        values[key] = _read_array(cursor, key) if kind == _ARRAY else _read_value(cursor, key, kind)
    return values


def _read_value(cursor: _Cursor, key: str, kind: int) -> Any:
    if kind == _STRING:
        return cursor.text(f"the value of key {key!r}", _MAX_HEADER_BYTES)
    value = _read_numbers(cursor, key, kind, 1)[0]
    if kind == _FLOAT32:
        return float(str(value))  # 1e-05 as written, not 9.999999747378752e-06
    return value.item()


def _read_array(cursor: _Cursor, key: str) -> Any:
    kind = cursor.number(4, f"the element type of key {key!r}")
    count = cursor.number(8, f"the length of key {key!r}")
    if kind == _STRING:
        return cursor.strings(count, f"the {count} strings of key {key!r}")
    if kind == _ARRAY:
        _skip_arrays(cursor, key, count)
        return _Nested(count)
    return _read_numbers(cursor, key, kind, count)


def _skip_arrays(cursor: _Cursor, key: str, count: int) -> None:
    """Skip `count` arrays, which may be nested.

    All nested arrays count toward one limit, so that a damaged count soon raises an error.
    """
    left = [count]
    num_skipped = 0
    while left:
        if not left[-1]:
            left.pop()
            continue
        left[-1] -= 1
        num_skipped += 1
        if num_skipped > _MAX_NESTED:
            raise ModelFormatError(
                f"{cursor.path}: key {key!r} contains more than {_MAX_NESTED} nested arrays"
            )
        kind = cursor.number(4, f"the element type of an array in key {key!r}")
        inner = cursor.number(8, f"the length of an array in key {key!r}")
        if kind == _ARRAY:
            left.append(inner)
        elif kind == _STRING:
            cursor.strings(inner, f"the {inner} strings of an array in key {key!r}")
        else:
            _read_numbers(cursor, key, kind, inner)


def _read_numbers(cursor: _Cursor, key: str, kind: int, count: int) -> npt.NDArray[Any]:
    if kind not in _SCALARS:
        raise ModelFormatError(f"{cursor.path}: key {key!r} has unknown value type {kind}")
    dtype = np.dtype(_SCALARS[kind])
    at = cursor.take(count * dtype.itemsize, f"the value of key {key!r}")
    values = np.frombuffer(cursor.data[at : cursor.at], dtype)
    if kind != _BOOL:
        return values
    if count and values.max() > 1:
        raise ModelFormatError(
            f"{cursor.path}: key {key!r} has the value {values.max()}, which is not a boolean"
        )
    return values.astype(np.bool_)


def _read_info(cursor: _Cursor, alignment: int) -> _Info:
    name = cursor.text("the name of a tensor", _MAX_NAME_BYTES)
    what = f"tensor {name!r}"
    num_dims = cursor.number(4, what)
    if not 1 <= num_dims <= _MAX_DIMS:
        raise ModelFormatError(
            f"{cursor.path}: {what} has {num_dims} dimensions; supported: 1 to {_MAX_DIMS}"
        )
    inner_first = [cursor.number(8, what) for _ in range(num_dims)]
    number = cursor.number(4, what)
    offset = cursor.number(8, what)
    kind = TYPE_NAMES.get(number)
    if kind not in BLOCKS:
        raise ModelFormatError(
            f"{cursor.path}: {what} has type {kind or number}, which is not supported: "
            f"{refusal(kind or '')}"
        )
    if (
        min(inner_first) < 1
        or math.prod(inner_first) >= 1 << 62
        or inner_first[0] % BLOCKS[kind].weights
    ):
        raise ModelFormatError(
            f"{cursor.path}: {what} of type {kind} has invalid shape {tuple(inner_first)} "
            f"(innermost first; rows must be multiples of {BLOCKS[kind].weights})"
        )
    if offset % alignment:
        raise ModelFormatError(
            f"{cursor.path}: {what} is at offset {offset}, not a multiple of {alignment}"
        )
    return _Info(name, kind, tuple(reversed(inner_first)), offset)


def _place_any(
    path: Path,
    infos: list[_Info],
    start: int,
    alignment: int,
    mapped: mmap.mmap,
) -> dict[str, GgufTensor]:
    """Return the result of `_place` with the current or the early block sizes of types, whichever
    agree with the offsets.
    """
    try:
        return _place(path, infos, start, alignment, mapped)
    except ModelFormatError:
        early = [info._replace(type=EARLY_TYPES.get(info.type, info.type)) for info in infos]
        if early == infos:
            raise
        with contextlib.suppress(ModelFormatError):
            return _place(path, early, start, alignment, mapped)
        raise


def _place(
    path: Path,
    infos: list[_Info],
    start: int,
    alignment: int,
    mapped: mmap.mmap,
) -> dict[str, GgufTensor]:
    """Return the tensors by name, in the order of their data.

    The first must begin at `start`. All must be aligned and without gaps, and only zeros may follow
    the last.
    """
    size = len(mapped)
    tensors: dict[str, GgufTensor] = {}
    for name, kind, shape, offset in sorted(infos, key=lambda info: info.offset):
        if name in tensors:
            raise ModelFormatError(f"{path}: tensor {name!r} appears twice")
        block = BLOCKS[kind]
        if shape[-1] % block.weights:
            raise ModelFormatError(
                f"{path}: tensor {name!r} of type {kind} has rows of {shape[-1]} weights, not a "
                f"multiple of {block.weights}"
            )
        at = start + offset
        stop = at + math.prod(shape) // block.weights * block.nbytes
        if stop > size:
            raise ModelFormatError(
                f"{path}: tensor {name!r} ends at byte {stop}, but the file has {size} bytes; it "
                "is truncated or damaged"
            )
        tensors[name] = GgufTensor(name, kind, shape, at, stop)
    end = start
    for tensor in tensors.values():
        if tensor.start < end:
            raise ModelFormatError(
                f"{path}: tensor {tensor.name!r} at byte {tensor.start} overlaps the previous "
                f"tensor, which ends at {end}"
            )
        if tensor.start - end >= alignment:
            raise ModelFormatError(
                f"{path} contains {tensor.start - end} unexpected bytes before tensor "
                f"{tensor.name!r}"
            )
        end = tensor.stop
    if size - end >= alignment and (size - end > _MAX_PADDING or mapped[end:].strip(b"\0")):
        raise ModelFormatError(
            f"{path} contains {size - end} unexpected bytes after the last tensor"
        )
    return tensors


def _decoded(path: Path, key: str, data: bytes, count: int) -> list[str]:
    """Decode `count` strings, each preceded by its length."""
    found = []
    at = 0
    unpack = _LENGTH.unpack_from
    try:
        for _ in range(count):
            start = at + 8
            at = start + unpack(data, at)[0]
            found.append(data[start:at].decode())
    except (UnicodeDecodeError, struct.error) as error:
        raise ModelFormatError(
            f"{path}: entry {len(found)} of key {key!r} is not UTF-8: {error}"
        ) from error
    return found


def _described(value: Any) -> str:
    if value is None:
        return "but it is missing"
    if isinstance(value, (_Strings, _Nested)):
        return f"got an array of {'strings' if isinstance(value, _Strings) else 'arrays'}"
    return f"got {value!r:.60}"
