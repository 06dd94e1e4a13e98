"""The server as a separate process."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from helpers.server.live_servers import wait_until

ROOT = Path(__file__).parents[3]


class Process:
    """`kvboost-server` in a separate process. `lines` holds its log so far."""

    def __init__(self, *flags: str, max_files: int | None = None) -> None:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("KVBOOST_API")
        }
        limit = ["sh", "-c", 'ulimit -n "$0" && exec "$@"', str(max_files)] if max_files else []
        self.process = subprocess.Popen(
            [
                *limit,
                sys.executable,
                "-m",
                "kvboost_edge.server",
                "--port",
                "0",
                "--num-blocks",
                "512",
                *flags,
            ],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(iter(self.process.stderr.readline, ""))

    def url(self) -> str:
        wait_until(
            lambda: self.process.poll() is not None or self._url() is not None,
            "the server to listen",
            400,
        )
        found = self._url()
        assert found is not None, self.lines
        return found

    def _url(self) -> str | None:
        found = re.search(r"http://127\.0\.0\.1:\d+", "".join(self.lines))
        return found[0] if found else None

    def end(self) -> int:
        code = self.process.wait(timeout=60)
        self._reader.join(timeout=10)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


@contextlib.contextmanager
def running(*flags: str, max_files: int | None = None) -> Iterator[Process]:
    """Run a server and kill it at the end if it is still running.

    Args:
        max_files: soft and hard limit of its open files.
    """
    process = Process(*flags, max_files=max_files)
    try:
        yield process
    finally:
        if process.process.poll() is None:
            process.process.kill()
        process.end()
