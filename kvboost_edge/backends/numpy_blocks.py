"""Base class of the NumPy backends: block pool, conversion to bytes, and debugging aids."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.backends.base import DEFAULT_NUM_OPEN, KVSpec, LayerKVSpec
from kvboost_edge.backends.block_bytes import (
    as_rows,
    check_block,
    check_block_ids,
    check_content,
    gather,
    scatter,
)
from kvboost_edge.backends.quant_blocks import QuantBlocks, QuantKernels
from kvboost_edge.backends.state_pool import StatePool
from kvboost_edge.errors import CapacityError, ConfigError
from kvboost_edge.host.memory import Region
from kvboost_edge.kernels.attention.paged import KVPool, aligned_empty
from kvboost_edge.kernels.attention.storage import STORAGE_DTYPES, to_storage
from kvboost_edge.kernels.quantized_kv.code_layout import BIT_PAIRS

__all__ = ["NumpyBlocks", "unsupported_reason"]


def unsupported_reason(device: str, spec: KVSpec | None = None) -> str | None:
    """Return why a NumPy pool cannot use a device or store a spec, or None."""
    if device != "cpu":
        return f"NumPy arrays are on the CPU, not on device={device!r}"
    if spec is None:
        return None
    if spec.block_size < 16 or spec.block_size % 16:
        return f"block_size={spec.block_size} must be a multiple of 16"
    if spec.dtype not in STORAGE_DTYPES:
        return f"KV dtype {spec.dtype!r} is not one of {tuple(STORAGE_DTYPES)}"
    if spec.is_quantized and spec.bits not in BIT_PAIRS:
        return f"KV bits {spec.bits} must be one of (16, 16), {', '.join(map(str, BIT_PAIRS))}"
    if spec.is_quantized and spec.dtype != "float16":
        return f"KV dtype {spec.dtype!r} is not supported by a quantized pool; use 'float16'"
    return None


class NumpyBlocks:
    """Block pool of all layers in NumPy arrays.

    Raises:
        ConfigError: The spec is not supported.
        CapacityError: The memory cannot be allocated.
    """

    name: str
    array_kind = "numpy"
    device = "cpu"
    quant_kernels: QuantKernels

    def __init__(
        self,
        spec: KVSpec,
        num_blocks: int,
        *,
        num_open: int = DEFAULT_NUM_OPEN,
        num_state_slots: int = 0,
        num_draft_rows: int = 0,
    ) -> None:
        if num_blocks < 1:
            raise ConfigError(f"num_blocks={num_blocks} must be at least 1")
        problem = unsupported_reason(self.device, spec)
        if problem is not None:
            raise ConfigError(problem)
        self.spec = spec
        self.num_blocks = num_blocks
        if bool(spec.states) != (num_state_slots > 0):
            raise ConfigError(
                f"num_state_slots={num_state_slots} must be "
                f"{'at least 1' if spec.states else '0'} for a model with {len(spec.states)} "
                "layers of recurrent state"
            )
        self.states = (
            StatePool(spec.states, num_state_slots, num_draft_rows) if spec.states else None
        )
        self._pools: list[KVPool] = []
        self._quant: QuantBlocks | None = None
        try:
            if spec.is_quantized:
                self._quant = QuantBlocks(spec, num_blocks, num_open, self.quant_kernels)
            else:
                self._pools = [_layer_pool(spec, layer, num_blocks) for layer in spec.layers]
            # Number of times that each block was replaced as a whole (copied to, written,
            # poisoned). Runners that keep copies of blocks compare it.
            self.changes = np.zeros(num_blocks, dtype=np.int64)
        except MemoryError as error:
            raise CapacityError(
                f"the block pool does not fit in memory: num_blocks={num_blocks} x "
                f"{spec.bytes_per_block} bytes = {num_blocks * spec.bytes_per_block} bytes; lower "
                "num_blocks or max_cache_bytes"
            ) from error

    @property
    def pool_bytes(self) -> int:
        """Allocated bytes of the pool, including the buffers of open blocks."""
        if self._quant is not None:
            return self._quant.num_bytes
        return sum(array.nbytes for pool in self._pools for array in pool)

    @property
    def _state_rows(self) -> tuple[int, int]:
        """Number of recurrent state slots and of draft rows."""
        return (
            (0, 0) if self.states is None else (self.states.num_slots, self.states.num_draft_rows)
        )

    def _regions(self) -> tuple[Region, ...]:
        """Return the memory regions of the arrays counted by `pool_bytes`."""
        arrays = (
            [array for pool in self._pools for array in pool]
            if self._quant is None
            else self._quant.arrays
        )
        return tuple(Region(array.ctypes.data, array.nbytes) for array in arrays)

    def poison_blocks(self, block_ids: Sequence[int]) -> None:
        """Fill blocks with NaN in all layers."""
        ids = list(block_ids)
        if self._quant is not None:
            self._quant.poison(ids)
        self.changes[ids] += 1
        for pool in self._pools:
            for array in pool:
                array[ids] = to_storage(np.full(1, np.nan, dtype=np.float32), array.dtype)[0]

    def checksum_blocks(self, block_ids: Sequence[int]) -> list[int]:
        """Return the CRC-32 of each block, or of an open block's buffer, over all layers."""
        if self._quant is not None:
            return [self._quant.checksum(block_id) for block_id in block_ids]
        return [self._checksum(block_id) for block_id in block_ids]

    def read_blocks(self, block_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Copy whole blocks to uint8 [len(block_ids), bytes_per_block]; see `Backend`."""
        self._check_whole(block_ids)
        return gather(self._byte_rows(), block_ids)

    def write_blocks(self, block_ids: Sequence[int], data: npt.NDArray[np.uint8]) -> None:
        """Overwrite whole blocks with bytes from `read_blocks`; see `Backend`."""
        self._check_whole(block_ids)
        check_content(block_ids, data, self.spec.bytes_per_block)
        self.changes[list(block_ids)] += 1
        scatter(self._byte_rows(), block_ids, data)

    def gather_kv(
        self, block_ids: npt.NDArray[np.int32]
    ) -> list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        """Concatenate the KV of blocks for each layer.

        Keys and values are [num_kv_heads, blocks * block_size, head_dim] in the storage dtype.

        Raises:
            ConfigError: The pool is quantized.
        """
        if self.spec.is_quantized:
            raise ConfigError(
                f"KV quantized to {self.spec.bits} bits cannot be read as floats; read its bytes "
                "with read_blocks"
            )
        return [
            (_in_a_row(pool.keys[block_ids].swapaxes(2, 3)), _in_a_row(pool.values[block_ids]))
            for pool in self._pools
        ]

    def _check_whole(self, block_ids: Sequence[int]) -> None:
        check_block_ids(block_ids, self.num_blocks)
        if self._quant is not None:
            self._quant.check_full(block_ids)

    def _byte_rows(self) -> list[npt.NDArray[np.uint8]]:
        arrays = (
            self._coded.codes[0]
            if self.spec.is_quantized
            else [array for pool in self._pools for array in pool]
        )
        if not arrays:
            raise ConfigError(f"backend {self.name!r} is closed; create a new one")
        return [as_rows(array) for array in arrays]

    def release_blocks(self, block_ids: Sequence[int]) -> None:
        """Free the buffers of open blocks; see `Backend`."""
        if self._quant is not None:
            self._quant.release(block_ids)

    def close(self) -> None:
        """Release the pool."""
        self._pools = []
        self._quant = None
        if self.states is not None:
            self.states.close()

    @property
    def _coded(self) -> QuantBlocks:
        """Storage of the quantized pool. Raises ConfigError after `close`."""
        if self._quant is None:
            raise ConfigError(
                f"backend {self.name!r} has no quantized pool: it is closed, or its KV is not "
                "quantized"
            )
        return self._quant

    def _checksum(self, block_id: int) -> int:
        crc = 0
        for pool in self._pools:
            for array in pool:
                crc = zlib.crc32(array[block_id].reshape(-1).view(np.uint8), crc)
        return crc

    def _begin_copy(self, ops: Sequence[tuple[int, int]]) -> None:
        """Check the block ids of copies, and count the blocks as changed."""
        for pair in ops:
            for block_id in pair:
                check_block(block_id, self.num_blocks)
            self.changes[pair[1]] += 1


def _in_a_row(blocks: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Reshape [blocks, heads, block_size, dim] to [heads, blocks * block_size, dim]."""
    count, heads, size, dim = blocks.shape
    return blocks.swapaxes(0, 1).reshape(heads, count * size, dim)


def _layer_pool(spec: KVSpec, layer: LayerKVSpec, num_blocks: int) -> KVPool:
    heads = layer.num_kv_heads
    dim = layer.head_dim
    dtype = STORAGE_DTYPES[spec.dtype]
    return KVPool(
        aligned_empty((num_blocks, heads, dim, spec.block_size), dtype),
        aligned_empty((num_blocks, heads, spec.block_size, dim), dtype),
    )
