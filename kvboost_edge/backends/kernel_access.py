"""Storage access for runners that call the compiled kernels themselves."""

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
    """Arena indices of the buffers of a pass, for each layer of the same shape; see `PassPlan`.

    Attributes:
        slots: int64 [num_layers, num_tokens], arena slot of each new token.
        tables: int32 [num_layers, num_seqs, width], buffers that each sequence writes.
        continued: int64 [num_layers, n, 2], pairs (buffer, temporary buffer) to copy.
        closed: int64 [num_layers, n, 2], pairs (temporary buffer, block id) to quantize.
    """

    slots: Longs
    tables: npt.NDArray[np.int32]
    continued: Longs
    closed: Longs


class QuantizedStorage(Protocol):
    """The storage of a quantized pool."""

    @property
    def codes(self) -> tuple[list[npt.NDArray[np.uint8]], list[CodeLayout]]:
        """Codes of each layer, uint8 [num_blocks, num_kv_heads, bytes], and the layout of each."""
        ...

    def same_shape(self, shape: Any, batch: Any) -> tuple[OwnBlocks, Places]:
        """Return the buffers that a prepared pass reads and writes in layers of the same shape.

        Args:
            shape: A `LayerKVSpec`.
            batch: The prepared pass.

        Returns:
            `OwnBlocks` of the first such layer, and arena indices for all such layers in order.
        """
        ...


class KernelAccess(NamedTuple):
    """The storage and workspace of a backend with compiled kernels.

    Attributes:
        workspace: Threads and buffers of attention. Other kernels of the runner share the threads.
        plain_pools: Pools of all layers; empty if the pool is quantized.
        coded_blocks: Storage of a quantized pool; None if the pool is not quantized.
    """

    workspace: AttentionWorkspace
    plain_pools: Sequence[KVPool]
    coded_blocks: QuantizedStorage | None
