"""Shared code of all benchmarks: timing rounds, machine card, table and JSON output.

A benchmark compares contenders. `alternate` runs all of them in each round, so that a slow minute
of the machine affects all contenders. The warm-up rounds are not counted. `report` prints the
machine, a table and, as the last line, one JSON object with all results.
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

from kvboost_edge.host.memory import total_bytes
from kvboost_edge.host.processor import default_num_threads, describe_cpu

__all__ = [
    "add_peers_python",
    "add_threads",
    "alternate",
    "given",
    "machine_card",
    "pack_beforehand",
    "parser",
    "report",
    "seconds_to_first_byte",
    "threads_of",
]

_PACK = (
    "import sys, kvboost_edge as k; k.CPUPagedEngine.from_pretrained(sys.argv[1], "
    "num_blocks=16).close()"
)

_PACKAGES = ("numpy", "numba", "torch", "transformers")
# Read at import, because at the end the load comes from the benchmark itself.
_LOAD_AT_START = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark: --quick and --out."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--quick", action="store_true", help="run a short smoke test, whose figures mean little"
    )
    options.add_argument(
        "--out", type=Path, help="file to write the JSON to, usually in benchmarks/results/"
    )
    return options


def add_threads(options: argparse.ArgumentParser, default: int = 2) -> None:
    """Add --threads, which all contenders of a benchmark use."""
    options.add_argument(
        "--threads",
        type=int,
        default=default,
        help="number of compute threads of each engine (default: %(default)s)",
    )


def add_peers_python(options: argparse.ArgumentParser) -> None:
    """Add --peers-python, the environment of the other engines."""
    options.add_argument(
        "--peers-python",
        type=Path,
        default=Path(__file__).parents[1] / ".venv-peers" / "bin" / "python",
        metavar="PATH",
        help="Python with the other engines (default: that of `make bench-peers`)",
    )


def alternate(
    contenders: Mapping[str, Callable[[], object]], *, rounds: int, warmups: int = 1
) -> dict[str, list[float]]:
    """Time contenders in alternating rounds.

    Args:
        contenders: Functions to time, by name. Each round calls them in this order.
        rounds: Number of timed rounds.
        warmups: Number of rounds before that are not timed.

    Returns:
        The seconds of each round, by contender.
    """
    for _ in range(warmups):
        for work in contenders.values():
            work()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, work in contenders.items():
            seconds[name].append(_timed(work))
    return seconds


def seconds_to_first_byte(
    command: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> float:
    """Return the seconds from the start of a command to its first byte of output.

    Raises:
        RuntimeError: the command fails, or prints nothing.
    """
    started = time.perf_counter()
    with subprocess.Popen(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        byte = process.stdout.read(1)
        seconds = time.perf_counter() - started
        process.stdout.read()
    if not byte or process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    return seconds


def pack_beforehand(model: Path | str) -> None:
    """Pack a model's weights in a separate process, so that this one measures no packing."""
    subprocess.run([sys.executable, "-c", _PACK, str(model)], check=True)


def machine_card() -> dict[str, Any]:
    """Describe the machine and software.

    `threads` is the engine's default number, which options of a benchmark may change. A commit
    whose code has changed since then ends with "-dirty".
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


def threads_of(card: Mapping[str, Any], options: Mapping[str, Any] | None) -> int:
    """Return the number of threads of a run, from its card and options."""
    number = (options or {}).get("threads")
    return int(card["threads"] if number is None else number)


def given(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a run without paths, which do not affect the figures."""
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
    """Print the machine card, a table of the results and the JSON line.

    Args:
        name: Name of the benchmark.
        rows: Results, with the same keys in each row.
        options: Parsed options. The JSON line is also written to `options.out`.
        shown: Rows to print instead of `rows`, which remain numbers in the JSON.
        extra: Further entries of the JSON object.
    """
    card = machine_card()
    print(f"\n{name}{' (quick: figures mean little)' if options.quick else ''}")
    print(
        f"{card['date']} · {card['cpu']} · {card['isa']} · {threads_of(card, given(options))} "
        f"threads · {card['memory_gb']} GB · load {card['load_at_start']} · commit {card['commit']}"
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
    """Format rows as a table. Columns of numbers are right-aligned."""
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


def _commit(repository: Path = Path(__file__).parents[1]) -> str | None:
    git = ["git", "-C", str(repository)]
    changed = ["diff", "--quiet", "HEAD", "--", "kvboost_edge", "benchmarks/*.py"]
    try:
        done = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        )
        is_changed = subprocess.run([*git, *changed], capture_output=True, check=False).returncode
    except OSError:
        return None
    commit = done.stdout.strip()
    return f"{commit}-dirty" if commit and is_changed else commit or None
