"""What the bookkeeping of the block pool costs: looking up a prefix, allocating and freeing blocks, one decode step.

    python benchmarks/bench_block_pool.py [--quick] [--out benchmarks/results/FILE.json]

lookup    `peek` of a prompt that is cached to its end, the worst case: every block is hashed, found and compared
open+free what a request pays around its life on that prompt: the match, touching all blocks, freeing them
cold      open, extend, commit and free of a prompt that is not cached: hashing twice (claim, publish), evicting
blocks    `extend` to many blocks, then `free`, per block; once from an empty pool, once evicting cached blocks
decode    one token of one sequence: extend by one slot, slot, commit
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import harness
from kvboost_edge.kvcache.hashing import root_hash
from kvboost_edge.kvcache.manager import KVCacheManager

BLOCK_SIZE = 16
ROOT = root_hash(model_fingerprint="bench", kv_format="float32/16")
TARGET_LOOKUP_MS = 10.0
TARGET_BLOCK_US = 2.0


def main() -> None:
    options = harness.parser(__doc__.splitlines()[0] if __doc__ else "").parse_args()
    rounds = 3 if options.quick else 15
    rows: list[dict[str, Any]] = []
    for num_tokens in (2_000, 50_000):
        rows += prompt_rows(num_tokens, rounds)
    rows += block_rows(20_000, rounds)
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

    cold_prompts = iter([prompt(num_tokens, seed=100 + number) for number in range(rounds + 1)])
    cold = harness.median_seconds(lambda: run(next(cold_prompts)), rounds=rounds)
    run(tokens)
    assert manager.peek(tokens, ROOT) == num_tokens - 1, "the benchmark must look up a prompt that is cached"
    lookup = harness.median_seconds(lambda: manager.peek(tokens, ROOT), rounds=rounds)
    warm = harness.median_seconds(lambda: manager.free(manager.open_table(tokens, ROOT)), rounds=rounds)
    manager.check_invariants([])
    return [
        row(f"lookup, {num_tokens} tokens cached", 1e3 * lookup, "ms", TARGET_LOOKUP_MS),
        row(f"open+free, {num_tokens} tokens cached", 1e3 * warm, "ms"),
        row(f"cold, {num_tokens} tokens", 1e3 * cold, "ms"),
    ]


def block_rows(num_blocks: int, rounds: int) -> list[dict[str, Any]]:
    manager = KVCacheManager(num_blocks, BLOCK_SIZE)

    def allocate_and_free() -> None:
        table = manager.open_table([], ROOT, use_cache=False)
        manager.extend(table, num_blocks * BLOCK_SIZE)
        manager.free(table)

    empty = harness.median_seconds(allocate_and_free, rounds=rounds)
    tokens = prompt(num_blocks * BLOCK_SIZE, seed=2)
    seconds = []
    for _ in range(min(rounds, 5)):
        table = manager.open_table(tokens, ROOT)
        manager.extend(table, len(tokens))
        manager.commit(table, tokens, len(tokens))
        manager.free(table)
        assert manager.cached_block_count == num_blocks
        seconds.append(harness.median_seconds(allocate_and_free, rounds=1, warmups=0))
    evicting = sorted(seconds)[len(seconds) // 2]
    return [
        row(f"allocate + free, per block of {num_blocks}", 1e6 * empty / num_blocks, "us", TARGET_BLOCK_US),
        row("the same, each block evicted from the cache", 1e6 * evicting / num_blocks, "us", TARGET_BLOCK_US),
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

    seconds = harness.median_seconds(generate, rounds=1, warmups=0)
    manager.check_invariants([table])
    return row("decode step of one sequence", 1e6 * seconds / num_steps, "us")


def row(case: str, value: float, unit: str, target: float | None = None) -> dict[str, Any]:
    return {"case": case, "value": round(value, 4), "unit": unit, "target": target}


def report(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    missed = [entry["case"] for entry in rows if entry["target"] is not None and entry["value"] >= entry["target"]]
    harness.report("block_pool", rows, options=options, block_size=BLOCK_SIZE, targets_missed=missed)


if __name__ == "__main__":
    main()
