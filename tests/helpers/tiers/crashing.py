"""Processes that kill themselves with SIGKILL. One process imports everything and forks for each
crash.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_LOOP = """
import json, os, sys

for line in sys.stdin:
    child = os.fork()  # before this process has any thread
    if not child:
        try:
            run(*json.loads(line))
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@contextmanager
def crashing(code: str) -> Iterator[Callable[..., bool]]:
    """Start a process that has run `code`, which defines `run`.

    The yielded function calls `run` in a fork and returns whether the fork was killed before `run`
    returned.
    """
    tests = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(
        [sys.executable, "-c", code + _LOOP], env=environment, **pipes
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def crash(*arguments: Any) -> bool:
            process.stdin.write(json.dumps(arguments) + "\n")
            process.stdin.flush()
            status = int(process.stdout.readline())
            assert status in (0, -signal.SIGKILL)
            return status != 0

        yield crash
        process.stdin.close()
