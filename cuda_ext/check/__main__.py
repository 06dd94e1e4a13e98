"""Compiles the kernels for every architecture and checks what came out; `make cuda-check`, `make cuda-table`.

Each form is a check of its own: no spills from sm_80 on, registers and shared memory inside the architecture's limits,
tensor-core instructions in the machine code. The last line counts them as pytest's does. Opcodes are counted in the
code itself, for the disassembler of CUDA 13 does not know sm_70; where it can, it must count the same.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from check import host, table
from check.forms import HEAD_DIMS, Form, Row, build, programs, requirements
from check.machines import MACHINES, Machine
from check.nvrtc import CompileError

_WORKERS = 2
_DISASSEMBLED_FROM = 75
# What the quick check leaves out: the instructions of sm_86 and sm_89 are those of sm_80, with other limits.
_QUICK_MACHINES = ("sm_70", "sm_75", "sm_80", "sm_90")


def main() -> int:
    options = _parse()
    started = time.monotonic()
    machines = [machine for machine in MACHINES if options.all or machine.name in _QUICK_MACHINES]
    rows: list[Row] = []
    results: list[tuple[str, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        jobs = [(machine, source, forms) for machine in machines for source, forms in programs(machine)]
        with ThreadPoolExecutor(_WORKERS) as pool:
            for found, checked in pool.map(lambda job: _check_program(*job, Path(folder)), jobs):
                rows += found
                results += checked
        results += _check_host(Path(folder), everything=options.all)
    if options.write:
        table.replace_table(rows)
    results.append(("docs/cuda.md", "".join(f"\n    has no line {line}" for line in table.stale_lines(rows))))
    failed = [(name, problem) for name, problem in results if problem]
    for name, problem in failed:
        print(f"FAILED {name}: {problem}")
    if not options.all:
        print(f"left out, and checked by `make cuda-check-all`: {_left_out()}")
    seconds = time.monotonic() - started
    print(f"cuda-check: {len(results) - len(failed)} passed, {len(failed)} failed in {seconds:.1f}s")
    return 1 if failed else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="check", description=__doc__)
    parser.add_argument("--all", action="store_true", help="all architectures, and all sources by nvcc")
    parser.add_argument("--write", action="store_true", help="write the table of docs/cuda.md; needs --all")
    options = parser.parse_args()
    if options.write and not options.all:
        parser.error("--write needs --all")
    return options


def _left_out() -> str:
    names = [machine.name for machine in MACHINES if machine.name not in _QUICK_MACHINES]
    return f"{', '.join(names)}; nvcc over all head dims but {HEAD_DIMS[0]}"


def _check_program(
    machine: Machine, source: str, forms: list[Form], folder: Path
) -> tuple[list[Row], list[tuple[str, str]]]:
    """Rows and (name, problem or "") of a program's forms."""
    try:
        rows, cubin = build(machine, source, forms)
    except CompileError as error:
        return [], [(f"{machine.name} {form}", str(error)) for form in forms]
    results = [(f"{machine.name} {row.form}", "; ".join(requirements(row))) for row in rows]
    if machine.number >= _DISASSEMBLED_FROM and forms[0].head_dim == HEAD_DIMS[0]:
        own = folder / machine.name
        own.mkdir()
        counted, named = sum(row.hmma for row in rows), host.disassembled_hmma(cubin, own)
        problem = "" if counted == named else f"{counted} HMMA counted, nvdisasm names {named}"
        results.append((f"{machine.name} nvdisasm", problem))
    return rows, results


def _check_host(folder: Path, *, everything: bool) -> Iterator[tuple[str, str]]:
    """nvcc's part; the launchers are linked, and called, where everything is compiled."""
    names = [f"attention_{head_dim}" for head_dim in (HEAD_DIMS if everything else HEAD_DIMS[:1])]
    objects: list[Path] = []

    def build_all() -> str:
        objects.extend(host.compile_sources(["launch", *names], folder, host.NVCC_ARCHITECTURES))
        return ""

    def run_all() -> str:
        said = host.call_launchers(host.link(objects, folder))
        silent = [name for name, error in said.items() if not error]
        return f"{silent} report success without a GPU" if silent else ""

    yield _attempt("nvcc 13 compiles the launchers", build_all)
    if everything:
        yield _attempt("nvcc 13 links the launchers, and they name their errors", run_all)


def _attempt(name: str, do: Callable[[], str]) -> tuple[str, str]:
    try:
        return name, do()
    except (host.NvccError, OSError) as error:
        return name, str(error)


if __name__ == "__main__":
    sys.exit(main())
