"""The consoles of the commands. Their text is text: brackets in a path, a reason or an answer are
no markup.
"""

from __future__ import annotations

from rich.console import Console
from rich.progress import TextColumn
from rich.status import Status
from rich.text import Text

__all__ = ["counted", "open_console", "spinner", "text_column"]


def open_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """A console that shows what it is given as it is; styles are arguments of `print` or in
    `Text`.
    """
    return Console(stderr=stderr, quiet=quiet, markup=False, emoji=False)


def text_column(text: str, style: str = "none") -> TextColumn:
    """A column of a progress bar; fields of the task stand in braces."""
    return TextColumn(text, style=style, markup=False)


def spinner(console: Console, text: str) -> Status:
    """What turns in a terminal while something is done."""
    return console.status(Text(text))


def counted(number: int, one: str, many: str) -> str:
    """ "1 file", "2,000 files"."""
    return f"{number:,} {one if number == 1 else many}"
