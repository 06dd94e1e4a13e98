"""CUDA extension against torch's SDPA and, if installed, flash-attn; part of `make cuda-test`.

Decode uses 1 and 32 sequences at several depths. Prefill is causal with new tokens only. All use
float16. Our kernel reads blocks of 16 tokens through a shuffled table, the others read contiguous
KV. The results are compared before anything is timed.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import harness
from kvboost_edge.backends.cuda import extension, unsupported_reason

BLOCK_SIZE = 16
TOLERANCE = 5e-3


@dataclasses.dataclass(frozen=True)
class Case:
    """`num_seqs` sequences of `depth` keys. The last `num_queries` of each have queries."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    num_seqs: int
    depth: int
    num_queries: int = 1

    @property
    def kv_bytes(self) -> int:
        return 2 * 2 * self.num_kv_heads * self.head_dim * self.num_seqs * self.depth


def cases(quick: bool) -> list[Case]:
    heads = ((14, 2, 64), (32, 8, 128), (16, 8, 256))
    depths = (512,) if quick else (512, 4096, 32768)
    decode = [
        Case(*shape, num_seqs, depth) for shape in heads for num_seqs in (1, 32) for depth in depths
    ]
    fresh = 512 if quick else 4096
    return decode + [Case(*shape, 2, fresh, num_queries=fresh) for shape in heads]


def contenders(case: Case, kernels: Any, device: str) -> dict[str, Callable[[], torch.Tensor]]:
    """Return the contenders by name, as calls that return [num_seqs, num_queries, heads, head_dim].

    Raises:
        SystemExit: The results differ.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(case.num_seqs, rows, heads, case.head_dim, generator=generator).to(
            device, torch.float16
        )

    q, k, v = (
        draw(case.num_queries, case.num_q_heads),
        *(draw(case.depth, case.num_kv_heads) for _ in range(2)),
    )
    blocks_each = case.depth // BLOCK_SIZE
    table = torch.randperm(case.num_seqs * blocks_each, generator=generator).to(device)
    shape = (case.num_seqs * blocks_each, BLOCK_SIZE, case.num_kv_heads, case.head_dim)
    caches = [torch.empty(shape, dtype=k.dtype, device=device) for _ in range(2)]
    for cache, source in zip(caches, (k, v), strict=True):
        cache[table] = source.reshape(shape)
    rows = {
        "cu_seqlens_q": torch.arange(case.num_seqs + 1, dtype=torch.int32, device=device)
        * case.num_queries,
        "seqused_k": torch.full((case.num_seqs,), case.depth, dtype=torch.int32, device=device),
        "block_table": table.view(case.num_seqs, blocks_each).int(),
    }
    flat = q.flatten(0, 1)
    # Heads first and contiguous, which SDPA reads fastest.
    q_t, k_t, v_t = (x.transpose(1, 2).contiguous() for x in (q, k, v))

    def ours() -> torch.Tensor:
        out: torch.Tensor = kernels.paged_attention(
            *(flat, *caches),
            **rows,
            max_seqlen_q=case.num_queries,
            max_seqlen_k=case.depth,
            softmax_scale=case.head_dim**-0.5,
        )[0]
        return out.view_as(q)

    def sdpa() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q_t, k_t, v_t, is_causal=case.num_queries > 1, enable_gqa=True
        ).transpose(1, 2)

    found: dict[str, Callable[[], torch.Tensor]] = {"ours": ours, "sdpa": sdpa}
    if importlib.util.find_spec("flash_attn") is not None:
        from flash_attn import flash_attn_func

        found["flash-attn"] = lambda: flash_attn_func(q, k, v, causal=True)
    expected = sdpa().float()
    for name, work in found.items():
        off = float((work().float() - expected).abs().max())
        if not off <= TOLERANCE:
            raise SystemExit(f"{case}: {name} differs from SDPA by {off:.2g}, so nothing is timed")
    return found


def timed(work: Callable[[], torch.Tensor], calls: int) -> Callable[[], None]:
    """Run `calls` calls on the device and wait for the last."""

    def run() -> None:
        for _ in range(calls):
            work()
        torch.cuda.synchronize()

    return run


def main() -> None:
    options = harness.parser(__doc__ or "").parse_args()
    reason = unsupported_reason("cuda")
    if reason is not None:
        sys.exit(f"there is nothing to time: {reason}")
    rounds, calls = (3, 5) if options.quick else (15, 20)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for case in cases(options.quick):
            works = {
                name: timed(work, calls)
                for name, work in contenders(case, extension(), "cuda").items()
            }
            seconds = harness.alternate(works, rounds=rounds, warmups=3)
            medians = {name: statistics.median(each) / calls for name, each in seconds.items()}
            rows.append(
                {
                    "heads": f"{case.num_q_heads}q/{case.num_kv_heads}kv x {case.head_dim}",
                    "sequences": case.num_seqs,
                    "queries": case.num_queries,
                    "keys": case.depth,
                    **{f"{name} us": round(value * 1e6, 1) for name, value in medians.items()},
                    "ours/sdpa": round(medians["ours"] / medians["sdpa"], 2),
                    "GB/s": round(case.kv_bytes / medians["ours"] / 1e9),
                }
            )
    harness.report("cuda", rows, options=options, device=torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
