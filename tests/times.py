"""Sum test times by package and file from the output of `pytest --durations=0` (`make test-times`).

    python tests/times.py OUTPUT [OUTPUT ...]

The first table lists the packages, the second all files, the third all tests of at least a second.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

_ROW = re.compile(r"^([0-9.]+)s (call|setup|teardown) +(tests/\S+?\.py)(::.*)?$")
_CLOSING = re.compile(r"^=* ?(.*\b(passed|failed)\b.* in [0-9.]+s.*?) ?=*$")


def rows(lines: Iterable[str]) -> Iterator[tuple[str, str, float]]:
    """Yield (file, test, seconds) for each phase in the output."""
    for line in lines:
        found = _ROW.match(line.rstrip())
        if found:
            yield found[3], found[3] + (found[4] or ""), float(found[1])


def package_of(file: str) -> str:
    """Return the first folder below tests/, or tests for a file at the top."""
    parts = Path(file).parts
    return parts[1] if len(parts) > 2 else parts[0]


def table(title: str, sums: Counter[str]) -> str:
    """Return the sums as lines of text in descending order."""
    lines = [f"{seconds:9.1f} s  {name}" for name, seconds in sums.most_common()]
    return "\n".join([title, *lines])


def report(text: str) -> str:
    """Return the closing lines of all pytest runs and the tables."""
    lines = text.splitlines()
    closing = [found[1] for found in map(_CLOSING.match, lines) if found]
    packages: Counter[str] = Counter()
    files: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for file, test, seconds in rows(lines):
        packages[package_of(file)] += seconds
        files[file] += seconds
        tests[test] += seconds
    slow = Counter({test: seconds for test, seconds in tests.items() if seconds >= 1})
    return "\n\n".join(
        [
            "\n".join([*closing, table("By package (seconds of all worker processes)", packages)]),
            table("By file", files),
            table("Tests of a second and more", slow),
        ]
    )


def main(paths: list[str]) -> int:
    """Print the tables; return the exit status."""
    if not paths:
        print(__doc__, file=sys.stderr)
        return 2
    print(report("\n".join(Path(path).read_text(encoding="utf-8") for path in paths)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
