"""Cost of the block pool's bookkeeping: prefix lookup, allocation, freeing, decode step.

    python benchmarks/bench/bench_block_pool.py [--quick] [--out benchmarks/results/FILE.json]

    lookup    `peek` of a fully cached prompt, which is the worst case, because every block is
              hashed, found and compared
    open+free cost of a request on that prompt: matching, touching and freeing all blocks
    cold      open, extend, commit and free of an uncached prompt, with two hash computations
              (claim, publish) and eviction
    blocks    `extend` to many blocks, then `free`, per block. Once from an empty pool, once
              evicting cached blocks
    decode    one token of one sequence: extend by one slot, slot, commit

Everything runs in one thread of Python. `best` is the cost. Its distance to `median` shows the load
of the machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import harness
from kvboost_edge.kvcache.hashing import root_hash
from kvboost_edge.kvcache.manager import KVCacheManager

BLOCK_SIZE = 16
ROOT = root_hash(model_fingerprint="bench", kv_format="float32/16")
TARGET_LOOKUP_MS = 10.0
TARGET_BLOCK_US = 2.0


def main() -> None:
    options = harness.parser(__doc__ or "").parse_args()
    rounds = 3 if options.quick else 25
    rows: list[dict[str, Any]] = []
    for num_tokens in (2_000, 50_000):
        rows += prompt_rows(num_tokens, rounds)
    rows += block_rows(2_000, rounds)
    rows.append(decode_row(2_000 if options.quick else 20_000))
    report(rows, options)


def prompt(num_tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(150_000) for _ in range(num_tokens)]


def prompt_rows(num_tokens: int, rounds: int) -> list[dict[str, Any]]:
    tokens = prompt(num_tokens, seed=1)
    manager = KVCacheManager(num_tokens // BLOCK_SIZE + 2, BLOCK_SIZE)

    def run(token_ids: list[int]) -> None:
        table = manager.open_table(token_ids, ROOT)
        manager.extend(table, len(token_ids))
        manager.commit(table, token_ids, len(token_ids))
        manager.free(table)

    fresh = iter([prompt(num_tokens, seed=100 + number) for number in range(rounds + 1)])
    cold = harness.alternate({"cold": lambda: run(next(fresh))}, rounds=rounds)
    run(tokens)
    assert manager.peek(tokens, ROOT) == num_tokens - 1, (
        "the benchmark must look up a prompt that is cached"
    )
    warm = harness.alternate(
        {
            "lookup": lambda: manager.peek(tokens, ROOT),
            "open+free": lambda: manager.free(manager.open_table(tokens, ROOT)),
        },
        rounds=rounds,
    )
    manager.check_invariants([])
    return [
        row(f"lookup, {num_tokens} tokens cached", warm["lookup"], "ms", TARGET_LOOKUP_MS),
        row(f"open+free, {num_tokens} tokens cached", warm["open+free"], "ms"),
        row(f"cold, {num_tokens} tokens", cold["cold"], "ms"),
    ]


def block_rows(num_blocks: int, rounds: int) -> list[dict[str, Any]]:
    manager = KVCacheManager(num_blocks, BLOCK_SIZE)
    tokens = prompt(num_blocks * BLOCK_SIZE, seed=2)

    def allocate_and_free() -> None:
        table = manager.open_table([], ROOT, use_cache=False)
        manager.extend(table, num_blocks * BLOCK_SIZE)
        manager.free(table)

    def fill() -> None:
        table = manager.open_table(tokens, ROOT)
        manager.extend(table, len(tokens))
        manager.commit(table, tokens, len(tokens))
        manager.free(table)

    plain = harness.alternate({"plain": allocate_and_free}, rounds=rounds)["plain"]
    evicting = harness.alternate({"fill": fill, "evict": allocate_and_free}, rounds=rounds)["evict"]
    return [
        row(
            f"allocate + free, per block of {num_blocks}",
            [t / num_blocks for t in plain],
            "us",
            TARGET_BLOCK_US,
        ),
        row(
            "the same, each block evicted from the cache",
            [t / num_blocks for t in evicting],
            "us",
            TARGET_BLOCK_US,
        ),
    ]


def decode_row(num_steps: int) -> dict[str, Any]:
    manager = KVCacheManager(num_steps // BLOCK_SIZE + 4, BLOCK_SIZE)
    tokens = prompt(num_steps + 1, seed=3)
    running = [tokens[0]]
    table = manager.open_table(running, ROOT)

    def generate() -> None:
        for position, token in enumerate(tokens[1:], start=1):
            manager.extend(table, position)
            manager.slots(table, position - 1, position)
            manager.commit(table, running, position)
            running.append(token)

    seconds = harness.alternate({"generate": generate}, rounds=1, warmups=0)["generate"]
    manager.check_invariants([table])
    return row("decode step of one sequence", [seconds[0] / num_steps], "us")


def row(case: str, seconds: list[float], unit: str, target: float | None = None) -> dict[str, Any]:
    per_second = {"ms": 1e3, "us": 1e6}[unit]
    median = statistics.median(seconds) * per_second
    best = min(seconds) * per_second
    return {
        "case": case,
        "median": round(median, 4),
        "best": round(best, 4),
        "unit": unit,
        "target": target,
    }


def report(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    missed = [
        entry["case"]
        for entry in rows
        if entry["target"] is not None and entry["median"] >= entry["target"]
    ]
    harness.report(
        "block_pool", rows, options=options, block_size=BLOCK_SIZE, targets_missed=missed
    )


if __name__ == "__main__":
    main()
