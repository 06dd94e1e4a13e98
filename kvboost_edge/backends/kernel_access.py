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
    """The buffers of a pass as indices in an arena, for each layer of one shape; see `PassPlan`.

    Attributes:
        slots: int64 [num_layers, num_tokens].
        tables: int32 [num_layers, num_seqs, width].
        continued: int64 [num_layers, n, 2].
        closed: int64 [num_layers, n, 2].
    """

    slots: Longs
    tables: npt.NDArray[np.int32]
    continued: Longs
    closed: Longs


class QuantizedStorage(Protocol):
    """The storage of a quantized pool."""

    @property
    def codes(self) -> tuple[list[npt.NDArray[np.uint8]], list[CodeLayout]]:
        """Codes of each layer, uint8 [num_blocks, num_kv_heads, bytes], and their layouts."""
        ...

    def same_shape(self, shape: Any, batch: Any) -> tuple[OwnBlocks, Places]:
        """Return what a prepared pass reads and writes in the layers of one shape.

        Args:
            shape: A `LayerKVSpec`.
            batch: The prepared pass.

        Returns:
            The own blocks of the first such layer, and the places of all of them, in order.
        """
        ...


class KernelAccess(NamedTuple):
    """The storage and workspace of a backend of compiled kernels.

    Attributes:
        workspace: Threads and buffers of attention. Kernels that alternate with it use its threads.
        plain_pools: The pools of all layers; empty if they are quantized.
        coded_blocks: The storage of a quantized pool; None if it is not quantized.
    """

    workspace: AttentionWorkspace
    plain_pools: Sequence[KVPool]
    coded_blocks: QuantizedStorage | None
