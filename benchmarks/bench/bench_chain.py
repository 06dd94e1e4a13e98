"""Time that a replica saves when a request includes its prefix hashes.

    python benchmarks/bench/bench_chain.py [--tokens 1024 ...] [--rounds 200]

Measures the lookups of a request with and without prefix hashes, for a prompt that the pool
contains and for a new one. These are the calls that the scheduler makes before it admits a request
(`awaited_hash`, `open_table`), on the engine's thread.

`hashed` is the number of blocks hashed, which is the same on every machine. Times are in ms, as
medians over rounds. `travel` compares the size of the hashes with that of the tokens in bytes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import harness
from kvboost_edge.kvcache.hashing import (
    HASH_BYTES,
    TOKEN_BYTES,
    chain_hash,
    prefix_hashes,
    root_hash,
)
from kvboost_edge.kvcache.manager import KVCacheManager

BLOCK_TOKENS = 16
_ROOT = root_hash(model_fingerprint="benchmark", kv_format="")


class _Hashes:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, parent: bytes, tokens: bytes) -> bytes:
        self.count += 1
        return chain_hash(parent, tokens)


def measured(num_tokens: int, is_held: bool, knows: bool, rounds: int) -> tuple[float, int]:
    """Return the median ms of a request's lookups, and the number of blocks hashed."""
    hashes = _Hashes()
    tokens = [number % 50_000 for number in range(num_tokens)]
    manager = KVCacheManager(num_tokens // BLOCK_TOKENS + 2, BLOCK_TOKENS, hash_fn=hashes)
    if is_held:
        table = manager.open_table(tokens, _ROOT)
        manager.extend(table, num_tokens)
        manager.commit(table, tokens, num_tokens)
        manager.free(table)
    known = b"".join(prefix_hashes(tokens, _ROOT, BLOCK_TOKENS)) if knows else b""
    times = []
    before = hashes.count
    for _ in range(rounds):
        began = time.perf_counter()
        manager.awaited_hash(tokens, _ROOT, known)
        table = manager.open_table(tokens, _ROOT, known=known)
        times.append(time.perf_counter() - began)
        manager.free(table)
    return 1e3 * statistics.median(times), (hashes.count - before) // rounds


def main() -> None:
    options = harness.parser(__doc__ or "")
    options.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[1024, 8192, 32768],
        help="lengths of the prompts (default: %(default)s)",
    )
    options.add_argument(
        "--rounds", type=int, default=200, help="lookups per figure (default: %(default)s)"
    )
    given: argparse.Namespace = options.parse_args()
    rows: list[dict[str, Any]] = []
    for num_tokens in given.tokens:
        for is_held in (True, False):
            rounds = max(3, given.rounds // 20) if given.quick else given.rounds
            (plain, hashed), (known, left) = (
                measured(num_tokens, is_held, knows, rounds) for knows in (False, True)
            )
            rows.append(
                {
                    "tokens": num_tokens,
                    "held": is_held,
                    "ms, hashing": round(plain, 3),
                    "ms, hashes came along": round(known, 3),
                    "hashed": hashed,
                    "hashed of those that came": left,
                    "travel": round(HASH_BYTES / (BLOCK_TOKENS * TOKEN_BYTES), 2),
                }
            )
    harness.report("chain", rows, options=given)


if __name__ == "__main__":
    main()
