"""Processes that share a cache directory and are killed. One process imports everything and forks
for each of them.

Each process keeps a journal with a line per observation. "hit owner" means that it found blocks on
disk, "miss owner" that it found none; the second word, "owner" or "reader", is the role of the
process at that moment. "wrong ..." reports a failed check, "stored N" the blocks that are on disk
from then on.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from helpers.server.live_servers import wait_until

_BEGIN = """
import os
from pathlib import Path

def journal_of(directory, name):
    handle = os.open(Path(directory) / f"{name}.journal", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    return lambda *words: os.write(handle, (" ".join(map(str, words)) + "\\n").encode())
"""

_LOOP = """
import json, os, signal, sys, traceback

signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead leave nothing to wait for
for line in sys.stdin:
    child = os.fork()  # before this process has any thread
    if not child:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            run(*json.loads(line))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    print(child, flush=True)
"""


class Herd:
    """Processes that each run the function `run(directory, name, ...)` of the given code."""

    def __init__(self, server: subprocess.Popen[str], directory: Path) -> None:
        self._server = server
        self._directory = directory
        self._names = iter(range(1 << 30))
        self._pids: dict[int, int] = {}

    @property
    def names(self) -> list[int]:
        """Names of the running processes."""
        return list(self._pids)

    @property
    def owner(self) -> int | None:
        """The process whose last journal line says that it owns the directory."""
        return next((name for name in self._pids if self._last(name).endswith("owner")), None)

    def start(self, *arguments: Any) -> None:
        """Call `run` in a new process."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        name = next(self._names)
        self._server.stdin.write(json.dumps([str(self._directory), name, *arguments]) + "\n")
        self._server.stdin.flush()
        self._pids[name] = int(self._server.stdout.readline())

    def kill(self, name: int) -> None:
        """Kill a process with SIGKILL and wait until it has ended."""
        self.assert_sound()
        pid = self._pids.pop(name)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not _is_running(pid), "the process to be gone")

    def lines(self, name: int) -> list[str]:
        """Return the journal of a process, without an incomplete last line."""
        path = self._directory / f"{name}.journal"
        return path.read_text().split("\n")[:-1] if path.exists() else []

    def all_lines(self) -> list[str]:
        """Return the journals of all processes, including dead ones."""
        return [
            line
            for path in self._directory.glob("*.journal")
            for line in self.lines(int(path.stem))
        ]

    def assert_sound(self) -> None:
        """Assert that no process ended by itself or reported a failed check."""
        assert not [line for line in self.all_lines() if line.startswith("wrong")]
        assert all(map(_is_running, self._pids.values()))

    def kill_by_turns(
        self, count: int, num_processes: int, draw: random.Random, pause: float, *arguments: Any
    ) -> Counter[str]:
        """Kill processes at random times: in turn the owner, a reader, and any process.

        After each kill, the survivors must find blocks, and another process is started.

        Returns:
            the number of times that a survivor found blocks after an owner's death, and after a
            reader's.
        """
        survived = Counter[str]()
        for _ in range(num_processes):
            self.start(*arguments)
        for number in range(count):
            wait_until(lambda: self.owner is not None, "a process to become the owner", 60)
            time.sleep(draw.uniform(0, pause))
            owner = self.owner
            readers = [name for name in self.names if name != owner]
            victim = (owner, draw.choice(readers), draw.choice(self.names))[number % 3]
            assert victim is not None
            self.kill(victim)
            hits = {name: self._num_hits(name) for name in self.names}
            wait_until(
                lambda hits=hits: all(self._num_hits(name) > hits[name] for name in hits),
                "the survivors to find blocks",
                60,
            )
            survived["owner" if victim == owner else "reader"] += len(hits)
            self.start(*arguments)
        wait_until(lambda: self.owner is not None, "a process to become the owner", 60)
        self.assert_sound()
        return survived

    def _last(self, name: int) -> str:
        return next(
            (line for line in reversed(self.lines(name)) if line.startswith(("hit", "miss"))), ""
        )

    def _num_hits(self, name: int) -> int:
        return sum(line.startswith("hit") for line in self.lines(name))


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@contextlib.contextmanager
def herd(code: str, directory: Path) -> Iterator[Herd]:
    """Start a process that has run `code` and forks on request, and end all processes afterwards.

    `code` defines `run`, and may call `journal_of(directory, name)`, which returns a function that
    writes a line.
    """
    tests = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(
        [sys.executable, "-c", _BEGIN + code + _LOOP], env=environment, **pipes
    ) as server:
        one = Herd(server, directory)
        try:
            yield one
        finally:
            pids = [one._pids.pop(name) for name in one.names]
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            # A process that is writing to a slow device ends later.
            wait_until(lambda: not any(map(_is_running, pids)), "the processes to be gone", 60)
            assert server.stdin is not None
            server.stdin.close()
