"""Unquantized KV storage in torch tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvboost_edge.backends.base import BatchLayout, KVSpec
from kvboost_edge.backends.torch.padded_groups import SameLength, TorchBatch

__all__ = ["DTYPES", "PlainBlocks"]

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class PlainBlocks:
    """KV blocks of each layer, k and v [num_blocks, block_size, num_kv_heads, head_dim]."""

    def __init__(self, spec: KVSpec, num_blocks: int, device: torch.device) -> None:
        self._pools = [
            [
                torch.zeros(
                    (num_blocks, spec.block_size, layer.num_kv_heads, layer.head_dim),
                    dtype=DTYPES[spec.dtype],
                    device=device,
                )
                for _ in range(2)
            ]
            for layer in spec.layers
        ]

    def of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all keys and values of a layer."""
        keys, values = self._pools[layer]
        return keys, values

    @property
    def arrays(self) -> list[torch.Tensor]:
        """Tensors counted by `pool_bytes`."""
        return self.whole_blocks

    @property
    def whole_blocks(self) -> list[torch.Tensor]:
        """Tensors [num_blocks, ...] in whose rows the bytes of a block are stored, in order."""
        return [half for pool in self._pools for half in pool]

    def prepare(self, layout: BatchLayout) -> None:
        """Do nothing, because unquantized pools need no plan."""

    def release(self, block_ids: Sequence[int]) -> None:
        """Do nothing, because no block has a buffer."""

    def check_full(self, block_ids: Sequence[int]) -> None:
        """Do nothing, because only the caller knows which blocks are full."""

    def copy(self, src: int, dst: int) -> None:
        """Copy a whole block in all layers."""
        for half in self.whole_blocks:
            half[dst].copy_(half[src])

    def write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, batch: TorchBatch
    ) -> None:
        """Store keys and values, [num_tokens, num_kv_heads, head_dim], at the batch's slots."""
        for half, tokens in zip(self._pools[layer], (keys, values), strict=True):
            half.flatten(0, 1).index_copy_(0, batch.slots, tokens.to(half.dtype))

    def gather(self, layer: int, group: SameLength) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather the KV of a group in float32, [num_seqs, num_kv_heads, num_slots, head_dim]."""
        num_seqs = len(group.blocks)
        keys, values = (
            half[group.blocks]
            .flatten(1, 2)
            .transpose(1, 2)
            .float()
            .reshape(num_seqs, half.shape[2], -1, half.shape[3])
            for half in self._pools[layer]
        )
        return keys, values

    def stored(
        self, layer: int, blocks: torch.Tensor, which: torch.Tensor, offsets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return KV at given slots of full blocks, float32 [num_slots, num_kv_heads, head_dim].

        Args:
            layer: Index of the layer.
            blocks: Block ids.
            which: Index into `blocks` for each slot.
            offsets: Offset of each slot in its block.
        """
        keys, values = (half[blocks][which, offsets].float() for half in self._pools[layer])
        return keys, values

    def poison(self, block_ids: Sequence[int]) -> None:
        """Fill blocks with NaN."""
        for half in self.whole_blocks:
            half[torch.tensor(list(block_ids), dtype=torch.int64).to(half.device)] = float("nan")

    def content(self, block_id: int) -> list[torch.Tensor]:
        """Return the tensors of a block that its checksum covers."""
        return [half[block_id] for half in self.whole_blocks]
