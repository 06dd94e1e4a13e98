"""What a runner needs that calls the compiled kernels on a backend's blocks itself, between kernels
of its own.
"""

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
    """A pass's buffers as places in the arena, for each of the layers of one shape; otherwise as in
    PassPlan.

    slots              int64 [num_layers, num_tokens]
    tables             int32 [num_layers, num_seqs, width]
    continued, closed  int64 [num_layers, n, 2]
    """

    slots: Longs
    tables: npt.NDArray[np.int32]
    continued: Longs
    closed: Longs


class QuantizedStorage(Protocol):
    """The storage of a quantized pool."""

    @property
    def codes(self) -> tuple[list[npt.NDArray[np.uint8]], list[CodeLayout]]:
        """The codes of each layer, uint8 [num_blocks, num_kv_heads, bytes], and where they lie in
        one of its blocks.
        """
        ...

    def same_shape(self, shape: Any, batch: Any) -> tuple[OwnBlocks, Places]:
        """What a prepared pass reads and writes of the layers of a shape, a LayerKVSpec: the own
        blocks of the first of them, and the places of all, in order.
        """
        ...


class KernelAccess(NamedTuple):
    """The inside of a backend of compiled kernels.

    workspace     threads and buffers of attention; kernels that take turns with it use its team
    plain_pools   the pools of all layers as they are stored; none where they are quantized
    coded_blocks  the storage of a quantized pool; None where it is not quantized
    """

    workspace: AttentionWorkspace
    plain_pools: Sequence[KVPool]
    coded_blocks: QuantizedStorage | None
