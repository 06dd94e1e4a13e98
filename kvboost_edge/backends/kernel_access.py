"""Access to a backend's storage for runners that call the compiled kernels themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvboost_edge.kernels.attention.float_launch import AttentionWorkspace
from kvboost_edge.kernels.attention.paged import KVPool, OwnBlocks
from kvboost_edge.kernels.quantized_kv.code_layout import CodeLayout

__all__ = ["KernelAccess", "Places", "QuantizedStorage"]

Longs = npt.NDArray[np.int64]


class Places(NamedTuple):
    """A pass's buffers as places in the arena, for each layer of one shape; otherwise as in
    PassPlan.

    Attributes:
        slots: int64 [num_layers, num_tokens].
        tables: int32 [num_layers, num_seqs, width].
        continued, closed: int64 [num_layers, n, 2].
    """

    slots: Longs
    tables: npt.NDArray[np.int32]
    continued: Longs
    closed: Longs


class QuantizedStorage(Protocol):
    """The storage of a quantized pool."""

    @property
    def codes(self) -> tuple[list[npt.NDArray[np.uint8]], list[CodeLayout]]:
        """Codes of each layer, uint8 [num_blocks, num_kv_heads, bytes], and their layout in a
        block.
        """
        ...

    def same_shape(self, shape: Any, batch: Any) -> tuple[OwnBlocks, Places]:
        """Return the storage that a prepared pass reads and writes in layers of one shape, a
        LayerKVSpec: the own blocks of the first, and the places of all, in order.
        """
        ...


class KernelAccess(NamedTuple):
    """The storage and workspace of a backend of compiled kernels.

    Attributes:
        workspace: threads and buffers of attention; kernels that alternate with it use its team.
        plain_pools: the pools of all layers as stored; empty if they are quantized.
        coded_blocks: the storage of a quantized pool; None if it is not quantized.
    """

    workspace: AttentionWorkspace
    plain_pools: Sequence[KVPool]
    coded_blocks: QuantizedStorage | None
