"""Command line of `make cuda-check` and `make cuda-table`: checks kernels on all architectures.

Each instantiation is one check: no spills from sm_80 on, registers and shared memory within the
architecture's limits, and tensor-core instructions in the machine code. The last line counts
results in pytest's style.

Opcodes are counted in the machine code, because the disassembler of CUDA 13 does not support sm_70.
On architectures that it supports, its count must be equal.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from compile_check import host, table
from compile_check.forms import HEAD_DIMS, Form, Row, build, programs, requirements
from compile_check.machines import MACHINES, Machine
from compile_check.nvrtc import CompileError

_WORKERS = 2
_DISASSEMBLED_FROM = 75
Results = list[tuple[str, str]]
"""(what was checked, the problem or "")."""


def main(arguments: list[str]) -> int:
    """Run the checks; with `--write`, also write the table of docs/cuda.md."""
    if arguments not in ([], ["--write"]):
        print(f"usage: python -m compile_check [--write], not {arguments}")
        return 2
    started = time.monotonic()
    rows: list[Row] = []
    results: Results = []
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(_WORKERS) as pool:
        folder = Path(name)
        sources = ["launch", *(f"attention_{head_dim}" for head_dim in HEAD_DIMS)]
        objects = [pool.submit(host.compile_source, source, folder) for source in reversed(sources)]
        jobs = [
            pool.submit(_check_program, machine, source, forms, folder)
            for machine in MACHINES
            for source, forms in programs(machine)
        ]
        for found, checked in (job.result() for job in jobs):
            rows += found
            results += checked
        results += _check_host([job.result for job in objects], folder)
    if arguments:
        table.replace_table(rows)
    results.append(
        ("docs/cuda.md", "".join(f"\n    has no line {line}" for line in table.stale_lines(rows)))
    )
    failed = [(name, problem) for name, problem in results if problem]
    for name, problem in failed:
        print(f"FAILED {name}: {problem}")
    seconds = time.monotonic() - started
    print(
        f"cuda-check: {len(results) - len(failed)} passed, {len(failed)} failed in {seconds:.1f}s"
    )
    return 1 if failed else 0


def _check_program(
    machine: Machine, source: str, forms: list[Form], folder: Path
) -> tuple[list[Row], Results]:
    """Return the table rows and check results for a program's instantiations."""
    try:
        rows, cubin = build(machine, source, forms)
    except CompileError as error:
        return [], [(f"{machine.name} {_name(form)}", str(error)) for form in forms]
    results = [(f"{machine.name} {_name(row.form)}", "; ".join(requirements(row))) for row in rows]
    if machine.number >= _DISASSEMBLED_FROM and forms[0].head_dim == HEAD_DIMS[0]:
        own = folder / machine.name
        own.mkdir()
        counted = sum(row.hmma for row in rows)
        named = host.disassembled_hmma(cubin, own)
        problem = "" if counted == named else f"{counted} HMMA counted, nvdisasm names {named}"
        results.append((f"{machine.name} nvdisasm", problem))
    return rows, results


def _name(form: Form) -> str:
    return " ".join(str(part) for part in form if part)


def _check_host(objects: list[Callable[[], Path]], folder: Path) -> Iterator[tuple[str, str]]:
    """Compile and link with nvcc, call the launchers, and yield the results."""
    try:
        built = [job() for job in objects]
        yield "nvcc 13 compiles the launchers", ""
        silent = [
            name
            for name, error in host.call_launchers(host.link(built, folder)).items()
            if not error
        ]
        yield (
            "nvcc 13 links the launchers, and they name their errors",
            f"{silent} report success without a GPU" if silent else "",
        )
    except (host.NvccError, OSError) as error:
        yield "nvcc 13 and the launchers", str(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
