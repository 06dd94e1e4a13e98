"""A self-test of the CUDA kernels, which compares them with torch in float32."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from kvboost_edge.backends.base import AttentionParams, Backend, BatchLayout, KVSpec, LayerKVSpec
from kvboost_edge.backends.torch_backend import TorchBackend
from kvboost_edge.kvcache.block_table import CopyOp

__all__ = ["failed_check", "kernel_dtypes"]

_BLOCK = 16
# Maximum absolute difference of outputs around 1. The dtypes round weights and results.
_TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2}
_LSE_TOLERANCE = 2e-3
_FIRST_BF16 = (8, 0)


class _Case(NamedTuple):
    """Shape of one comparison.

    Attributes:
        lengths: (new tokens, all tokens) of each sequence.
        group: Query heads per KV head.
    """

    head_dim: int
    num_kv_heads: int
    group: int
    lengths: tuple[tuple[int, int], ...]
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False


_CASES = (
    _Case(64, 2, 7, ((1, 40), (1, 1), (1, 530))),
    _Case(64, 2, 4, ((33, 33), (7, 100))),
    _Case(96, 2, 1, ((20, 60),), window=17),
    _Case(128, 1, 8, ((1, 300), (5, 5)), softcap=20.0),
    _Case(128, 2, 2, ((70, 150),), has_sinks=True),
    _Case(256, 1, 3, ((1, 65), (18, 40)), window=33, has_sinks=True),
)


def failed_check(make: Callable[[KVSpec, int], Backend], device: torch.device) -> str | None:
    """Compare the kernels with torch; describe a difference, or return None.

    The test covers written tokens, a copied block, and attention of a ragged batch, in float16 and,
    from sm_80 on, in bfloat16. A device error counts as a difference.

    Raises:
        CapacityError or torch.OutOfMemoryError: the device has too little free memory.
    """
    for dtype, case in itertools.product(kernel_dtypes(device), _CASES):
        try:
            problem = _compare(case, dtype, make, device)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotImplementedError) as error:
            problem = str(error)
        if problem:
            return (
                f"its kernels failed their test on {device} ({dtype}, head dim {case.head_dim}): "
                f"{problem}"
            )
    return None


@lru_cache
def kernel_dtypes(device: torch.device) -> tuple[str, ...]:
    """Return the dtypes that the kernels support: float16, and bfloat16 from sm_80 on."""
    has_bf16 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= _FIRST_BF16
    return ("float16", "bfloat16") if has_bf16 else ("float16",)


def _compare(
    case: _Case, dtype: str, make: Callable[[KVSpec, int], Backend], device: torch.device
) -> str:
    rng = np.random.default_rng(case.head_dim)
    layout, whole, num_blocks = _layouts(case, rng)
    spec = KVSpec((LayerKVSpec(case.num_kv_heads, case.head_dim),), _BLOCK, dtype)
    generator = torch.Generator().manual_seed(case.head_dim)
    num_q_heads = case.num_kv_heads * case.group

    def random(rows: int, heads: int) -> torch.Tensor:
        values = torch.randn(rows, heads, case.head_dim, generator=generator)
        return values.to(device, getattr(torch, dtype))

    keys, values = (random(len(whole.slot_mapping), case.num_kv_heads) for _ in range(2))
    queries = random(len(layout.slot_mapping), num_q_heads)
    sinks = rng.standard_normal(num_q_heads).astype(np.float32) if case.has_sinks else None
    params = AttentionParams(case.head_dim**-0.5, case.window, case.softcap, sinks)
    results = []
    for backend in (make(spec, num_blocks), TorchBackend(spec, num_blocks, device=str(device))):
        backend.poison_blocks(range(num_blocks))
        backend.write_kv(0, keys, values, backend.prepare(whole))
        used = int(layout.block_tables[0, 0])
        spare = num_blocks - 1
        backend.copy_blocks([CopyOp(used, spare)])
        out, lse = backend.attention(0, queries, backend.prepare(layout), params)
        results.append((out.float(), lse, backend.read_blocks(range(num_blocks))))
        backend.close()
    return _difference(results[0], results[1], dtype)


def _layouts(case: _Case, rng: np.random.Generator) -> tuple[BatchLayout, BatchLayout, int]:
    """Return a layout of the new tokens, one of all tokens, and the number of blocks they need."""
    # The blocks of a sequence are scattered, and one block is spare.
    needed = [-(-total // _BLOCK) for _, total in case.lengths]
    free = iter(rng.permutation(sum(needed)).tolist())
    tables = np.full((len(needed), max(needed)), -1, np.int32)
    for table, count in zip(tables, needed, strict=True):
        table[:count] = [next(free) for _ in range(count)]
    totals = np.array([total for _, total in case.lengths], np.int32)

    def layout(news: list[int]) -> BatchLayout:
        slots = []
        for table, new, total in zip(tables, news, totals.tolist(), strict=True):
            at = np.arange(total - new, total)
            slots.append(table[at // _BLOCK].astype(np.int64) * _BLOCK + at % _BLOCK)
        starts = np.cumsum([0, *news]).astype(np.int32)
        return BatchLayout(starts, totals, tables, np.concatenate(slots))

    return layout([new for new, _ in case.lengths]), layout(totals.tolist()), sum(needed) + 1


def _difference(
    mine: tuple[torch.Tensor, torch.Tensor, np.ndarray],
    torchs: tuple[torch.Tensor, torch.Tensor, np.ndarray],
    dtype: str,
) -> str:
    if not np.array_equal(mine[2], torchs[2]):
        return "blocks that were written or copied differ from torch's"
    for name, got, wanted, limit in (
        ("out", mine[0], torchs[0], _TOLERANCE[dtype]),
        ("lse", mine[1], torchs[1], _LSE_TOLERANCE),
    ):
        off = float((got - wanted).abs().max())
        if not off <= limit:  # the negation is also true for NaN
            return f"{name} is off by {off:.2g}, more than {limit:.2g}"
    return ""
