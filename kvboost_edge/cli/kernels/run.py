"""The `kvboost-edge kernels` actions."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress
from rich.table import Table

from kvboost_edge.cli.console import counted, open_console, text_column
from kvboost_edge.errors import ConfigError
from kvboost_edge.host.processor import cpu_identity
from kvboost_edge.kernels.library import library_choice, library_folder
from kvboost_edge.kernels.targets import KernelTarget, targets_of, usable_targets

__all__ = ["run_build", "run_status"]

_ALL = "all"


def run_status(*, as_json: bool) -> None:
    """Print which kernel library this machine uses, and why."""
    choice = library_choice()
    target = next(iter(usable_targets()), None)
    figures: dict[str, Any] = {
        "used": choice.library is not None,
        "reason": choice.reason,
        "file": None if choice.library is None else str(choice.library.path),
        "kernels": 0 if choice.library is None else len(choice.library.manifest.entries),
        "target": None if target is None else target.name,
        "folder": str(library_folder()),
        "targets": {one.name: one.about for one in targets_of(cpu_identity().arch)},
    }
    if as_json:
        print(json.dumps(figures))
        return
    console = open_console()
    console.print(f"kernel library: {'used' if figures['used'] else 'not used'}, {choice.reason}")
    console.print(f"class of this machine: {figures['target'] or 'none'}")
    console.print(f"directory: {figures['folder']}", soft_wrap=True)
    table = Table("class", "processors")
    for name, about in figures["targets"].items():
        table.add_row(name, about)
    console.print(table)


def run_build(
    names: Sequence[str], out: str | None, num_processes: int | None, *, as_json: bool
) -> None:
    """Build the libraries of some classes and print where they are.

    Args:
        names: names of the classes, or "all"; none for this machine's class.
        out: folder of the libraries.
        num_processes: number of compiling processes.
        as_json: print one JSON object.

    Raises:
        ConfigError: a class is unknown.
    """
    from kvboost_edge.kernels.build import build_library

    folder = Path(out) if out is not None else library_folder()
    built = []
    console = open_console(stderr=as_json)
    columns = (text_column("{task.description}"), BarColumn(), MofNCompleteColumn())
    shown = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        for target in _chosen(names):
            started = time.perf_counter()
            task = bar.add_task(target.name, total=None)

            def tell(done: int, total: int, task: Any = task) -> None:
                bar.update(task, completed=done, total=total)

            path = build_library(target, folder, num_processes=num_processes, tell=tell)
            seconds = time.perf_counter() - started
            size = path.stat().st_size
            kernels = json.loads(path.with_suffix(".json").read_bytes())["entries"]
            built.append(
                {
                    "target": target.name,
                    "file": str(path),
                    "bytes": size,
                    "kernels": len(kernels),
                    "seconds": round(seconds, 1),
                }
            )
            what = counted(len(kernels), "kernel", "kernels")
            console.print(
                f"{target.name}: {what}, {size / 1e6:.1f} MB, {seconds:.0f} s, {path}",
                soft_wrap=True,
            )
    if as_json:
        print(json.dumps({"built": built}))


def _chosen(names: Sequence[str]) -> list[KernelTarget]:
    """Return the classes with these names.

    Raises:
        ConfigError: a class is unknown, or there is none for this machine.
    """
    arch = cpu_identity().arch
    known = {target.name: target for target in targets_of(arch)}
    if _ALL in names and known:
        return list(known.values())
    if not names:
        usable = usable_targets()
        if not usable:
            raise ConfigError(
                "there is no class for this processor or system; choose one with --target"
                if known
                else f"kernel libraries cannot be built on this system ({arch})"
            )
        return [usable[0]]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"target {name!r} is not a class of {arch} processors; choose one of "
                f"{', '.join([*known, _ALL])}"
            )
    return [known[name] for name in dict.fromkeys(names)]
