"""Kernels that a first start compiles, and the time that this takes.

    python benchmarks/bench/bench_compile.py --kinds int4-asym int8 [--quantized]
    [--layers experts scan]

Covers models with these weight formats and kinds of layers, with a float or quantized pool and an
empty kernel cache. Kernels are compiled first in child processes, as a runner does it (wall and CPU
seconds), then in this process, where functions and instructions are counted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time

from kvboost_edge.kernels.aot import compile_ahead
from kvboost_edge.kernels.entry import KernelEntry
from kvboost_edge.kernels.linear.weight_formats import FORMATS
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.entries import pass_entries

_LAYERS = {
    "experts": (lt.K_EXPERTS,),
    "conv": (lt.K_CONV, lt.K_TAILS),
    "scan": (lt.K_SCAN, lt.K_TAILS),
}
_INSTRUCTION = re.compile(r"^\t[a-z]", re.MULTILINE)


def in_children(options: argparse.Namespace) -> dict[str, float]:
    """Return the seconds of `compile_ahead`, including its start."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    compile_ahead(entries(options), options.processes)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": round(time.perf_counter() - started, 2), "cpu_s": round(cpu, 2)}


def counted(options: argparse.Namespace) -> list[dict[str, object]]:
    """Return one row for each entry, compiled in this process."""
    rows: list[dict[str, object]] = []
    for entry in entries(options):
        started = time.process_time()
        entry.compile()
        seconds = time.process_time() - started
        library = entry.kernel.dispatcher.overloads[entry.arguments].library
        functions = [one for one in library._final_module.functions if not one.is_declaration]
        llvm = sum(1 for one in functions for block in one.blocks for _ in block.instructions)
        machine = len(_INSTRUCTION.findall(library.get_asm_str()))
        numbers = {
            "functions": len(functions),
            "llvm_instructions": llvm,
            "machine_instructions": machine,
        }
        rows.append({"entry": entry.name, "cpu_s": round(seconds, 2), **numbers})
    return rows


def entries(options: argparse.Namespace) -> list[KernelEntry]:
    found = {lt.K_PROGRAM}.union(*(_LAYERS[layers] for layers in options.layers))
    operations = [operation for entry in found for operation in lt.OPERATIONS[entry]]
    return pass_entries(
        {FORMATS[kind].kind for kind in options.kinds}, operations, quantized=options.quantized
    )


def report(options: argparse.Namespace) -> None:
    """Print the results of one part as JSON lines, in a process with an empty cache."""
    if options.part == "children":
        print(json.dumps(in_children(options)))
        return
    rows = counted(options)
    for row in rows:
        print(json.dumps(row))
    sums = {name: sum(float(str(row[name])) for row in rows) for name in rows[0] if name != "entry"}
    print(json.dumps({"entries": len(rows), **sums}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        default=["int4-asym", "int8"],
        choices=sorted(FORMATS),
        help="weight formats (default: %(default)s)",
    )
    parser.add_argument(
        "--layers",
        nargs="+",
        default=[],
        choices=sorted(_LAYERS),
        help="kinds of layers in addition to plain ones",
    )
    parser.add_argument("--quantized", action="store_true", help="use a quantized pool")
    parser.add_argument(
        "--processes",
        type=int,
        default=os.cpu_count() or 1,
        help="compiling processes at the same time (default: %(default)s)",
    )
    parser.add_argument("--part", choices=("children", "count"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        report(options)
        return
    for part in ("children", "count"):
        with tempfile.TemporaryDirectory() as empty:
            command = [sys.executable, *sys.argv, "--part", part]
            subprocess.run(
                command,
                env={**os.environ, "NUMBA_CACHE_DIR": empty, "KVBOOST_EDGE_KERNELS": "none"},
                check=True,
            )


if __name__ == "__main__":
    main()
