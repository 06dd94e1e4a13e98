"""Time until a new process outputs text, and memory of a running engine, at the 0.5B shape.

    python benchmarks/bench/bench_startup.py [--model FILE]

The model is FILE, or a random GGUF of Qwen2-0.5B's shape (see bench_peers.py). The time is measured
from starting the process to the first byte of `kvboost-edge generate`. The first round, which packs
the weights, is not counted, so files are in the page cache in all others. The memory is
`other_bytes` of an engine after prefill and decoding: the resident memory in addition to weights
and pool. To measure with a kernel library, set KVBOOST_EDGE_KERNELS.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import harness
from benchmarks.bench.bench_peers import Worker, parser_for_models
from benchmarks.data.random_model import kept_gguf
from benchmarks.data.shapes import SHAPES

_BENCHMARKS = Path(__file__).parents[1]
_TARGET_S = 2.5
_TARGET_MB = 180.0  # with a kernel library


def first_byte(model: Path) -> float:
    """Return the seconds from starting `kvboost-edge generate` to its first byte of output."""
    program = [sys.executable, "-m", "kvboost_edge", "generate", "HELLO"]
    return harness.seconds_to_first_byte(
        [*program, "-m", str(model), "-n", "8", "-o", "num_blocks=256"]
    )


def loads_torch(model: Path) -> bool:
    """Return whether a process that generates text has imported torch."""
    code = (
        "import sys; from kvboost_edge import CPUPagedEngine\n"
        "with CPUPagedEngine.from_pretrained(sys.argv[1], num_blocks=64) as engine:\n"
        "    engine.generate('A', max_new_tokens=2)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(model)], capture_output=True, text=True, check=True
    )
    return done.stdout.split()[-1] == "True"


def held(model: Path, bits: int) -> dict[str, Any]:
    """Return the memory of a worker with a pool of 16,384 tokens.

    It has computed 2,112 tokens of prefill and some decode steps.
    """
    command = [
        sys.executable,
        str(_BENCHMARKS / "peers" / "worker.py"),
        "kvboost_edge",
        str(model),
        "--kv",
        str(bits),
    ]
    worker = Worker(f"kv{bits}", command, dict(os.environ))
    prompt = list(range(300, 300 + 512)) * 4
    worker.ask("decode", tokens=prompt, count=32)
    found = worker.ask("memory")
    other = worker.ask("stats")["other_bytes"]
    about = worker.about["about"]
    worker.close()
    return {
        "weights_mb": about["weight_bytes"] / 1e6,
        "pool_mb": about["pool_bytes"] / 1e6,
        **found,
        "beside_mb": other / 1e6,
    }


def main() -> None:
    parser = parser_for_models(__doc__)
    parser.add_argument("--model", type=Path, help="GGUF file to start instead of a random one")
    options: argparse.Namespace = parser.parse_args()
    shape = "tiny" if options.quick else options.shape
    model = options.model or kept_gguf(
        options.models / f"{shape}-{options.quant}.gguf", SHAPES[shape], options.quant
    )
    first = first_byte(model)
    times = [first_byte(model) for _ in range(options.rounds)]
    median = statistics.median(times)
    rows: list[dict[str, Any]] = [
        {"what": "first start, weights packed or found, s", "value": first, "target": None},
        {"what": "start to first byte, median s", "value": median, "target": _TARGET_S},
        {"what": "start to first byte, worst s", "value": max(times), "target": None},
        {"what": "torch imported", "value": str(loads_torch(model)), "target": "False"},
    ]
    memory = {bits: held(model, bits) for bits in (16, 8)}
    for bits, found in memory.items():
        name = f"resident beside weights and pool, kv{bits}, MB"
        rows.append({"what": name, "value": found["beside_mb"], "target": _TARGET_MB})
    print(json.dumps({str(bits): found for bits, found in memory.items()}))
    harness.report("bench_startup", rows, options=options, times=times)


if __name__ == "__main__":
    main()
