"""Consoles that print text literally, because brackets in paths or answers are not markup."""

from __future__ import annotations

import io
import sys

from rich.console import Console
from rich.progress import TextColumn
from rich.status import Status
from rich.text import Text

from kvboost_edge.errors import RequestError

__all__ = ["counted", "open_console", "piped_text", "spinner", "text_column"]


def open_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Open a console that adds no styles of its own. Pass styles to `print`, or use a `Text`."""
    return Console(stderr=stderr, quiet=quiet, markup=False, emoji=False, highlight=False)


def piped_text() -> str:
    """Return the text on standard input, with all line breaks as line feeds.

    Raises:
        RequestError: The input is not UTF-8.
    """
    try:
        data: bytes = sys.stdin.buffer.read()
    except AttributeError:  # a text stream without bytes, as in notebooks
        return sys.stdin.read()
    try:
        return io.StringIO(data.decode(), newline=None).getvalue()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"standard input is not UTF-8 (byte 0x{data[error.start]:02x} at offset "
            f"{error.start}); convert it to UTF-8"
        ) from None


def text_column(text: str, style: str = "none") -> TextColumn:
    """Create a text column for a progress bar. Braces in the format refer to fields of the task."""
    return TextColumn(text, style=style, markup=False)


def spinner(console: Console, text: str) -> Status:
    """Show a spinner with a text while the body runs."""
    return console.status(Text(text))


def counted(number: int, one: str, many: str) -> str:
    """Format a count with its noun, such as "1 file" or "2,000 files"."""
    return f"{number:,} {one if number == 1 else many}"
