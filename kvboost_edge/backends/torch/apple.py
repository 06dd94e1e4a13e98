"""Apple GPUs (MPS): availability, memory, and a test of attention.

Several versions of torch's MPS kernels compute wrong results without an error. No list of versions
is kept. Instead, attention is compared with the CPU's on a few shapes at startup, and a device that
fails is refused.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from kvboost_edge.backends.base import AttentionParams, BatchLayout, KVSpec, LayerKVSpec
from kvboost_edge.errors import CapacityError, KVBoostError
from kvboost_edge.host import memory
from kvboost_edge.kernels.quantized_kv.code_layout import code_layout

__all__ = ["available_bytes", "check_buffers", "find_fault", "missing", "most_slots"]

_BUFFER_BYTES = 1 << 32  # Largest Metal buffer. torch's kernels also fail beyond 2^32 elements.
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_BLOCK = 16
# Relative L2 distance, and absolute difference. Attending to one wrong token exceeds both by far.
_OUT_ERROR = 2e-3
_LSE_ERROR = 5e-3


def missing() -> str | None:
    """Return why torch cannot use an Apple GPU here, or None."""
    if torch.backends.mps.is_available():
        return None
    if not torch.backends.mps.is_built():
        return f"torch sees no Apple GPU (MPS): torch {torch.__version__} is built without it"
    return (
        f"torch sees no Apple GPU (MPS): torch {torch.__version__} is built with it, but this Mac "
        "has no Metal device or its macOS is too old for this torch; use device='cpu'"
    )


def available_bytes() -> int:
    """Return the bytes that the GPU may still allocate, as reported by torch and the machine."""
    left = int(torch.mps.recommended_max_memory()) - int(torch.mps.current_allocated_memory())
    return max(0, min(left, memory.available_bytes()))


def check_buffers(spec: KVSpec, num_blocks: int) -> None:
    """Raise CapacityError if a layer's keys, values or codes exceed the largest buffer."""
    per_block = max(_tensor_bytes(spec, layer) for layer in spec.layers)
    if num_blocks * per_block >= _BUFFER_BYTES:
        most = (_BUFFER_BYTES - 1) // per_block
        raise CapacityError(
            f"one layer of the pool needs num_blocks={num_blocks} x {per_block} bytes = "
            f"{num_blocks * per_block} bytes, but an Apple GPU's buffer must be smaller than "
            f"{_BUFFER_BYTES} bytes; set at most num_blocks={most} or "
            f"max_cache_bytes={most * spec.bytes_per_block}"
        )


def _tensor_bytes(spec: KVSpec, layer: LayerKVSpec) -> int:
    if spec.is_quantized:
        return layer.num_kv_heads * code_layout(spec.block_size, layer.head_dim, spec.bits).nbytes
    return spec.block_size * layer.num_kv_heads * layer.head_dim * _BYTES[spec.dtype]


def most_slots(spec: KVSpec) -> int:
    """Return the number of slots whose float32 keys fit in one buffer."""
    return (_BUFFER_BYTES - 1) // max(
        4 * layer.num_kv_heads * layer.head_dim for layer in spec.layers
    )


class _Trial(NamedTuple):
    """Shape of one test.

    Attributes:
        lengths: (new tokens, all tokens) of each sequence.
        per_kv: Query heads per KV head.
    """

    dtype: str
    bits: tuple[int, int]
    num_kv_heads: int
    per_kv: int
    head_dim: int
    lengths: tuple[tuple[int, int], ...]
    params: AttentionParams


# The trials cover decoding and prefill, one and many query heads per KV head, head dims from 64 on,
# and lengths around multiples of 4 and of the block size.
_TRIALS = (
    _Trial("float32", (16, 16), 2, 1, 64, ((7, 7), (7, 40)), AttentionParams(0.125)),
    _Trial("float16", (16, 16), 2, 4, 64, ((1, 33), (1, 130), (1, 16)), AttentionParams(0.125)),
    _Trial("float16", (16, 16), 1, 8, 128, ((37, 37), (5, 70)), AttentionParams(0.09)),
    _Trial("float16", (16, 16), 2, 3, 80, ((18, 50), (1, 64)), AttentionParams(0.11, window=20)),
    _Trial(
        "float32",
        (16, 16),
        3,
        2,
        96,
        ((9, 25),),
        AttentionParams(0.1, 0, 5.0, np.ones(6, np.float32)),
    ),
    _Trial("float16", (8, 8), 2, 3, 64, ((40, 40), (1, 50)), AttentionParams(0.125)),
)


@functools.cache
def find_fault(make: Callable[..., Any], device: str) -> str | None:
    """Compare attention on this device with the CPU's; describe a difference, or return None.

    The comparison takes about 50 ms. Its result is cached.

    Args:
        make: Function (spec, num_blocks, device=) that returns a backend with torch tensors.
        device: The device to test.
    """
    with _one_thread():
        return _find_fault(make, device)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Make torch compute on the calling thread only."""
    # With small shapes, torch's threads mostly wait for each other. On a busy machine, the trials
    # took 800 ms instead of 20 ms.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _find_fault(make: Callable[..., Any], device: str) -> str | None:
    for number, trial in enumerate(_TRIALS):
        try:
            out, lse = _run(make, device, trial)
        except (RuntimeError, TypeError, KVBoostError) as error:
            return _refused(number, trial, f"fails: {error}")
        wanted_out, wanted_lse = _run(make, "cpu", trial)
        distance = float(np.linalg.norm(out - wanted_out) / np.linalg.norm(wanted_out))
        error_of_lse = float(np.abs(lse - wanted_lse).max())
        if not (distance <= _OUT_ERROR and error_of_lse <= _LSE_ERROR):
            return _refused(
                number,
                trial,
                f"differs from the CPU's by {distance:.2g} (relative), more than the limit of "
                f"{_OUT_ERROR:g}",
            )
    return None


def _refused(number: int, trial: _Trial, what: str) -> str:
    return (
        f"attention of torch {torch.__version__} on it {what} (trial {number + 1} of "
        f"{len(_TRIALS)}: {trial.dtype}, KV at {trial.bits} bits, head_dim {trial.head_dim}); use "
        "another version of torch, or device='cpu'"
    )


def _run(make: Callable[..., Any], device: str, trial: _Trial) -> tuple[np.ndarray, np.ndarray]:
    """Compute the earlier tokens, then the new ones; return the output and lse of the new ones."""
    rng = np.random.default_rng(trial.head_dim)
    blocks = [-(-total // _BLOCK) for _, total in trial.lengths]
    spec = KVSpec(
        (LayerKVSpec(trial.num_kv_heads, trial.head_dim),), _BLOCK, trial.dtype, trial.bits
    )
    backend = make(spec, sum(blocks) + 1, device=device)
    ids = rng.permutation(sum(blocks) + 1)
    tables = np.full((len(blocks), max(blocks)), -1, dtype=np.int32)
    for row, (first, count) in zip(
        tables, zip(np.cumsum([0, *blocks[:-1]]), blocks, strict=True), strict=True
    ):
        row[:count] = ids[first : first + count]

    def rows(count: int, heads: int) -> torch.Tensor:
        made = rng.standard_normal((count, heads, trial.head_dim), dtype=np.float32)
        return torch.from_numpy(made).to(device, getattr(torch, trial.dtype))

    with torch.no_grad():
        for starts, stops in (
            ([0 for _ in blocks], [total - new for new, total in trial.lengths]),
            ([total - new for new, total in trial.lengths], [total for _, total in trial.lengths]),
        ):
            layout = _layout(starts, stops, tables)
            batch = backend.prepare(layout)
            count = len(layout.slot_mapping)
            backend.write_kv(
                0, rows(count, trial.num_kv_heads), rows(count, trial.num_kv_heads), batch
            )
        queries = rows(count, trial.num_kv_heads * trial.per_kv)
        out, lse = backend.attention(0, queries, batch, trial.params)
        found = out.float().cpu().numpy(), lse.cpu().numpy()
    backend.close()
    return found


def _layout(starts: list[int], stops: list[int], tables: np.ndarray) -> BatchLayout:
    positions = [np.arange(start, stop) for start, stop in zip(starts, stops, strict=True)]
    slots = [
        table[at // _BLOCK].astype(np.int64) * _BLOCK + at % _BLOCK
        for table, at in zip(tables, positions, strict=True)
    ]
    return BatchLayout(
        cu_seqlens_q=np.cumsum([0, *map(len, positions)]).astype(np.int32),
        seq_lens=np.array(stops, dtype=np.int32),
        block_tables=tables,
        slot_mapping=np.concatenate(slots),
    )
