"""Views of the parts of a `StatePool`, as its kernels read and write them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvboost_edge.backends.state_pool import StatePool

Floats = npt.NDArray[np.float32]


def tail(pool: StatePool, slot: int, layer: int) -> Floats:
    """Return a view of a layer's conv state, float32 [taps, channels]."""
    spec = pool.specs[layer]
    return _floats(pool._slots[slot], pool.offset(layer), (spec.taps, spec.channels))


def matrices(pool: StatePool, slot: int, layer: int) -> Floats:
    """Return a view of a layer's matrices, float32 [heads, tiles, key_dim, 16]."""
    spec = pool.specs[layer]
    shape = (spec.heads, -(-spec.value_dim // 16), spec.key_dim, 16)
    return _floats(pool._slots[slot], pool.offset(layer) + spec.tail_bytes, shape)


def draft_offset(pool: StatePool, layer: int) -> int:
    """Return the offset of a layer's part in a draft row."""
    return sum(spec.draft_bytes for spec in pool.specs[:layer])


def draft(pool: StatePool, row: int, layer: int) -> Floats:
    """Return a view of a layer's part of a draft row, float32 [channels + gates]."""
    spec = pool.specs[layer]
    return _floats(pool._drafts[row], draft_offset(pool, layer), (spec.channels + spec.gates,))


def _floats(row: npt.NDArray[np.uint8], start: int, shape: tuple[int, ...]) -> Floats:
    stop = start + 4 * int(np.prod(shape))
    floats: Floats = row[start:stop].view(np.float32)
    return floats.reshape(shape)
