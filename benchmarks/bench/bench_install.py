"""Time from a wheel to the first answers, in an environment without other packages.

    python benchmarks/bench/bench_install.py dist/kvboost_edge-*.whl [--model FILE] [--uvx uvx]

The packages are downloaded first, which is not counted. Each round then starts with an empty
folder and an empty cache: it creates an environment, installs the wheel with its `server` extra,
asks the bundled model twice, asks FILE twice, and asks a server once. With `--uvx`, a round also
runs `uvx --from WHEEL kvboost-edge generate`, which creates an environment and asks the bundled
model in one command. An answer is counted from the start of the process to its first byte.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import harness

_ROOT = Path(__file__).parents[2]
_SCRIPTS = "Scripts" if os.name == "nt" else "bin"
_PROMPT = "What is the metal of Worr camera?"
_WAIT_S = 300.0


def call(words: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> float:
    """Run a command and return the seconds that it took."""
    started = time.perf_counter()
    done = subprocess.run(
        words, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return time.perf_counter() - started


def served(program: Path, cwd: Path, environment: Mapping[str, str]) -> dict[str, float]:
    """Start a server of the bundled model and return the seconds to readiness and to an answer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    started = time.perf_counter()
    with subprocess.Popen(
        [str(program), "serve", "--port", str(port)],
        cwd=cwd,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            while True:
                try:
                    urllib.request.urlopen(f"{address}/ready", timeout=2).close()
                    break
                except OSError:
                    if process.poll() is not None or time.perf_counter() - started > _WAIT_S:
                        raise RuntimeError("the server did not become ready") from None
                    time.sleep(0.02)
            ready = time.perf_counter() - started
            body = {"messages": [{"role": "user", "content": _PROMPT}], "max_tokens": 8}
            request = urllib.request.Request(
                f"{address}/v1/chat/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                response.read()
            return {"serve: ready": ready, "serve: answer": time.perf_counter() - started - ready}
        finally:
            process.terminate()


def one_round(
    wheel: Path, wheels: Path, model: Path | None, uvx: str | None, folder: Path
) -> dict[str, float]:
    """Return the seconds of each step, in order."""
    environment = {**os.environ, "KVBOOST_EDGE_CACHE": str(folder / "cache")}
    for name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE"):
        environment.pop(name, None)
    local = ["--no-index", "--find-links", str(wheels)]
    scripts = folder / "venv" / _SCRIPTS
    program = scripts / "kvboost-edge"
    generate = ["generate", _PROMPT, "-n", "8", "-o", "num_blocks=256"]
    first_byte = functools.partial(harness.seconds_to_first_byte, cwd=folder, env=environment)
    steps = {
        "create the environment": call(
            [sys.executable, "-m", "venv", str(folder / "venv")], folder, environment
        ),
        "pip install, from local files": call(
            [str(scripts / "python"), "-m", "pip", "install", "-q", *local, f"{wheel}[server]"],
            folder,
            environment,
        ),
        "bundled model, first": first_byte([str(program), *generate]),
        "bundled model, again": first_byte([str(program), *generate]),
    }
    if model is not None:
        words = [str(program), *generate, "-m", str(model)]
        steps[f"{model.name}, first"] = first_byte(words)
        steps[f"{model.name}, again"] = first_byte(words)
    steps |= served(program, folder, environment)
    if uvx is not None:
        apart = {
            **environment,
            "KVBOOST_EDGE_CACHE": str(folder / "uvx-cache"),
            "UV_CACHE_DIR": str(folder / "uv"),
        }
        words = [uvx, "--python", sys.executable, *local, "--from", str(wheel), "kvboost-edge"]
        steps["uvx, to the first answer"] = harness.seconds_to_first_byte(
            [*words, *generate], cwd=folder, env=apart
        )
    return steps


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("wheel", type=Path, help="wheel to install")
    parser.add_argument("--model", type=Path, help="GGUF file to ask, too")
    parser.add_argument("--uvx", help="path of uvx, to time it too")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default: %(default)s)")
    options: argparse.Namespace = parser.parse_args()
    wheel = options.wheel.resolve()
    rounds = 1 if options.quick else options.rounds
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as wheels:
        download = [sys.executable, "-m", "pip", "download", "-q", "-d", wheels]
        constraints = ["-c", str(_ROOT / "constraints.txt")]
        call([*download, *constraints, f"{wheel}[server]"], _ROOT, os.environ)
        megabytes = sum(path.stat().st_size for path in Path(wheels).iterdir()) / 1e6
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                model = options.model.resolve() if options.model else None
                found.append(one_round(wheel, Path(wheels), model, options.uvx, Path(folder)))
    rows = [
        {
            "step": step,
            "median s": statistics.median(one[step] for one in found),
            "worst s": max(one[step] for one in found),
        }
        for step in found[0]
    ]
    print(f"wheel {wheel.stat().st_size / 1e6:.2f} MB, all packages {megabytes:.1f} MB")
    harness.report("bench_install", rows, options=options, rounds=found, download_mb=megabytes)


if __name__ == "__main__":
    main()
