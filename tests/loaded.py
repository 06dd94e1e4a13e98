"""Repeat the tests that a busy machine could break, with a busy process on every core (`make
test-loaded`).

    python tests/loaded.py [--runs 10] [PATH ...]

The default paths are the tests marked `alone` or `cluster` and the tests that start a process. The
script prints each failure and one line per run. It exits with status 1 if any run failed.
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
from pathlib import Path

ROOT = Path(__file__).parents[1]
STARTS_A_PROCESS = re.compile(
    r"mark\.(alone|cluster)\b|\bsubprocess\b|\bPopen\b|running_redis|running_chromium"
)
SPIN = "while True: pass"
WIDE = {**os.environ, "COLUMNS": "400"}  # pytest truncates failure messages to this width
FAILURE = re.compile(r"^(FAILED|ERROR) ")


def sensitive_files() -> list[str]:
    """Return the test files whose tests measure time or memory, or start processes."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    found = [path for path in files if STARTS_A_PROCESS.search(path.read_text(encoding="utf-8"))]
    return [path.relative_to(ROOT).as_posix() for path in found]


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


def main() -> int:
    """Run the tests `--runs` times; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=10, help="number of runs [10]")
    parser.add_argument(
        "paths", nargs="*", help="files or folders of tests [all that load could break]"
    )
    options = parser.parse_args()
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"]
    command += options.paths or sensitive_files()
    cores = os.cpu_count() or 1
    failed = 0
    with busy_cores(cores):
        for number in range(1, options.runs + 1):
            started = time.monotonic()
            done = subprocess.run(
                command, cwd=ROOT, env=WIDE, capture_output=True, text=True, check=False
            )
            failed += done.returncode != 0
            lines = done.stdout.splitlines() or done.stderr.splitlines() or ["no output"]
            for line in filter(FAILURE.match, lines):
                print(line)
            print(
                f"run {number}: {lines[-1]} ({time.monotonic() - started:.0f} s, {cores} busy "
                "cores)",
                flush=True,
            )
    print(f"{options.runs - failed} of {options.runs} runs passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
