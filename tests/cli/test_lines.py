"""Tests of lines typed in a terminal: they can be edited and recalled, and are never written to a
file.
"""

import contextlib
import io
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console

from helpers.server.live_servers import wait_until
from kvboost_edge.cli.chat import Lines

ROOT = Path(__file__).parents[2]
SCRIPT = """
import fcntl
import termios

from kvboost_edge.cli.console import open_console
from kvboost_edge.cli.chat import Lines, _read_line

fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # the terminal sends SIGINT to this process
console = open_console()
lines = Lines(console, "you ›", "bold cyan")
while (line := _read_line(lines, console)) is not None:
    print("read", repr(line), flush=True)
print("the end", flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_a_terminal_has_line_editing_and_history(tmp_path):
    """Lines can be edited and recalled. Ctrl-C discards a line, and Ctrl-D ends the input."""
    pytest.importorskip("readline")
    ours, theirs = os.openpty()
    environment = {**os.environ, "HOME": str(tmp_path), "TERM": "xterm", "INPUTRC": os.devnull}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=ROOT,
        env=environment,
        start_new_session=True,
    )
    os.close(theirs)
    pieces = []

    def read():
        with contextlib.suppress(OSError):  # the process has ended
            while piece := os.read(ours, 4096):
                pieces.append(piece)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for typed, got in (
            (b"Hello\n", "read 'Hello'"),
            (b"ac\x1b[Db\n", "read 'abc'"),  # one to the left
            (b"\x1b[A\x1b[A!\n", "read 'Hello!'"),  # two up
            (b"lost\x03", "Ctrl-D or /quit exits"),
            (b"kept\n", "read 'kept'"),
            (b"\x04", "the end"),
        ):
            wait_until(
                lambda: (
                    b"".join(pieces).count("you ›".encode())
                    > sum(b"".join(pieces).count(one) for one in (b"read ", b"/quit exits"))
                ),
                "a prompt",
            )
            os.write(ours, typed)
            wait_until(lambda got=got: got.encode() in b"".join(pieces), got)
    finally:
        process.kill()
        process.wait()
        reader.join(timeout=10)
        os.close(ours)
    assert not list(tmp_path.iterdir()), "prompts must not be written to a file"


def test_without_a_terminal_lines_are_read_plainly(typed):
    typed("one\ntwo\n")
    lines = Lines(Console(file=io.StringIO()), "you ›", "bold cyan")
    assert [lines.read(), lines.read()] == ["one", "two"]
    with pytest.raises(EOFError):
        lines.read()


def test_prompt_colours_have_zero_width():
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard")
    shown = Lines(console, "you ›", "bold cyan")._shown()
    assert shown == "\x01\x1b[1;36m\x02you ›\x01\x1b[0m\x02 "
