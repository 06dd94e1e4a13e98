"""Simulator of eviction policies: replays traces of requests on the real block manager.

    python benchmarks/simulators/eviction.py [--quick] [--trace FILE.jsonl ...] [--out
    benchmarks/results/FILE.json]

Each trace runs under each policy, in pools of 1%, 2% and 5% of its distinct blocks, but at least
twice its longest request. In larger pools, plain LRU already serves nearly everything. A block of
the pool stands for one id of the trace. Up to four requests run at a time if the pool has room.
`--trace` adds recorded traces in Mooncake's format.

    hit Mtokens    millions of prompt tokens that the pool served
    against lru    the same divided by plain LRU's
    evictions      matchable blocks that were reused for other content
    prefills       requests that recomputed prompt blocks which had been in the pool before

Nothing is timed, so a run gives the same figures on every machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import harness
from benchmarks.data.eviction_traces import BLOCK_TOKENS, TRACES, Access, read_mooncake
from kvboost_edge.kvcache.block_table import BlockTable
from kvboost_edge.kvcache.eviction.policy import EvictionPolicy, LeastRecentlyUsed, TenantFloors
from kvboost_edge.kvcache.hashing import root_hash
from kvboost_edge.kvcache.manager import KVCacheManager

__all__ = ["POLICIES", "FirstInFirstOut", "LeastFrequentlyUsed", "Replayed", "replay"]

_SHARES = (0.01, 0.02, 0.05)
_AT_A_TIME = 4
# Tokens per block of the pool. Every token of a block is the block's id, and one extra token makes
# the whole prompt matchable.
_SIZE = 2


class LeastFrequentlyUsed:
    """Policy that evicts the least frequently used block, and of equals the least recently used."""

    def __init__(self, block_ids: Iterable[int]) -> None:
        self._plain = dict.fromkeys(block_ids)
        self._uses: dict[int, int] = {}
        self._ranks: dict[int, tuple[int, int]] = {}  # ranks of the matchable blocks
        self._heap: list[tuple[tuple[int, int], int]] = []
        self._clock = 0

    def __len__(self) -> int:
        return len(self._plain) + len(self._ranks)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._plain or block_id in self._ranks

    def put(self, block_id: int, *, matchable: bool, owner: bytes = b"", again: int = 0) -> None:
        if not matchable:
            self._plain[block_id] = None
            return
        self._uses[block_id] = self._uses.get(block_id, 0) + 1
        self._rank(block_id)

    def _rank(self, block_id: int) -> None:
        self._clock += 1
        self._ranks[block_id] = rank = self._order_of(block_id)
        heapq.heappush(self._heap, (rank, block_id))

    def _order_of(self, block_id: int) -> tuple[int, int]:
        return self._uses[block_id], self._clock

    def remove(self, block_id: int) -> None:
        if self._ranks.pop(block_id, None) is None:
            del self._plain[block_id]

    def refresh(self, block_id: int) -> None:
        if block_id in self._ranks:
            self._rank(block_id)

    def demote(self, block_id: int) -> None:
        pass

    def take(self, count: int, owner: bytes = b"") -> list[int]:
        taken = [self._plain.popitem()[0] for _ in range(min(count, len(self._plain)))]
        while len(taken) < count:
            rank, block_id = heapq.heappop(self._heap)
            if self._ranks.get(block_id) == rank:
                del self._ranks[block_id]
                taken.append(block_id)
        for block_id in taken:
            self._uses.pop(block_id, None)
        return taken

    def protected(self, owner: bytes) -> int:
        return 0

    def order(self) -> list[int]:
        return [*self._plain, *sorted(self._ranks, key=self._ranks.__getitem__)]

    def missed(self, *, once: int, again: int) -> None:
        pass


class FirstInFirstOut(LeastFrequentlyUsed):
    """Policy that evicts the oldest block, regardless of its uses."""

    def __init__(self, block_ids: Iterable[int]) -> None:
        super().__init__(block_ids)
        self._born: dict[int, int] = {}

    def _order_of(self, block_id: int) -> tuple[int, int]:
        if self._uses[block_id] == 1:
            self._born.setdefault(block_id, self._clock)
        return 0, self._born[block_id]

    def take(self, count: int, owner: bytes = b"") -> list[int]:
        taken = super().take(count, owner)
        for block_id in taken:
            self._born.pop(block_id, None)
        return taken


POLICIES: dict[str, Callable[[Iterable[int]], EvictionPolicy]] = {
    "lru": LeastRecentlyUsed,
    "fifo": FirstInFirstOut,
    "lfu": LeastFrequentlyUsed,
    "ours": TenantFloors,
}


@dataclasses.dataclass(slots=True)
class Replayed:
    """Counts of a replay, described in the module docstring. `hits` are tokens by tenant."""

    hits: dict[str, int] = dataclasses.field(default_factory=dict)
    evictions: int = 0
    prefills: int = 0

    @property
    def hit_tokens(self) -> int:
        return sum(self.hits.values())


def replay(
    trace: Sequence[Access],
    num_blocks: int,
    policy: Callable[[Iterable[int]], EvictionPolicy],
    check_every: int = 0,
) -> Replayed:
    """Replay a trace on a pool, and verify all bookkeeping after each `check_every` requests."""
    manager = KVCacheManager(num_blocks, _SIZE, policy=policy)
    roots = {
        name: root_hash(model_fingerprint="replay", kv_format="", tenant=name)
        for name in {a.tenant for a in trace}
    }
    running: deque[BlockTable] = deque()
    known: set[int] = set()
    counted = Replayed(dict.fromkeys(roots, 0))
    for number, access in enumerate(trace, 1):
        ids = (*access.prompt_ids, *access.output_ids)
        tokens = [token for one in ids for token in (one, one)]
        prompt = [*tokens[: len(access.prompt_ids) * _SIZE], 0]
        if len(running) == _AT_A_TIME:
            manager.free(running.popleft())
        root = roots[access.tenant]
        table = manager.open_table(prompt, root, owner=root)
        while manager.blocks_needed(table, len(tokens) + 1) > manager.free_block_count:
            manager.free(running.popleft())
        served = table.num_cached_tokens // _SIZE
        counted.hits[access.tenant] += min(served * BLOCK_TOKENS, access.num_tokens)
        counted.prefills += not known.isdisjoint(access.prompt_ids[served:])
        manager.extend(table, len(tokens) + 1)
        manager.commit(table, [*tokens, 0], len(tokens) + 1)
        known.update(ids)
        running.append(table)
        if check_every and number % check_every == 0:
            manager.check_invariants(running)
    counted.evictions = manager.evictions
    return counted


def pool_sizes(trace: Sequence[Access]) -> list[int]:
    """Return the pool sizes to replay a trace with."""
    distinct = len({one for access in trace for one in (*access.prompt_ids, *access.output_ids)})
    longest = max(len(access.prompt_ids) + len(access.output_ids) for access in trace) + 1
    return sorted({max(int(share * distinct), 2 * longest) for share in _SHARES})


def rows_of(name: str, trace: Sequence[Access], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Return one row for each pool size and policy."""
    asked = sum(access.num_tokens for access in trace)
    rows: list[dict[str, Any]] = []
    for num_blocks in sizes:
        plain = None
        for policy_name, policy in POLICIES.items():
            result = replay(trace, num_blocks, policy)
            plain = plain or result.hit_tokens
            rows.append(
                {
                    "trace": name,
                    "blocks": num_blocks,
                    "order": policy_name,
                    "hit Mtokens": round(result.hit_tokens / 1e6, 3),
                    "hit rate": round(result.hit_tokens / asked, 4),
                    "against lru": round(result.hit_tokens / plain, 4) if plain else None,
                    "evictions": result.evictions,
                    "prefills": result.prefills,
                }
            )
    return rows


def main() -> None:
    options = harness.parser(__doc__ or "")
    options.add_argument(
        "--trace",
        type=Path,
        action="append",
        default=[],
        help="recorded trace in Mooncake's format",
    )
    given: argparse.Namespace = options.parse_args()
    traces = {name: make() for name, make in TRACES.items()}
    traces.update({path.stem: read_mooncake(path) for path in given.trace})
    rows: list[dict[str, Any]] = []
    for name, trace in traces.items():
        short = trace[: 500 if given.quick else None]
        rows += rows_of(name, short, pool_sizes(short))
    harness.report("eviction", rows, options=given, block_tokens=BLOCK_TOKENS)


if __name__ == "__main__":
    main()
