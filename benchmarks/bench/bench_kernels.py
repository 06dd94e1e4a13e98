"""Paged attention of the CPU backend, against torch's SDPA and against memory bandwidth.

Decode uses 1 and 8 sequences at several depths, float32 and two head layouts. Both contenders read
the same keys and values. Ours reads shuffled blocks of a pool through a block table, torch's one
contiguous tensor per batch.

`bandwidth` is the share of a plain read of a large buffer by our team of threads, median against
median. The read is timed in turn with the contenders. It also gives torch's threads, which spin for
a while after a call, time to sleep before ours is timed. Prefill computes 2,112 new tokens. The
results are compared before anything is timed.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import harness
from benchmarks.bench.plain_read import plain_read
from kvboost_edge.backends.base import AttentionParams, BatchLayout, KVSpec, LayerKVSpec
from kvboost_edge.backends.cpu import CPUBackend
from kvboost_edge.host.processor import default_num_threads

BLOCK_SIZE = 16
TOLERANCE = 1e-4
BANDWIDTH_TARGET = 0.7
# Minimum depth for which the share of bandwidth counts. Smaller KV may be in CPU caches and exceed
# it.
DEEP = 4096
READ_BYTES = 512 << 20


@dataclasses.dataclass(frozen=True)
class Case:
    """`num_seqs` sequences of `depth` tokens. The last `num_queries` of each are computed."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    num_seqs: int
    depth: int
    num_queries: int = 1

    @property
    def name(self) -> str:
        kind = "decode" if self.num_queries == 1 else "prefill"
        return f"{kind} {self.num_q_heads}q/{self.num_kv_heads}kv x {self.head_dim}"

    @property
    def kv_bytes(self) -> int:
        return 2 * 4 * self.num_kv_heads * self.head_dim * self.num_seqs * self.depth


def cases(quick: bool) -> list[Case]:
    depths = (512, 1024) if quick else (512, 4096, 16384)
    heads = ((14, 2, 64), (32, 8, 128))
    decode = [
        Case(*shape, num_seqs, depth) for shape in heads for num_seqs in (1, 8) for depth in depths
    ]
    fresh = 256 if quick else 2112
    return decode + [Case(*shape, 1, fresh, num_queries=fresh) for shape in heads]


def contenders(case: Case, num_threads: int) -> tuple[dict[str, Callable[[], Any]], CPUBackend]:
    """Return both ways to compute a case on the same random numbers, after comparing them."""
    rng = np.random.default_rng(case.depth)
    blocks_each = -(-case.depth // BLOCK_SIZE)
    backend = CPUBackend(
        KVSpec((LayerKVSpec(case.num_kv_heads, case.head_dim),), BLOCK_SIZE, "float32"),
        case.num_seqs * blocks_each,
        num_threads=num_threads,
    )
    shape = (case.num_seqs, case.depth, case.num_kv_heads, case.head_dim)
    keys, values = (rng.standard_normal(shape, dtype=np.float32) for _ in range(2))
    queries = rng.standard_normal(
        (case.num_seqs * case.num_queries, case.num_q_heads, case.head_dim), dtype=np.float32
    )
    tables = (
        rng.permutation(backend.num_blocks).astype(np.int32).reshape(case.num_seqs, blocks_each)
    )
    for sequence in range(case.num_seqs):
        positions = np.arange(case.depth)
        slots = (
            tables[sequence, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE
            + positions % BLOCK_SIZE
        )
        layout = BatchLayout(
            np.array([0, case.depth], np.int32),
            np.array([case.depth], np.int32),
            tables[sequence : sequence + 1],
            slots,
        )
        backend.write_kv(0, keys[sequence], values[sequence], backend.prepare(layout))
    batch = backend.prepare(decode_layout(case, tables))
    params = AttentionParams(softmax_scale=case.head_dim**-0.5)

    k, v = (torch.from_numpy(array).transpose(1, 2).contiguous() for array in (keys, values))
    q = (
        torch.from_numpy(queries)
        .view(case.num_seqs, case.num_queries, case.num_q_heads, case.head_dim)
        .transpose(1, 2)
    )
    q = q.contiguous()

    def ours() -> np.ndarray[Any, Any]:
        return backend.attention(0, queries, batch, params)[0]

    def sdpa() -> torch.Tensor:
        with torch.inference_mode():
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=case.num_queries > 1, enable_gqa=True
            )

    expected = sdpa().transpose(1, 2).reshape(queries.shape).numpy()
    error = float(np.linalg.norm(ours() - expected) / np.linalg.norm(expected))
    if error > TOLERANCE:
        raise SystemExit(
            f"{case}: the results differ by {error:.2g} (relative), so nothing is timed"
        )
    return {"ours": ours, "sdpa": sdpa}, backend


def decode_layout(case: Case, tables: np.ndarray[Any, np.dtype[np.int32]]) -> BatchLayout:
    """Return the layout for the last `num_queries` tokens of every sequence."""
    positions = np.arange(case.depth - case.num_queries, case.depth)
    slots = (
        tables[:, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    )
    return BatchLayout(
        np.arange(case.num_seqs + 1, dtype=np.int32) * case.num_queries,
        np.full(case.num_seqs, case.depth, np.int32),
        tables,
        slots.reshape(-1),
    )


def main() -> None:
    options = harness.parser(__doc__ or "").parse_args()
    num_threads = default_num_threads()
    torch.set_num_threads(num_threads)
    rounds = 5 if options.quick else 15
    buffer = np.ones(READ_BYTES // 4, np.float32)
    bandwidths: list[float] = []
    rows: list[dict[str, Any]] = []
    missed: list[str] = []
    for case in cases(options.quick):
        work, backend = contenders(case, num_threads)
        from_memory = case.num_queries == 1 and case.depth >= DEEP
        if from_memory:
            team = backend.kernel_access.workspace.team
            work["read"] = lambda team=team: plain_read(buffer.ctypes.data, READ_BYTES, team)
        seconds = harness.alternate(work, rounds=rounds, warmups=3)
        backend.close()
        ours, sdpa = (statistics.median(seconds[name]) for name in ("ours", "sdpa"))
        share = None
        if from_memory:
            bandwidths.append(READ_BYTES / statistics.median(seconds["read"]))
            share = case.kv_bytes / ours / bandwidths[-1]
        label = f"{case.name}, {case.num_seqs} at {case.depth}"
        if ours > sdpa:
            missed.append(f"{label}: slower than SDPA")
        if share is not None and share < BANDWIDTH_TARGET:
            missed.append(f"{label}: {share:.0%} of the read bandwidth")
        rows.append(
            {
                "case": case.name,
                "sequences": case.num_seqs,
                "depth": case.depth,
                "ours ms": round(ours * 1e3, 3),
                "spread": f"{min(seconds['ours']) * 1e3:.2f}-{max(seconds['ours']) * 1e3:.2f}",
                "sdpa ms": round(sdpa * 1e3, 3),
                "ours/sdpa": round(ours / sdpa, 2),
                "GB/s": round(case.kv_bytes / ours / 1e9, 1),
                "bandwidth": None if share is None else round(share, 2),
            }
        )
    reads = [round(value / 1e9, 1) for value in bandwidths]
    print(f"plain read: {reads} GB/s; targets missed: {missed or 'none'}")
    harness.report("kernels", rows, options=options, read_gb_per_s=reads, targets_missed=missed)


if __name__ == "__main__":
    main()
