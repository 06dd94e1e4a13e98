"""What all benchmarks share: rounds, medians, the machine card, the table, the JSON line.

A benchmark compares contenders. `alternate` runs them in turn, round after round, so that a slow
minute of the machine hits all of them; the warm-up round is not counted. `report` prints the
machine, a table and, as the last line, one JSON object with everything.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvboost_edge.host.cpu import default_num_threads, describe_cpu
from kvboost_edge.host.memory import total_bytes

__all__ = ["alternate", "given", "machine_card", "pack_beforehand", "parser", "report"]

_PACK = (
    "import sys, kvboost_edge as k; k.CPUPagedEngine.from_pretrained(sys.argv[1], "
    "num_blocks=16).close()"
)

_PACKAGES = ("numpy", "numba", "torch", "transformers")
# Taken when the benchmark starts: at its end this is the load it made itself.
_LOAD_AT_START = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def parser(description: str) -> argparse.ArgumentParser:
    """The options every benchmark has: --quick (a smoke run whose figures mean little) and --out
    FILE.
    """
    options = argparse.ArgumentParser(description=description)
    options.add_argument(
        "--quick", action="store_true", help="a short smoke run; its figures mean little"
    )
    options.add_argument(
        "--out", type=Path, help="also write the JSON here, for benchmarks/results/"
    )
    return options


def alternate(
    contenders: Mapping[str, Callable[[], object]], *, rounds: int, warmups: int = 1
) -> dict[str, list[float]]:
    """Seconds of each contender in each counted round; within a round they run in the order
    given.
    """
    for _ in range(warmups):
        for work in contenders.values():
            work()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, work in contenders.items():
            seconds[name].append(_timed(work))
    return seconds


def pack_beforehand(model: Path | str) -> None:
    """Pack a model's weights in a process of its own, so that no figure of this one has that in
    it.
    """
    subprocess.run([sys.executable, "-c", _PACK, str(model)], check=True)


def machine_card() -> dict[str, Any]:
    """What the figures depend on: processor, threads, memory, load at the start, versions,
    commit.
    """
    cpu = describe_cpu()
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu.model,
        "isa": cpu.isa,
        "threads": default_num_threads(),
        "memory_gb": round(total_bytes() / 1e9, 1),
        "load_at_start": _LOAD_AT_START,
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "commit": _commit(),
    }


def given(options: argparse.Namespace) -> dict[str, Any]:
    """The options a run had, without paths: they are this machine's, and no figure depends on
    them.
    """
    return {name: value for name, value in vars(options).items() if not _is_path(value)}


def _is_path(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_is_path(one) for one in value)
    return isinstance(value, Path) or (isinstance(value, str) and ("/" in value or "\\" in value))


def report(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    options: argparse.Namespace,
    shown: Sequence[Mapping[str, Any]] | None = None,
    **extra: Any,
) -> None:
    """Print the machine card, a table of `rows` (same keys in each) and the JSON line; write it to
    --out as well.

    shown: what the table has instead of `rows`, which stay numbers in the JSON.
    """
    card = machine_card()
    print(f"\n{name}{' (quick: figures mean little)' if options.quick else ''}")
    print(
        f"{card['date']} · {card['cpu']} · {card['isa']} · {card['threads']} threads · "
        f"{card['memory_gb']} GB"
    )
    print("\n".join(_table(rows if shown is None else shown)))
    head = {"benchmark": name, "quick": options.quick, "machine": card, "options": given(options)}
    line = json.dumps({**head, "rows": list(rows), **extra})
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(line + "\n", encoding="utf-8")
    print(line)


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Columns as wide as their widest cell, numbers to the right."""
    if not rows:
        return ["(no rows)"]
    names = list(rows[0])
    cells = [names, *([_cell(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    numeric = [
        all(isinstance(row[name], (int, float, type(None))) for row in rows) for name in names
    ]
    lines = []
    for line in cells:
        padded = (
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric, strict=True)
        )
        lines.append("  ".join(padded).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 10 else f"{value:,.1f}"
    return str(value)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None
