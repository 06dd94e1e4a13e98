"""8-bit KV storage of full blocks in torch tensors.

The byte format is the one of kernels/quantized_kv/code_layout.py. Packing and unpacking run on the
tensors' device, so an Apple GPU stores half the bytes of 16-bit KV.

As in other quantized pools, a query reads its own block from a float16 buffer, and all earlier
blocks from their codes. Results therefore do not depend on where a pass begins or ends. Codes are
decoded in float32, as in the reference. Attention sums are float32 too, while the CPU kernels round
weights to bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvboost_edge.backends.base import BatchLayout, KVSpec, LayerKVSpec
from kvboost_edge.backends.open_blocks import OpenBlocks, PassPlan
from kvboost_edge.backends.torch.padded_groups import SameLength, TorchBatch
from kvboost_edge.errors import ConfigError
from kvboost_edge.kernels.quantized_kv.code_layout import STEP_BIAS, CodeLayout, code_layout

__all__ = ["BITS", "TorchQuantBlocks", "decode", "encode"]

BITS = (8, 8)
_TOP = 255.0
# The floor keeps scales above 0. With the slack, a scale that was rounded down to float16 still
# reaches the largest value.
_SCALE_FLOOR = 6e-8
_SCALE_SLACK = 1.0 + 2.0**-10
_STEPS = np.ldexp(1 + np.arange(256) % 8 / 8, np.arange(256) // 8 - STEP_BIAS).astype(np.float32)


def encode(
    keys: torch.Tensor, values: torch.Tensor, layout: CodeLayout, steps: torch.Tensor
) -> torch.Tensor:
    """Quantize float16 blocks to codes, uint8 [n, num_kv_heads, bytes].

    Args:
        keys: [n, block, num_kv_heads, head_dim].
        values: [n, block, num_kv_heads, head_dim].
        layout: Layout of the codes.
        steps: float32 [256], the key step that each byte stands for.
    """
    num, size, heads, head_dim = keys.shape
    dim = layout.dim
    out = torch.zeros((num, heads, layout.nbytes), dtype=torch.uint8, device=keys.device)
    keys = keys.permute(0, 2, 3, 1).float().contiguous()  # makes the keys of a channel adjacent
    low = keys.amin(dim=-1)
    high = keys.amax(dim=-1)
    zeros = (low + (keys * 0.0).sum(dim=-1)).half()  # NaN if a key is not finite
    found = torch.searchsorted(steps, ((high - low) / _TOP).contiguous(), out_int32=True).clamp(
        max=255
    )
    scaled = ((keys - low[..., None]) * (1.0 / steps[found.long()])[..., None]).round()
    codes = out.new_zeros((num, heads, dim, size))
    codes[:, :, :head_dim] = scaled.nan_to_num(0.0, 0.0, 0.0).clamp(0.0, _TOP).to(torch.uint8)
    quads = codes.reshape(num, heads, dim // 4, 4, size).transpose(3, 4)
    out[..., : dim * size] = quads.flatten(2)
    out[..., layout.key_zeros : layout.key_zeros + 2 * head_dim] = zeros.contiguous().view(
        torch.uint8
    )
    out[..., layout.key_steps : layout.key_steps + head_dim] = found.to(torch.uint8)

    values = values.transpose(1, 2).float().contiguous()
    scales = (values.abs().amax(dim=-1) * (_SCALE_SLACK / 127.0) + _SCALE_FLOOR).half()
    scaled = (values * (1.0 / scales.float())[..., None]).round()
    signed = out.new_zeros((num, heads, size, dim)).view(torch.int8)
    signed[..., :head_dim] = scaled.nan_to_num(0.0, 0.0, 0.0).clamp(-127.0, 127.0).to(torch.int8)
    quads = signed.view(torch.uint8).reshape(num, heads, size // 4, 4, dim).transpose(3, 4)
    out[..., layout.values : layout.values + dim * size] = quads.flatten(2)
    scales = (scales.float() + (values * 0.0).sum(dim=-1)).half()
    out[..., layout.value_scales : layout.value_scales + 2 * size] = scales.contiguous().view(
        torch.uint8
    )
    return out


def decode(
    codes: torch.Tensor, layout: CodeLayout, steps: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode codes uint8 [..., bytes] to keys and values, float32 [..., block, head_dim]."""
    lead = codes.shape[:-1]
    size = layout.block_size
    dim = layout.dim

    def section(start: int, count: int) -> torch.Tensor:
        return codes[..., start : start + count].contiguous()

    keys = (
        section(0, dim * size)
        .view(*lead, dim // 4, size, 4)
        .transpose(-3, -2)
        .reshape(*lead, size, dim)
        .float()
    )
    zeros = section(layout.key_zeros, 2 * dim).view(torch.float16).float()
    found = steps[section(layout.key_steps, dim).long()]
    keys = zeros[..., None, :] + keys * found[..., None, :]
    signed = section(layout.values, dim * size).view(*lead, size // 4, dim, 4).transpose(-2, -1)
    scales = section(layout.value_scales, 2 * size).view(torch.float16).float()
    values = signed.reshape(*lead, size, dim).view(torch.int8).float() * scales[..., None]
    return keys[..., : layout.head_dim], values[..., : layout.head_dim]


class _Half(NamedTuple):
    """Float16 KV buffers, k and v [num_buffers, block_size, num_kv_heads, head_dim]."""

    keys: torch.Tensor
    values: torch.Tensor


class _Arena:
    """Buffers for layers of the same shape: `num_open` per layer, and shared temporary ones.

    Attributes:
        index: int64 [num_layers, num_open + num_temporary], the arena index of each of a plan's
            buffers in each layer.
    """

    def __init__(
        self, spec: KVSpec, shape: LayerKVSpec, num_open: int, device: torch.device
    ) -> None:
        self._shape = (spec.block_size, shape.num_kv_heads, shape.head_dim)
        self._num_open = num_open
        self._device = device
        self.num_kept = spec.layers.count(shape) * num_open
        self.buffers = self._make(self.num_kept)
        self.index = self._places(0)

    def _make(self, count: int) -> _Half:
        keys, values = (
            torch.zeros((count, *self._shape), dtype=torch.float16, device=self._device)
            for _ in range(2)
        )
        return _Half(keys, values)

    def _places(self, num_temporary: int) -> torch.Tensor:
        kept = np.arange(self.num_kept).reshape(-1, self._num_open)
        temporary = np.broadcast_to(
            self.num_kept + np.arange(num_temporary), (len(kept), num_temporary)
        )
        return torch.from_numpy(np.hstack([kept, temporary])).to(self._device)

    def grow(self, num_temporary: int) -> None:
        """Make room for `num_temporary` temporary buffers. The other buffers keep their content."""
        if len(self.buffers.keys) >= self.num_kept + num_temporary:
            return
        larger = self._make(self.num_kept + num_temporary)
        for old, new in zip(self.buffers, larger, strict=True):
            new[: self.num_kept] = old[: self.num_kept]
        self.buffers = larger
        self.index = self._places(num_temporary)


class TorchQuantBlocks:
    """Codes of all layers, uint8 [num_blocks, num_kv_heads, bytes], and buffers of open blocks.

    Raises ConfigError for a spec that cannot be quantized.
    """

    def __init__(self, spec: KVSpec, num_blocks: int, num_open: int, device: torch.device) -> None:
        if num_open < 1:
            raise ConfigError(f"num_open={num_open} must be at least 1")
        if spec.dtype != "float16":
            raise ConfigError(
                f"KV dtype {spec.dtype!r} is not supported by a quantized pool; use 'float16'"
            )
        if spec.block_size < 16 or spec.block_size % 16:
            raise ConfigError(
                f"block_size={spec.block_size} must be a multiple of 16 for quantized KV"
            )
        self._open = OpenBlocks(num_open, spec.block_size)
        self._steps = torch.from_numpy(_STEPS).to(device)
        self._layouts = [
            code_layout(spec.block_size, layer.head_dim, spec.bits) for layer in spec.layers
        ]
        self._pools = [
            torch.zeros(
                (num_blocks, layer.num_kv_heads, layout.nbytes), dtype=torch.uint8, device=device
            )
            for layer, layout in zip(spec.layers, self._layouts, strict=True)
        ]
        self._ordinals = [
            spec.layers[:index].count(layer) for index, layer in enumerate(spec.layers)
        ]
        arenas = {
            shape: _Arena(spec, shape, num_open, device) for shape in dict.fromkeys(spec.layers)
        }
        self._arenas = [arenas[layer] for layer in spec.layers]

    @property
    def arrays(self) -> list[torch.Tensor]:
        """Tensors counted by `pool_bytes`: codes and open buffers, without temporary buffers."""
        arenas = list(dict.fromkeys(self._arenas))
        return [
            *self._pools,
            *(half[: arena.num_kept] for arena in arenas for half in arena.buffers),
        ]

    @property
    def whole_blocks(self) -> list[torch.Tensor]:
        """Tensors [num_blocks, ...]. Row i of each, in this order, holds the bytes of block i."""
        return self._pools

    def prepare(self, layout: BatchLayout) -> PassPlan:
        """Plan the writes of a checked layout, opening and closing its blocks."""
        plan = self._open.plan(layout)
        for arena in dict.fromkeys(self._arenas):
            arena.grow(plan.num_temporary)
        return plan

    def release(self, block_ids: Sequence[int]) -> None:
        """Free the buffers of open blocks. Blocks that are not open are ignored."""
        self._open.release(block_ids)

    def check_full(self, block_ids: Sequence[int]) -> None:
        """Raise ConfigError if any of the blocks is open."""
        self._open.check_full(block_ids)

    def copy(self, src: int, dst: int) -> None:
        """Copy a block in all layers. An open block is copied from buffer to buffer."""
        pair = self._open.copied(src, dst)
        if pair is None:
            for pool in self._pools:
                pool[dst].copy_(pool[src])
            return
        for source, target in zip(self._halves(pair[0]), self._halves(pair[1]), strict=True):
            target.copy_(source)

    def write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, batch: TorchBatch
    ) -> None:
        """Store new tokens and quantize the blocks that are now full."""
        writes = batch.writes
        assert writes is not None
        arena = self._arenas[layer]
        index = self._arenas[layer].index[self._ordinals[layer]]
        for half, tokens in zip(arena.buffers, (keys, values), strict=True):
            if writes.num_continued:
                half[index[writes.continued_to]] = half[index[writes.continued_from]]
            half[index[writes.buffers], writes.offsets] = tokens.half()
        if writes.num_closed:
            closed = index[writes.closed]
            layout = self._layouts[layer]
            buffers = arena.buffers
            codes = encode(buffers.keys[closed], buffers.values[closed], layout, self._steps)
            self._pools[layer][writes.targets] = codes

    def gather(self, layer: int, group: SameLength) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather the KV of a group in float32, [num_seqs, num_kv_heads, num_slots, head_dim].

        Slots of decoded codes come first, then slots of buffers.
        """
        assert group.buffers is not None
        arena = self._arenas[layer]
        own = self._arenas[layer].index[self._ordinals[layer]][group.buffers]
        found = [[half[own].flatten(1, 2).transpose(1, 2).float()] for half in arena.buffers]
        if group.blocks.shape[1]:
            codes = self._pools[layer][group.blocks].transpose(1, 2)
            for some, decoded in zip(
                found, decode(codes, self._layouts[layer], self._steps), strict=True
            ):
                some.insert(0, decoded.flatten(2, 3))
        keys, values = (torch.cat(some, dim=2) for some in found)
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
        decoded = decode(self._pools[layer][blocks], self._layouts[layer], self._steps)
        keys, values = (half.transpose(1, 2)[which, offsets] for half in decoded)
        return keys, values

    def poison(self, block_ids: Sequence[int]) -> None:
        """Fill blocks with 0xFF bytes, which are NaN in float16."""
        for pool in self._pools:
            pool[torch.tensor(list(block_ids), dtype=torch.int64).to(pool.device)] = 0xFF
        for block_id in block_ids:
            buffer = self._open.buffer(block_id)
            for half in [] if buffer is None else self._halves(buffer):
                half.fill_(float("nan"))

    def content(self, block_id: int) -> list[torch.Tensor]:
        """Return the tensors that a checksum covers: an open block's buffers, else its codes."""
        buffer = self._open.buffer(block_id)
        return [pool[block_id] for pool in self._pools] if buffer is None else self._halves(buffer)

    def _halves(self, buffer: int) -> list[torch.Tensor]:
        """Return the keys and values in an open block's buffers, layer by layer."""
        return [
            half[ordinal * self._open.num_open + buffer]
            for arena, ordinal in zip(self._arenas, self._ordinals, strict=True)
            for half in arena.buffers
        ]
