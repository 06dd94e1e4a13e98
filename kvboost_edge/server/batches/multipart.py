"""Incremental parser of multipart/form-data, which never holds a file in memory."""

from __future__ import annotations

from collections.abc import Callable
from email.message import Message
from email.parser import HeaderParser

from kvboost_edge.server.api_errors import ApiError

__all__ = ["FormReader"]

_MAX_HEAD = 8 * 1024  # bytes of the headers of a part
_MAX_FIELD = 8 * 1024  # bytes of a part that is not the file
_MAX_PARTS = 16
_MAX_BOUNDARY = 200


class FormReader:
    """A form with one file and short fields, fed piece by piece.

    Attributes:
        fields: text fields by name.
        filename: the client's name of the file; None before the file.
    """

    def __init__(self, content_type: str, write: Callable[[bytes], None]) -> None:
        """Create a reader.

        Args:
            content_type: value of the Content-Type header.
            write: function that takes the bytes of the file.

        Raises:
            ApiError: the body is no form (400).
        """
        header = Message()
        header["content-type"] = content_type
        boundary = header.get_param("boundary")
        if (
            header.get_content_type() != "multipart/form-data"
            or not isinstance(boundary, str)
            or not 1 <= len(boundary) <= _MAX_BOUNDARY
            or not boundary.isascii()
        ):
            raise _malformed("send the file as multipart/form-data with a boundary")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._write = write
        self._delimiter = b"\r\n--" + boundary.encode()
        self._buffer = bytearray(b"\r\n")  # the first delimiter may begin the body
        self._part: str | None = None  # name of the current part; None before the first
        self._in_head = self._is_file = self._is_done = False
        self._field = bytearray()
        self._num_parts = 0

    def feed(self, data: bytes) -> None:
        """Read the next bytes of the body.

        Raises:
            ApiError: the form is malformed or too large (400), or `write` refuses (any status).
        """
        self._buffer += data
        while not self._is_done and (self._read_head() if self._in_head else self._read_part()):
            pass
        if self._is_done:
            self._buffer.clear()  # an epilogue has no meaning

    def end(self) -> None:
        """Check that the form is complete.

        Raises:
            ApiError: the end or the file is missing (400).
        """
        if not self._is_done:
            raise _malformed("the body ends before the form does")
        if self.filename is None:
            raise ApiError(
                400, "the form has no file; send it as 'file'", code="invalid_value", param="file"
            )

    def _read_head(self) -> bool:
        """Read the headers of a part, and return whether they were complete."""
        end = self._buffer.find(b"\r\n\r\n")
        if end > _MAX_HEAD or (end < 0 and len(self._buffer) > _MAX_HEAD):
            raise _malformed(f"the headers of a part have more than {_MAX_HEAD} bytes")
        if end < 0:
            return False
        # Browsers and clients write names in UTF-8.
        head = HeaderParser().parsestr(self._buffer[: end + 4].decode(errors="replace"))
        del self._buffer[: end + 4]
        name = head.get_param("name", header="content-disposition")
        if head.get_content_disposition() != "form-data" or not isinstance(name, str):
            raise _malformed("a part has no Content-Disposition with a name")
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise _malformed(f"the form has more than {_MAX_PARTS} parts")
        if name in self.fields or (name == "file" and self.filename is not None):
            raise _malformed(f"the form has two parts {name[:80]!r}")
        self._part, self._is_file, self._in_head = name, name == "file", False
        self._field.clear()
        if self._is_file:
            self.filename = head.get_filename("") or "file"
        return True

    def _read_part(self) -> bool:
        """Read content up to the next delimiter, and return whether it was found."""
        at = self._buffer.find(self._delimiter)
        # Without a delimiter, the last bytes may be the beginning of one.
        keep = len(self._delimiter) - 1
        end = at if at >= 0 else max(0, len(self._buffer) - keep)
        if end:
            self._take(bytes(self._buffer[:end]))
            del self._buffer[:end]
        behind = len(self._delimiter)
        if at < 0 or len(self._buffer) < behind + 2:
            return False
        mark = bytes(self._buffer[behind : behind + 2])
        if mark not in (b"--", b"\r\n"):
            raise _malformed("a boundary is followed by other bytes")
        if self._part is not None and not self._is_file:
            try:
                self.fields[self._part] = self._field.decode()
            except UnicodeDecodeError:
                raise _malformed("a field is not UTF-8") from None
        del self._buffer[: behind + 2]
        self._is_done, self._in_head = mark == b"--", mark != b"--"
        return True

    def _take(self, data: bytes) -> None:
        if self._is_file:
            self._write(data)
        elif self._part is not None:
            self._field += data
            if len(self._field) > _MAX_FIELD:
                raise _malformed(f"the field {self._part[:80]!r} has more than {_MAX_FIELD} bytes")


def _malformed(reason: str) -> ApiError:
    return ApiError(400, f"the form cannot be read: {reason}", code="invalid_form")
