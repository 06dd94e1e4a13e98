"""Repeat the tests that a busy machine could break while other processes keep every core busy
(`make test-loaded`).

    python tests/loaded.py [--runs 10] [--at-once 1] [PATH ...]

Without a path it runs the tests marked `alone` or `cluster` and those that start a process. With
`--at-once`, several runs go on beside one another, and each is load for the others. The script
prints each failure and one line per run. It exits with status 1 if any run failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
SPIN = "while True: pass"
WIDE = {**os.environ, "COLUMNS": "400"}  # pytest truncates failure messages to this width
FAILURE = re.compile(r"^(FAILED|ERROR) ")


@contextlib.contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Keep `count` processes computing while the block runs."""
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def run(number: int, command: list[str]) -> bool:
    """Run `command` as run `number`, print its failures and its last line; return whether it
    passed.
    """
    started = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=WIDE, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines() or done.stderr.splitlines() or ["no output"]
    said = [f"run {number}: {line}" for line in filter(FAILURE.match, lines)]
    seconds = time.monotonic() - started
    said.append(f"run {number}: {lines[-1]} ({seconds:.0f} s)")
    print("\n".join(said), flush=True)
    return done.returncode == 0


def main() -> int:
    """Run the tests `--runs` times; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=10, help="number of runs [10]")
    parser.add_argument(
        "--at-once", type=int, default=1, help="number of runs beside one another [1]"
    )
    parser.add_argument(
        "paths", nargs="*", help="files or folders of tests [the tests that load could break]"
    )
    options = parser.parse_args()
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"]
    command += options.paths or ["-p", "helpers.load_sensitive"]
    # Beside one run, a process spins on each core. More runs than cores keep the cores busy.
    cores = os.cpu_count() or 1
    spinning = cores if options.at_once <= cores else 0
    with busy_cores(spinning), ThreadPoolExecutor(options.at_once) as beside:
        numbers = range(1, options.runs + 1)
        passed = sum(beside.map(lambda number: run(number, command), numbers))
    print(
        f"{passed} of {options.runs} runs passed; {cores} cores, {spinning} spinning processes, "
        f"{options.at_once} runs at once"
    )
    return 0 if passed == options.runs else 1


if __name__ == "__main__":
    sys.exit(main())
