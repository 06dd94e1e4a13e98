"""Paged KV storage and attention in plain torch, for the devices cpu, mps and cuda.

Sequences with the same number of new tokens are computed together. Their blocks are gathered
through the block tables into one padded tensor, followed by a masked softmax. Gather indices and
masks are built once per pass and window, and all layers share them. There is no Python loop over
tokens.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvboost_edge.backends.base import (
    DEFAULT_NUM_OPEN,
    AttentionParams,
    BackendInfo,
    BatchLayout,
    KVSpec,
)
from kvboost_edge.backends.batch_layout import check_layout, refuse_deltas
from kvboost_edge.backends.block_bytes import check_block_ids, check_content, gather, scatter
from kvboost_edge.backends.state_pool import StatePool
from kvboost_edge.backends.torch import apple
from kvboost_edge.backends.torch.masked_attention import attend, query_slices, visible_slots
from kvboost_edge.backends.torch.padded_groups import SameLength, TorchBatch
from kvboost_edge.backends.torch.quantized_blocks import BITS, TorchQuantBlocks
from kvboost_edge.backends.torch.unquantized_blocks import DTYPES, PlainBlocks
from kvboost_edge.errors import BackendUnavailable, CapacityError, ConfigError
from kvboost_edge.kvcache.block_table import CopyOp

__all__ = ["TorchBackend", "make", "turn_keys", "unsupported_reason"]


def unsupported_reason(device: str, spec: KVSpec | None = None) -> str | None:
    """Return why torch cannot use a device or store KV of this kind, or None.

    An Apple GPU is tested once per process: its attention is compared with the CPU's.
    """
    problem = _refusal(device, spec)
    if problem is None and device.partition(":")[0] == "mps":
        problem = apple.find_fault(TorchBackend, device)
    return problem


def _refusal(device: str, spec: KVSpec | None) -> str | None:
    kind, _, index = device.partition(":")
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            return "torch sees no CUDA device"
        if index and (not index.isdigit() or int(index) >= count):
            return f"torch sees {count} CUDA device(s)"
    if kind == "mps":
        problem = apple.missing()
        if problem is not None:
            return problem
    if spec is not None and spec.is_quantized and spec.bits != BITS:
        return (
            f"torch does not support KV at {spec.bits} bits; use kv_cache_bits=16 or 8, or the "
            "native runner with backend='cpu'"
        )
    if spec is not None and spec.states:
        return (
            f"torch cannot store the recurrent state of this model's {len(spec.states)} "
            "recurrent layers; use the native runner with backend='cpu'"
        )
    return None


def make(
    spec: KVSpec,
    num_blocks: int,
    *,
    device: str,
    num_threads: int | None = None,
    num_open: int = DEFAULT_NUM_OPEN,
    num_state_slots: int = 0,
    num_draft_rows: int = 0,
) -> TorchBackend:
    """Allocate the backend; see `select.BackendModule`. The number of threads is torch's own."""
    return TorchBackend(spec, num_blocks, device=device, num_open=num_open)


class TorchBackend:
    """`Backend` of torch tensors. Scores and softmax are float32 for every storage dtype.

    Raises:
        BackendUnavailable: torch cannot use the device.
        CapacityError: The pool cannot be allocated.
    """

    name = "torch"
    array_kind = "torch"
    states: StatePool | None = None  # Hybrid models are refused.

    def __init__(
        self,
        spec: KVSpec,
        num_blocks: int,
        *,
        device: str = "cpu",
        num_open: int = DEFAULT_NUM_OPEN,
    ) -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        self.device = device
        # torch's own setting, which applies to a thread once it computes
        self._num_threads = torch.get_num_threads()
        if num_blocks < 1:
            raise ConfigError(f"num_blocks={num_blocks} must be at least 1")
        if spec.dtype not in DTYPES:
            raise ConfigError(f"KV dtype {spec.dtype!r} is not one of {tuple(DTYPES)}")
        problem = _refusal(device, spec)
        if problem is not None:
            raise BackendUnavailable(f"backend 'torch' on device={device!r}: {problem}")
        self._most_slots: int | None = None
        if device.partition(":")[0] == "mps":
            apple.check_buffers(spec, num_blocks)
            self._most_slots = apple.most_slots(spec)
        try:
            self._device = torch.device(device)
            # NumPy copies rows of bytes about fifty times as fast as torch on the CPU.
            self._in_host_memory = self._device.type == "cpu"
            self._held = self._allocate(num_open)
        except torch.OutOfMemoryError as error:
            raise CapacityError(self._no_room()) from error
        except (RuntimeError, AssertionError, TypeError) as error:
            if "memory" in str(error):
                raise CapacityError(self._no_room()) from error
            raise BackendUnavailable(
                f"device={device!r} is not usable by torch here: {error}"
            ) from error

    def _allocate(self, num_open: int) -> PlainBlocks | TorchQuantBlocks | None:
        if self.spec.is_quantized:
            return TorchQuantBlocks(self.spec, self.num_blocks, num_open, self._device)
        return PlainBlocks(self.spec, self.num_blocks, self._device)

    def _no_room(self) -> str:
        return (
            f"the block pool does not fit on {self.device}: num_blocks={self.num_blocks} x "
            f"{self.spec.bytes_per_block} bytes; lower num_blocks or max_cache_bytes"
        )

    @property
    def _blocks(self) -> PlainBlocks | TorchQuantBlocks:
        if self._held is None:
            raise ConfigError("backend 'torch' is closed; create a new one")
        return self._held

    @property
    def pool_bytes(self) -> int:
        """Allocated bytes of the pool, including the buffers of open blocks."""
        arrays = [] if self._held is None else self._held.arrays
        return sum(array.numel() * array.element_size() for array in arrays)

    @property
    def kernel_access(self) -> None:
        """None, because torch's kernels run on this pool."""
        return None

    def describe(self) -> BackendInfo:
        """Return the description of torch's kernels and threads."""
        return BackendInfo(
            self.name, self.device, threading_layer="torch", num_threads=self._num_threads
        )

    def prepare(self, layout: BatchLayout) -> TorchBatch:
        """Check a layout and convert it for one pass on the device.

        In a quantized pool, blocks are opened and closed, see `Backend`. Raises ConfigError that
        names a fault.
        """
        check_layout(layout, self.spec.block_size, self.num_blocks)
        plan = self._blocks.prepare(layout)
        return TorchBatch(
            layout, self.spec.block_size, self._device, plan=plan, most_slots=self._most_slots
        )

    def copy_blocks(self, ops: Sequence[CopyOp]) -> None:
        """Copy whole blocks of all layers in order."""
        self._check_copies(ops)
        for src, dst in ops:
            self._blocks.copy(src, dst)

    def _check_copies(self, ops: Sequence[CopyOp]) -> None:
        for src, dst in ops:
            if not (0 <= src < self.num_blocks and 0 <= dst < self.num_blocks):
                raise ConfigError(
                    f"copy {src} -> {dst} is outside the pool's blocks 0..{self.num_blocks - 1}"
                )

    def read_blocks(self, block_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Copy whole blocks to uint8 [len(block_ids), bytes_per_block]; see `Backend`."""
        rows = self._byte_rows(block_ids)
        if self._in_host_memory:
            return gather([some.numpy() for some in rows], block_ids)
        ids = torch.tensor(block_ids, dtype=torch.int64).to(self._device)
        data: npt.NDArray[np.uint8] = torch.cat([some[ids] for some in rows], dim=1).cpu().numpy()
        return data

    def write_blocks(self, block_ids: Sequence[int], data: npt.NDArray[np.uint8]) -> None:
        """Overwrite whole blocks with bytes from `read_blocks`; see `Backend`."""
        rows = self._byte_rows(block_ids)
        check_content(block_ids, data, self.spec.bytes_per_block)
        if self._in_host_memory:
            scatter([some.numpy() for some in rows], block_ids, data)
            return
        ids = torch.tensor(block_ids, dtype=torch.int64).to(self._device)
        # Copied, because torch has no read-only tensors.
        source = torch.from_numpy(data.copy()).to(self._device)
        for some, part in zip(
            rows, source.split([some.shape[1] for some in rows], dim=1), strict=True
        ):
            some[ids] = part

    def _byte_rows(self, block_ids: Sequence[int]) -> list[torch.Tensor]:
        """Return views of the pool's blocks as bytes, uint8 [num_blocks, n] each.

        Raises ConfigError unless all ids belong to full blocks of the pool.
        """
        rows = [half.flatten(1).view(torch.uint8) for half in self._blocks.whole_blocks]
        check_block_ids(block_ids, self.num_blocks)
        self._blocks.check_full(block_ids)
        return rows

    def release_blocks(self, block_ids: Sequence[int]) -> None:
        """Free the buffers of open blocks; see `Backend`."""
        self._blocks.release(block_ids)

    def write_kv(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, batch: TorchBatch
    ) -> None:
        """Store keys and values, [num_tokens, num_kv_heads, head_dim], at the batch's slots."""
        self._blocks.write(layer, keys, values, batch)

    def attention(
        self,
        layer: int,
        queries: torch.Tensor,
        batch: TorchBatch,
        params: AttentionParams,
        frequencies: npt.NDArray[np.float64] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute causal attention.

        Args:
            layer: Index of the layer.
            queries: [num_tokens, num_q_heads, head_dim].
            batch: The prepared pass.
            params: Constants of the layer.
            frequencies: Frequencies of the layer's plain RoPE, see `turn_keys`. They are used to
                rotate the keys of segments with a delta.

        Returns:
            The output, shaped like the queries, and lse, float32 [num_tokens, num_q_heads].

        Raises:
            ConfigError: A segment has a delta, and `frequencies` is None.
        """
        if len(batch.deltas) and frequencies is None:
            refuse_deltas(batch.layout, "backend 'torch' without RoPE frequencies")
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        lse = torch.empty(queries.shape[:2], dtype=torch.float32, device=queries.device)
        sinks = None
        if params.sinks is not None:
            sinks = torch.from_numpy(np.asarray(params.sinks, dtype=np.float32)).to(self._device)
        for group in batch.groups(params.window):
            keys, values = self._gather(layer, group)
            if group.k_turns is not None and frequencies is not None:
                keys = turn_keys(keys, batch.deltas, group.k_turns[:, None], frequencies)
            for chosen in query_slices(group, queries.shape[1]):
                # Unless buffers follow, later columns are in the future of all chosen queries and
                # are skipped.
                seen = slice(group.lead + chosen.stop if group.buffers is None else None)
                rows = group.rows.view(-1, group.q_len)[:, chosen]
                visible = visible_slots(group, chosen, params.window)[:, :, seen]
                part, part_lse = attend(
                    queries[rows], keys[:, :, seen], values[:, :, seen], visible, params, sinks
                )
                out[rows] = part.to(out.dtype)
                lse[rows] = part_lse
        return out, lse

    def _gather(self, layer: int, group: SameLength) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather the KV of a group in float32, [num_seqs, num_kv_heads, num_slots, head_dim]."""
        # Values of invisible slots are set to 0. Unwritten memory may be NaN, and a weight of 0
        # times NaN is NaN.
        keys, values = self._blocks.gather(layer, group)
        return keys, torch.where(group.k_valid[:, None, :, None], values, 0.0)

    def stored(self, layer: int, slots: npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's KV at given slots of full blocks.

        Keys and values are float32 [num_slots, num_kv_heads, head_dim].
        """
        blocks, offsets = np.divmod(slots, self.spec.block_size)
        distinct, which = np.unique(blocks, return_inverse=True)
        ids, at, inside = (
            torch.from_numpy(array).to(self._device) for array in (distinct, which, offsets)
        )
        return self._blocks.stored(layer, ids, at, inside)

    def poison_blocks(self, block_ids: Sequence[int]) -> None:
        """Fill blocks with NaN."""
        self._blocks.poison(block_ids)

    def checksum_blocks(self, block_ids: Sequence[int]) -> list[int]:
        """Return the CRC-32 of each block, or of an open block's buffers, over all layers."""
        return [self._checksum(block_id) for block_id in block_ids]

    def _checksum(self, block_id: int) -> int:
        crc = 0
        for content in self._blocks.content(block_id):
            crc = zlib.crc32(content.cpu().view(torch.uint8).numpy().tobytes(), crc)
        return crc

    def close(self) -> None:
        """Release the pool."""
        self._held = None


def turn_keys(
    keys: torch.Tensor,
    deltas: npt.NDArray[np.int64],
    which: torch.Tensor,
    frequencies: npt.NDArray[np.float64],
) -> torch.Tensor:
    """Rotate keys [..., head_dim] to later positions with plain RoPE.

    With n frequencies, channels i and i + n of a head rotate by position x frequencies[i]. Channels
    from 2n on are unchanged.

    Args:
        keys: The keys.
        deltas: int64 [num_deltas], in positions.
        which: int64, index of each key's delta, broadcast to the keys' leading dimensions.
        frequencies: float64 [n], radians per position.
    """
    count = len(frequencies)
    if not count:
        return keys
    angles = deltas[:, None] * frequencies  # computed on the CPU, because MPS has no float64
    cos, sin = (
        torch.from_numpy(f(angles).astype(np.float32)).to(keys.device)[which]
        for f in (np.cos, np.sin)
    )
    first = keys[..., :count]
    second = keys[..., count : 2 * count]
    rest = keys[..., 2 * count :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
