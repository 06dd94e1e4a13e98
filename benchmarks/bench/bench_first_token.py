"""Time from `pip install` to the first token of a model, in five steps.

    python benchmarks/bench/bench_first_token.py model.gguf --wheel dist/kvboost_edge-*.whl

The steps are: installation (download, unless pip has the packages in its cache), import,
compilation of kernels, loading (weights packed or found), first token. A round installs the wheel
in a new virtual environment and starts with empty caches. Then a second process starts, which finds
what the first one left. With --libraries, kernels come from kernel libraries in that directory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import harness

_STEPS = ("install", "import", "compile", "load", "first token")
_RUN = """
import json, sys, time
from kvboost_edge import CPUPagedEngine
import kvboost_edge.runners.native.runner
imported = time.time()
from kvboost_edge.kernels.aot import on_compiling
compiling = []
on_compiling(lambda done, total: compiling.append(time.time()))
with CPUPagedEngine.from_pretrained(sys.argv[1], num_blocks=256) as engine:
    loaded = time.time()
    next(iter(engine.stream("How are you?", max_new_tokens=8)))
    answered = time.time()
compiled = compiling[-1] - compiling[0] if compiling else 0.0
print(json.dumps({
    "import": imported - float(sys.argv[2]),
    "compile": compiled,
    "load": loaded - imported - compiled,
    "first token": answered - loaded,
    "numba": "numba" in sys.modules,
}))
"""


def start(python: Path, model: Path, environment: dict[str, str]) -> dict[str, float]:
    """Return the seconds of the steps of one process."""
    done = subprocess.run(
        [str(python), "-c", _RUN, str(model.resolve()), str(time.time())],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        cwd=python.parent,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def installed(wheel: Path, place: Path) -> tuple[Path, float]:
    """Install the wheel in a new virtual environment; return its interpreter and the seconds."""
    venv.create(place, with_pip=True)
    python = place / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    started = time.perf_counter()
    subprocess.run([str(python), "-m", "pip", "install", "-q", str(wheel.resolve())], check=True)
    return python, time.perf_counter() - started


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--wheel", type=Path, help="wheel to install; default: this environment")
    parser.add_argument("--libraries", type=Path, help="directory of kernel libraries")
    parser.add_argument("--rounds", type=int, default=3)
    options: argparse.Namespace = parser.parse_args()
    starts: dict[str, list[dict[str, float]]] = {"first start": [], "second start": []}
    for _ in range(1 if options.quick else options.rounds):
        with tempfile.TemporaryDirectory() as name:
            place = Path(name)
            python, seconds = Path(sys.executable), 0.0
            if options.wheel is not None:
                python, seconds = installed(options.wheel, place / "venv")
            caches = {
                "KVBOOST_EDGE_CACHE": str(place / "cache"),
                "NUMBA_CACHE_DIR": str(place / "numba"),
                "KVBOOST_EDGE_KERNELS": str(options.libraries.resolve())
                if options.libraries
                else "none",
            }
            for each, found in starts.items():
                steps = start(python, options.model, os.environ | caches)
                found.append({"install": seconds if each == "first start" else 0.0, **steps})
    rows = []
    for each, found in starts.items():
        median = {step: statistics.median(one[step] for one in found) for step in _STEPS}
        rows.append({"s": each, **median, "sum": sum(median.values())})
    shown = [
        {name: f"{value:.2f}" if isinstance(value, float) else value for name, value in row.items()}
        for row in rows
    ]
    harness.report("bench_first_token", rows, options=options, shown=shown, starts=starts)


if __name__ == "__main__":
    main()
