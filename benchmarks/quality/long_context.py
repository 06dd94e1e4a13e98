"""Retrieval and multi-hop questions about long texts, with exact and sparse prefill.

The questions are those of `kvboost-edge eval --retrieval`.

    python benchmarks/quality/long_context.py --model FILE --context 8192 --count 20
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.harness import parser, report
from kvboost_edge import CPUPagedEngine
from kvboost_edge.engine.retrieval import TASKS, score_task


def _row(engine: CPUPagedEngine, task: str, context: int, count: int) -> dict[str, Any]:
    found = score_task(engine, task, count=count, context=context)
    return {
        "prefill": engine.config.prefill,
        "task": task,
        "questions": count,
        "tokens": found.tokens,
        "score": round(100 * found.score, 1),
        "median_s": round(found.seconds, 2),
    }


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--model", required=True, help="GGUF file or model directory")
    options.add_argument(
        "--context",
        type=int,
        default=8192,
        metavar="TOKENS",
        help="length of the prompts (default: %(default)s)",
    )
    options.add_argument("--count", type=int, default=20, help="questions per task")
    options.add_argument(
        "--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="tasks (default: all)"
    )
    options.add_argument(
        "--prefill",
        nargs="+",
        default=["exact", "sparse"],
        help="kinds of prefill to compare (default: %(default)s)",
    )
    options.add_argument(
        "--kv-cache-bits", type=int, default=8, help="bits per KV value (default: %(default)s)"
    )
    options.add_argument(
        "--threads", type=int, help="number of compute threads (default: all CPUs)"
    )
    chosen = options.parse_args()
    count = 1 if chosen.quick else chosen.count
    rows = []
    for prefill in chosen.prefill:
        with CPUPagedEngine.from_pretrained(
            chosen.model,
            prefill=prefill,
            kv_cache_bits=chosen.kv_cache_bits,
            num_threads=chosen.threads,
            max_model_len=chosen.context,
            max_num_seqs=1,
            num_blocks=chosen.context // 16 + 64,
        ) as engine:
            for task in chosen.tasks:
                rows.append(_row(engine, task, chosen.context, count))
                print(rows[-1], flush=True)
    report("long-context", rows, options=chosen, model=Path(chosen.model).name)


if __name__ == "__main__":
    main()
