"""Reader for the parts of the protobuf wire format that ONNX files use.

Nothing is copied, and the reader does not recurse. A field that contains a message or a string is a
byte range, which the caller reads or skips.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from typing import NamedTuple

from kvboost_edge.errors import ModelFormatError

__all__ = ["Message", "ProtobufField"]

_VARINT = 0
_EIGHT = 1
_BYTES = 2
_FOUR = 5
_NAMES = {_VARINT: "a number", _EIGHT: "8 bytes", _BYTES: "a range of bytes", _FOUR: "4 bytes"}
_FLOAT = struct.Struct("<f")


class ProtobufField(NamedTuple):
    """Field of a message: the `value` of a varint, or bytes [start, stop) of the file."""

    number: int
    wire: int
    value: int
    start: int
    stop: int


class Message(NamedTuple):
    """Message in bytes [start, stop) of a file.

    Errors are ModelFormatError and give the file and the position.

    Attributes:
        what: description of the message for errors.
    """

    data: mmap.mmap | bytes
    path: str
    start: int
    stop: int
    what: str

    def fields(self) -> Iterator[ProtobufField]:
        """Yield the fields in the order of the file."""
        at = self.start
        while at < self.stop:
            key, at = self._varint(at)
            number = key >> 3
            wire = key & 7
            if not number:
                raise self.error(f"contains a field with number 0 before byte {at}")
            if wire == _VARINT:
                begin = at
                value, at = self._varint(at)
                yield ProtobufField(number, wire, value, begin, at)
                continue
            if wire == _BYTES:
                size, at = self._varint(at)
            elif wire in (_EIGHT, _FOUR):
                size = 8 if wire == _EIGHT else 4
            else:
                raise self.error(f"contains a field of unknown wire type {wire} before byte {at}")
            if size > self.stop - at:
                raise self.error(
                    f"contains a field of {size} bytes at byte {at}, but only {self.stop - at} "
                    "remain"
                )
            yield ProtobufField(number, wire, 0, at, at + size)
            at += size

    def error(self, problem: str) -> ModelFormatError:
        return ModelFormatError(
            f"{self.path}: {self.what} {problem}; the file is truncated or damaged, or is not ONNX"
        )

    def inner(self, field: ProtobufField, what: str) -> Message:
        """Return the message in a field. `what` describes it in errors."""
        self._expect(field, _BYTES)
        return Message(self.data, self.path, field.start, field.stop, what)

    def text(self, field: ProtobufField, limit: int) -> str:
        """Return the string in a field, at most `limit` bytes long."""
        self._expect(field, _BYTES)
        if field.stop - field.start > limit:
            raise self.error(
                f"contains a string of {field.stop - field.start} bytes, more than the limit of "
                f"{limit}"
            )
        try:
            return str(self.data[field.start : field.stop], "utf-8")
        except UnicodeDecodeError as error:
            raise self.error(
                f"contains a string that is not UTF-8 at byte {field.start}"
            ) from error

    def number(self, field: ProtobufField) -> int:
        """Return a varint as a signed 64-bit integer."""
        self._expect(field, _VARINT)
        return _signed(field.value)

    def real(self, field: ProtobufField) -> float:
        """Return a 32-bit float."""
        self._expect(field, _FOUR)
        return float(_FLOAT.unpack_from(self.data, field.start)[0])

    def numbers(self, field: ProtobufField, limit: int) -> list[int]:
        """Return the integers in a field: one integer, or a packed list of at most `limit`."""
        if field.wire == _VARINT:
            return [_signed(field.value)]
        self._expect(field, _BYTES)
        found: list[int] = []
        at = field.start
        piece = self._replace(stop=field.stop)
        while at < field.stop:
            value, at = piece._varint(at)
            found.append(_signed(value))
            if len(found) > limit:
                raise self.error(f"contains more than {limit} numbers in one list")
        return found

    def reals(self, field: ProtobufField, limit: int) -> list[float]:
        """Return the floats in a field: one float, or a packed list of at most `limit`."""
        if field.wire == _FOUR:
            return [self.real(field)]
        self._expect(field, _BYTES)
        count, rest = divmod(field.stop - field.start, _FLOAT.size)
        if rest or count > limit:
            raise self.error(
                f"contains a float list of {field.stop - field.start} bytes, expected at most "
                f"{limit} floats of {_FLOAT.size} bytes"
            )
        return [value for (value,) in _FLOAT.iter_unpack(self.data[field.start : field.stop])]

    def _expect(self, field: ProtobufField, wire: int) -> None:
        if field.wire != wire:
            raise self.error(
                f"contains {_NAMES[field.wire]} as field {field.number}, expected {_NAMES[wire]}"
            )

    def _varint(self, at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            if at >= self.stop:
                raise self.error("ends inside a number")
            byte = self.data[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value & ((1 << 64) - 1), at
            shift += 7
            if shift > 63:
                raise self.error(f"contains a number of more than 10 bytes before byte {at}")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
