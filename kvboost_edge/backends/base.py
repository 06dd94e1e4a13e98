"""The interface of a KV backend: paged KV storage, and attention that reads it in place.

A backend knows neither requests nor models. It owns one pool of `num_blocks` blocks for all layers.
The engine moves whole blocks: `copy_blocks` before a pass, `read_blocks` and `write_blocks` for
offload tiers. A runner calls `prepare` once per forward pass, then `write_kv` and `attention` for
each layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvboost_edge.backends.state_pool import LayerStateSpec, StatePool
from kvboost_edge.host.memory import Region
from kvboost_edge.kernels.quantized_kv.code_layout import code_layout
from kvboost_edge.kvcache.block_table import CopyOp
from kvboost_edge.segments import Segments

if TYPE_CHECKING:
    from kvboost_edge.backends.kernel_access import KernelAccess

__all__ = [
    "DEFAULT_NUM_OPEN",
    "AttentionParams",
    "Backend",
    "BackendInfo",
    "BatchLayout",
    "KVSpec",
    "LayerKVSpec",
    "LayerStateSpec",
    "PassStates",
]

DEFAULT_NUM_OPEN = 17
"""Default number of open blocks of a quantized pool: one each for 16 sequences, and a spare one."""
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclasses.dataclass(frozen=True, slots=True)
class LayerKVSpec:
    """Shape of one layer's KV.

    Attributes:
        num_kv_heads: Number of KV heads.
        head_dim: Size of a key or a value.
        apart: Unique number of a layer whose KV later layers also read; 0 for other layers. In a
            quantized pool, layers with equal shape and number share temporary buffers. A unique
            number therefore keeps the layer's buffers unchanged until the pass ends.
    """

    num_kv_heads: int
    head_dim: int
    apart: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class KVSpec:
    """KV storage of all layers. Layers may differ in shape.

    Attributes:
        layers: Layers with KV.
        block_size: Tokens per block.
        dtype: "float32", "float16" or "bfloat16".
        bits: Bits of keys and of values. (16, 16) stores `dtype` unchanged. (8, 8), (8, 4), (4, 8)
            and (4, 4) quantize full blocks. Open (partly written) blocks then have `dtype`
            "float16".
        states: Layers with recurrent state instead of KV. They are not in `layers`.
        extra_bytes_per_block: Bytes that a block takes in another pool with the same block ids,
            such as that of a draft model. Only memory plans set it.
        extra_bytes_per_open_block: The same for the buffer of an open block.
    """

    layers: tuple[LayerKVSpec, ...]
    block_size: int
    dtype: str
    bits: tuple[int, int] = (16, 16)
    states: tuple[LayerStateSpec, ...] = ()
    extra_bytes_per_block: int = 0
    extra_bytes_per_open_block: int = 0

    @property
    def bytes_per_state(self) -> int:
        """Bytes of a sequence's recurrent state in all layers; 0 without recurrent layers."""
        return sum(state.nbytes for state in self.states)

    @property
    def bytes_per_draft(self) -> int:
        """Bytes of a draft token's inputs to all recurrent layers; 0 without recurrent layers."""
        return sum(state.draft_bytes for state in self.states)

    @property
    def is_quantized(self) -> bool:
        return self.bits != (16, 16)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in all layers, including quantization scales."""
        if not self.is_quantized:
            return self._bytes_as_stored + self.extra_bytes_per_block
        coded = sum(
            layer.num_kv_heads * code_layout(self.block_size, layer.head_dim, self.bits).nbytes
            for layer in self.layers
        )
        return coded + self.extra_bytes_per_block

    @property
    def bytes_per_open_block(self) -> int:
        """Bytes of an open block's buffer outside the pool; 0 if the pool is not quantized."""
        own = self._bytes_as_stored if self.is_quantized else 0
        return own + self.extra_bytes_per_open_block

    def with_pool(self, other: KVSpec) -> KVSpec:
        """Return this spec for memory plans, with the bytes of another pool of equal block ids."""
        return dataclasses.replace(
            self,
            extra_bytes_per_block=other.bytes_per_block,
            extra_bytes_per_open_block=other.bytes_per_open_block,
        )

    @property
    def _bytes_as_stored(self) -> int:
        per_token = sum(2 * layer.num_kv_heads * layer.head_dim for layer in self.layers)
        return per_token * self.block_size * _BYTES[self.dtype]


class PassStates(NamedTuple):
    """Slots of recurrent state that a pass reads and writes.

    Each slot is written at most once. A slot that another sequence reads is not written.

    Attributes:
        state_in (int32 [num_seqs]): Slot of the state before each sequence's first row; -1 for
            zeros, at the start of a text.
        state_out (int32 [num_seqs]): Slot for the state after the last certain row; may equal
            state_in.
        saves (int32 [n, 3]): Entries (sequence, rows, slot), which also save the state after the
            first `rows` rows of the sequence to the slot. They ascend by sequence, then by rows.
            `rows` is at least 1, and at most the number of certain rows.
        certain (int32 [num_seqs]): Number of certain rows per sequence, which come first; None if
            all rows are certain. The other rows are draft tokens. They see all earlier rows, but
            their state is not stored in any slot, see `Runner.accept_drafts`.
    """

    state_in: npt.NDArray[np.int32]
    state_out: npt.NDArray[np.int32]
    saves: npt.NDArray[np.int32]
    certain: npt.NDArray[np.int32] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class BatchLayout:
    """Positions and storage of the tokens in a forward pass, concatenated over its sequences.

    Query row i of sequence s has position seq_lens[s] - (cu_seqlens_q[s+1] - cu_seqlens_q[s]) + i.
    Its KV slot belongs to that position in the sequence's last segment.

    Example with block_size 16: sequence 0 has 20 tokens, of which the pass computes the last 4
    (positions 16..19). Sequence 1 decodes its 33rd token. Then num_tokens = 5, cu_seqlens_q = [0,
    4, 5], seq_lens = [20, 33], block_tables = [[7, 2, -1], [7, 9, 4]] and slot_mapping = [2*16+0 ..
    2*16+3, 4*16+0].

    Attributes:
        cu_seqlens_q (int32 [num_seqs + 1]): First query row of each sequence.
        seq_lens (int32 [num_seqs]): KV length of each sequence, including the tokens of this pass.
        block_tables (int32 [num_seqs, max_blocks]): Block ids in order. Entries beyond the end are
            -1 and never read.
        slot_mapping (int64 [num_tokens]): block_id * block_size + offset of each new token.
        segments: Positions that the blocks of a table hold, see segments.py. With None, block i of
            each table holds the positions from i * block_size on.
        states: Slots of recurrent state; None for models without recurrent state.
        stores: False for a pass that only reads KV. Its rows attend to the KV up to their position,
            and `slot_mapping` is not used. In a quantized pool, the blocks of these positions must
            be open.
        sparse (int32 [num_seqs, 2]): First position and end of each sequence's sparse range, whose
            queries attend to selected blocks only. None means no ranges. Only the cpu backend
            supports them.
    """

    cu_seqlens_q: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    slot_mapping: npt.NDArray[np.int64]
    segments: Segments = None
    states: PassStates | None = None
    stores: bool = True
    sparse: npt.NDArray[np.int32] | None = None


class AttentionParams(NamedTuple):
    """Constants of one layer's attention.

    Attributes:
        softmax_scale: Factor of the scores.
        window: Sliding window: a query at position p sees keys at positions (p - window, p]. 0
            means no window.
        softcap: Scaled scores become softcap * tanh(scores / softcap). 0 means no cap.
        sinks: Extra logits, float32 [num_q_heads], that are added to the softmax denominator and
            have no values. None means no sinks.
    """

    softmax_scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: npt.NDArray[np.float32] | None = None


class BackendInfo(NamedTuple):
    """Description of a backend.

    Attributes:
        name: Name of the backend.
        device: A torch device string.
        attention_path: Variant of the project's own attention kernels; "none" if it uses other
            kernels.
        threading_layer: Owner of the threads that compute attention; "none" if attention runs on
            the caller's thread.
        num_threads: Number of threads; None if the backend does not control it.
        pool_regions: Current memory regions of the pool in this process; empty if unknown.
    """

    name: str
    device: str
    attention_path: str = "none"
    threading_layer: str = "none"
    num_threads: int | None = None
    pool_regions: tuple[Region, ...] = ()


class Backend(Protocol):
    """KV storage and paged attention.

    Arrays are NumPy arrays if `array_kind` is "numpy", and torch tensors if it is "torch". Queries,
    keys and values are [num_tokens, heads, head_dim]. NumPy backends take and return float32, and
    convert to the storage dtype when they write. Torch backends use the model's dtype. `lse` is
    float32 [num_tokens, num_q_heads], the natural logarithm of the sum of exp(scores), including
    sinks.
    """

    name: str
    array_kind: str  # "numpy" | "torch"
    device: str
    spec: KVSpec
    num_blocks: int
    states: StatePool | None  # None for models without recurrent state

    @property
    def pool_bytes(self) -> int:
        """Allocated bytes of the pool, including the buffers of open blocks.

        Recurrent state is not included. Its size is `states.nbytes`.
        """
        ...

    @property
    def kernel_access(self) -> KernelAccess | None:
        """Storage access for runners that call the compiled kernels themselves, or None."""
        ...

    def describe(self) -> BackendInfo:
        """Return the device, kernels and threads, as reported by `paged_stats()`."""
        ...

    def prepare(self, layout: BatchLayout) -> Any:
        """Check a layout's shapes, and convert it for `write_kv` and `attention` in one pass.

        In a quantized pool, a block is opened when a layout first writes to it, and closed when its
        last slot is written. A block must be written in order from its first slot.

        Raises:
            ConfigError: The layout is inconsistent, or continues a block that is no longer open.
            CapacityError: More blocks would be open than there are buffers.
        """
        ...

    def copy_blocks(self, ops: Sequence[CopyOp]) -> None:
        """Copy whole blocks of all layers in order. The copy of an open block is open too."""
        ...

    def read_blocks(self, block_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Copy whole blocks to host memory, uint8 [len(block_ids), spec.bytes_per_block].

        A row contains layer 0, layer 1, and so on; each layer has its keys, then its values. In a
        quantized pool, a row contains the stored codes of all KV heads with their scales. Backends
        with the same name and spec use the same bytes. The backend does not know which blocks are
        full, so the caller must.

        Raises:
            ConfigError: An id is outside the pool, or belongs to an open block of a quantized pool,
                whose bytes are not final.
        """
        ...

    def write_blocks(self, block_ids: Sequence[int], data: npt.NDArray[np.uint8]) -> None:
        """Overwrite blocks with bytes from `read_blocks`. In a quantized pool, they become full.

        The content of the bytes is not checked. After an error, no block has changed.

        Raises:
            ConfigError: The data has the wrong shape or dtype, or an id is outside the pool,
                repeated, or belongs to an open block.
        """
        ...

    def release_blocks(self, block_ids: Sequence[int]) -> None:
        """Free the buffers of open blocks. Blocks that are not open are ignored."""
        ...

    def write_kv(self, layer: int, keys: Any, values: Any, batch: Any) -> None:
        """Store the KV of the new tokens at their slots."""
        ...

    def attention(
        self, layer: int, queries: Any, batch: Any, params: AttentionParams
    ) -> tuple[Any, Any]:
        """Compute causal attention of the new tokens over their sequences' blocks.

        No memory beyond a sequence's seq_len or before its window is read, so NaN there is
        harmless.

        Returns:
            The output, shaped like the queries, and `lse`.
        """
        ...

    def poison_blocks(self, block_ids: Sequence[int]) -> None:
        """Fill blocks with NaN to expose reads of unwritten memory. For debugging."""
        ...

    def checksum_blocks(self, block_ids: Sequence[int]) -> list[int]:
        """Return a checksum of each block over all layers. For debugging."""
        ...

    def close(self) -> None:
        """Release the pool."""
        ...
