"""Lines that a person types: in a terminal with the keys for editing, and the lines before them at
hand. They stay in memory: what is typed is a prompt, and no prompt is kept.
"""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any

from rich.console import Console
from rich.text import Text

__all__ = ["Lines"]

_COLOURS = re.compile(r"(\x1b\[[0-9;]*m)")


class Lines:
    """Asks for one line after another, each of which the arrow keys find again."""

    def __init__(self, console: Console, prompt: str, style: str) -> None:
        self._console = console
        self._prompt = Text.assemble((prompt, style), " ")
        self._readline = _readline() if console.is_terminal and sys.stdin.isatty() else None
        if self._readline is not None:
            self._readline.clear_history()

    def read(self) -> str:
        """The next line, without its end. Raises EOFError at the end of input, KeyboardInterrupt on
        Ctrl-C.
        """
        if self._readline is None:
            return self._console.input(self._prompt)
        return input(self._shown())

    def _shown(self) -> str:
        """The prompt as readline takes it: told which of its characters take no room, it knows
        where the line begins, also after it was edited.
        """
        with self._console.capture() as capture:
            self._console.print(self._prompt, end="")
        return _COLOURS.sub("\x01\\1\x02", capture.get())


def _readline() -> Any:
    """The module that edits lines, which `input` uses once it is there; None on systems without
    one.
    """
    try:
        return importlib.import_module("readline")
    except ImportError:
        return None
