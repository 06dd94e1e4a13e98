"""Figures of `kvboost-edge bench` compared with those of bench_peers, in alternating runs.

Both measure the same random model, each in its own process: a prompt without a cache, and decoding
without context. The medians over the pairs should differ by less than 5%. With --llama-bench, the
tool of llama.cpp runs in each round too.

    python benchmarks/bench/bench_command.py                    # 0.5B shape, Q4_0, 5 pairs
    python benchmarks/bench/bench_command.py --llama-bench build/bin/llama-bench
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import harness
from benchmarks.bench.bench_peers import ALL_SHAPES, RandomModel, parser_for_layers

_PEERS = Path(__file__).parent / "bench_peers.py"
_OURS = "kvboost_edge kv16"


def options_from() -> argparse.Namespace:
    parser = parser_for_layers(__doc__, ALL_SHAPES)
    harness.add_threads(parser)
    parser.add_argument("--prompt", type=int, default=512, help="length of the prompt in tokens")
    parser.add_argument("--generate", type=int, default=128, help="number of tokens to decode")
    parser.add_argument("--repetitions", type=int, default=3, help="repetitions within each run")
    parser.add_argument("--llama-bench", type=Path, help="llama.cpp's own tool")
    return parser.parse_args()


def by_peers(options: argparse.Namespace) -> dict[str, float]:
    """Run bench_peers with our engine only."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "peers.json"
        command = [sys.executable, str(_PEERS), "--only", _OURS, "--short", "--depths", "0"]
        command += ["--shape", options.shape, "--quant", options.quant]
        command += ["--models", str(options.models), "--threads", str(options.threads)]
        command += ["--prompt", str(options.prompt), "--generate", str(options.generate)]
        command += ["--rounds", str(options.repetitions), "--out", str(out)]
        if options.layers is not None:
            command += ["--layers", str(options.layers)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        rows = {row["measure"]: row[_OURS] for row in json.loads(out.read_text())["rows"]}
    return {
        "pp": options.prompt / rows[f"cold_ttft_{options.prompt}_s"],
        "tg": rows["decode_0_tok_s"],
    }


def by_tool(command: list[str], options: argparse.Namespace, model: Path) -> dict[str, float]:
    """Run a command with llama-bench's options, and read its rows."""
    command = [*command, "-m", str(model), "-t", str(options.threads), "-o", "json"]
    command += ["-p", str(options.prompt), "-n", str(options.generate)]
    command += ["-r", str(options.repetitions)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return {"pp" if row["n_prompt"] else "tg": statistics.median(row["samples_ts"]) for row in rows}


def main() -> None:
    options = options_from()
    if options.quick:
        options.shape, options.rounds, options.repetitions = "tiny", 1, 1
        options.prompt, options.generate = 64, 16
    model, _, what = RandomModel.written(options, ALL_SHAPES)
    harness.pack_beforehand(model)
    ours = [sys.executable, "-m", "kvboost_edge", "bench"]
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(options.rounds):
        runs = {"bench": by_tool(ours, options, model), "bench_peers": by_peers(options)}
        if options.llama_bench is not None:
            runs["llama-bench"] = by_tool([str(options.llama_bench)], options, model)
        for name, rates in runs.items():
            for kind, rate in rates.items():
                found.setdefault(kind, {}).setdefault(name, []).append(rate)
    rows = []
    for kind, by_name in found.items():
        medians = {name: statistics.median(rates) for name, rates in by_name.items()}
        count = options.prompt if kind == "pp" else options.generate
        row: dict[str, Any] = {"test": f"{kind}{count}"}
        row |= {f"{name} tok/s": rate for name, rate in medians.items()}
        row["bench / bench_peers"] = medians["bench"] / medians["bench_peers"]
        rows.append(row)
    harness.report(f"bench_command {what}", rows, options=options, rounds=found)


if __name__ == "__main__":
    main()
