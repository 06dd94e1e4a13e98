"""What a KV backend is: storage of keys and values in blocks, and attention that reads them in
place.

A backend knows nothing of requests or models. It owns one pool of `num_blocks` blocks for all
layers. The engine moves whole blocks: `copy_blocks` before a pass, `read_blocks` and `write_blocks`
for tiers. A runner computes: `prepare` once per forward pass, then per layer `write_kv` and
`attention`.
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
from kvboost_edge.segments import Parts

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
"""Blocks of a quantized pool that may be partly written at a time: one for each of 16 sequences and
one to spare.
"""
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclasses.dataclass(frozen=True, slots=True)
class LayerKVSpec:
    """Shape of one layer's KV: heads, and the dim of a key and of a value.

    apart: 0, or a number that layers have whose keys and values later layers attend to as well.
    What such a layer of a quantized pool writes is not written over before the pass ends; others
    share the buffers of blocks that fill up.
    """

    num_kv_heads: int
    head_dim: int
    apart: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class KVSpec:
    """Storage of all layers. `dtype` is "float32", "float16" or "bfloat16"; layers may differ in
    shape.

    `states`: of the layers that keep a state instead of keys and values, which are not among
      `layers`.

    `bits` = (bits of keys, of values): (16, 16) stores `dtype` as it is; (8, 8), (8, 4), (4, 8) and
    (4, 4) quantize full blocks, and `dtype` is then that of the open (not yet full) blocks,
    "float16".
    """

    layers: tuple[LayerKVSpec, ...]
    block_size: int
    dtype: str
    bits: tuple[int, int] = (16, 16)
    states: tuple[LayerStateSpec, ...] = ()

    @property
    def bytes_per_state(self) -> int:
        """Bytes of one slot, the states of one sequence in all layers that keep some; 0 where none
        does.
        """
        return sum(state.nbytes for state in self.states)

    @property
    def bytes_per_draft(self) -> int:
        """Bytes of what a token that is only guessed brings to the states of all layers; 0 where
        none keeps one.
        """
        return sum(state.draft_bytes for state in self.states)

    @property
    def is_quantized(self) -> bool:
        return self.bits != (16, 16)

    @property
    def bytes_per_block(self) -> int:
        """Bytes one block takes over all layers, keys and values together, scales included."""
        if not self.is_quantized:
            return self._bytes_as_stored
        return sum(
            layer.num_kv_heads * code_layout(self.block_size, layer.head_dim, self.bits).nbytes
            for layer in self.layers
        )

    @property
    def bytes_per_open_block(self) -> int:
        """Bytes of the buffer that one open block of a quantized pool takes beside the pool; 0
        where none is needed.
        """
        return self._bytes_as_stored if self.is_quantized else 0

    @property
    def _bytes_as_stored(self) -> int:
        per_token = sum(2 * layer.num_kv_heads * layer.head_dim for layer in self.layers)
        return per_token * self.block_size * _BYTES[self.dtype]


class PassStates(NamedTuple):
    """Which slots of the states a pass reads and writes.

    state_in   int32 [num_seqs]  the state before each sequence's first row; -1: zeros, at the start
               of a text
    state_out  int32 [num_seqs]  where that behind its last certain row goes; may be the slot that
               it reads
    saves      int32 [n, 3]      (sequence, rows, slot): the state behind so many of the sequence's
               rows of this pass
                                 goes to the slot as well; ascending by sequence, then rows, from 1
                                 to the certain ones
    certain    int32 [num_seqs]  how many of its rows, the first ones, are certain. Those behind are
               drafts: they see
                                 all before them, no slot does them; see `Runner.accept_drafts`.
                                 None: all are certain

    No slot is written twice, and none that another sequence reads.
    """

    state_in: npt.NDArray[np.int32]
    state_out: npt.NDArray[np.int32]
    saves: npt.NDArray[np.int32]
    certain: npt.NDArray[np.int32] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class BatchLayout:
    """Where the tokens of one forward pass live. A flat batch: the tokens of all sequences one
    after another.

    Example, block_size 16: sequence 0 has 20 tokens of which the last 4 are computed now (positions
    16..19), sequence 1 decodes its 33rd token. Then num_tokens = 5, cu_seqlens_q = [0, 4, 5],
    seq_lens = [20, 33], block_tables = [[7, 2, -1], [7, 9, 4]], slot_mapping = [2*16+0 .. 2*16+3,
    4*16+0].

    cu_seqlens_q  int32 [num_seqs + 1]            first query row of each sequence
    seq_lens      int32 [num_seqs]                KV length of each sequence including the tokens of
                  this pass
    block_tables  int32 [num_seqs, max_blocks]    block ids in order; -1 beyond the end (never read)
    slot_mapping  int64 [num_tokens]              block_id * block_size + offset for each new token
    parts         which positions the blocks of a table hold, see segments.py; None:
                  all tables are plain, block i holds the positions from i * block_size on
    states        the sequences' slots, where the model keeps states; None where it does not

    The position of query row i of sequence s is seq_lens[s] - (cu_seqlens_q[s+1] - cu_seqlens_q[s])
    + i; its slot is that of its position in the sequence's last part.
    """

    cu_seqlens_q: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    slot_mapping: npt.NDArray[np.int64]
    parts: Parts = None
    states: PassStates | None = None


class AttentionParams(NamedTuple):
    """Per-layer constants. A query at position p sees keys at positions (p - window, p]; window 0
    means no window.

    softcap 0 means none, else scores become softcap * tanh(scores / softcap) after scaling.
    `sinks`, if given, is one extra logit per query head (float32 [num_q_heads]) that joins the
    softmax denominator and has no value.
    """

    softmax_scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: npt.NDArray[np.float32] | None = None


class BackendInfo(NamedTuple):
    """What a backend says of itself.

    attention_path   form of the project's own attention kernels that runs; "none" where others do
    threading_layer  whose threads compute attention; "none" where it has none but the caller's
    num_threads      how many; None where the backend has no say in it
    pool_regions     where the pool lies in this process's memory as of now; empty: not known
    """

    name: str
    device: str
    attention_path: str = "none"
    threading_layer: str = "none"
    num_threads: int | None = None
    pool_regions: tuple[Region, ...] = ()


class Backend(Protocol):
    """KV storage plus paged attention. Arrays are NumPy arrays where `array_kind` is "numpy", else
    torch tensors.

    Queries, keys and values are [num_tokens, heads, head_dim]; numpy backends take and return
    float32 and convert to the storage dtype on write, torch backends take and return the model's
    dtype. `lse` is float32 [num_tokens, num_q_heads], the natural log of the sum of exp(scores),
    sinks included.
    """

    name: str
    array_kind: str  # "numpy" | "torch"
    device: str
    spec: KVSpec
    num_blocks: int
    states: StatePool | None  # None where the spec has no states

    @property
    def pool_bytes(self) -> int:
        """Bytes of the preallocated pool, as allocated; with the buffers of open blocks where it is
        quantized. Without states, which have their own `nbytes`.
        """
        ...

    @property
    def kernel_access(self) -> KernelAccess | None:
        """For runners that call the compiled kernels on this pool themselves; None where there are
        others.
        """
        ...

    def describe(self) -> BackendInfo:
        """Device, kernels and threads, as `paged_stats()` names them."""
        ...

    def prepare(self, layout: BatchLayout) -> Any:
        """Check the layout's shapes and turn it into what `write_kv` and `attention` take; valid
        for one pass.

        A quantized pool: a layout opens the blocks it begins to write, and closes those whose last
        slot it writes. A block is begun at its first slot and written in order; ConfigError where
        the open copy of a block is gone, or where more blocks would be open than there are buffers.
        """
        ...

    def copy_blocks(self, ops: Sequence[CopyOp]) -> None:
        """Copy whole blocks (all layers, K and V) src -> dst, in order; a copy of an open block is
        open too.
        """
        ...

    def read_blocks(self, block_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
        """The bytes of whole blocks: uint8 [len(block_ids), spec.bytes_per_block], a copy in the
        host's memory.

        A row is layer 0, layer 1, ...; of a layer the keys, then the values, or the codes of all kv
        heads where the pool is quantized: with their scales, as stored. Every backend of the same
        name and spec reads and writes the same bytes. ConfigError for an id outside the pool, and
        for an open block of a quantized pool, whose bytes are not what will be stored. Of other
        pools the caller knows which blocks are full.
        """
        ...

    def write_blocks(self, block_ids: Sequence[int], data: npt.NDArray[np.uint8]) -> None:
        """Put what `read_blocks` returned into these blocks, each named once; those of a quantized
        pool are full then.

        ConfigError for data of another shape or type, an id outside the pool or named twice, and an
        open block; nothing is changed then. The bytes are not looked at.
        """
        ...

    def release_blocks(self, block_ids: Sequence[int]) -> None:
        """These blocks were freed: give back the buffers of those among them that are open. Others
        are passed over, and so is everything where the pool is not quantized.
        """
        ...

    def write_kv(self, layer: int, keys: Any, values: Any, batch: Any) -> None:
        """Store the new tokens' keys and values at their slots."""
        ...

    def attention(
        self, layer: int, queries: Any, batch: Any, params: AttentionParams
    ) -> tuple[Any, Any]:
        """Causal attention of the new tokens over their sequences' blocks: (out like queries, lse).
        Never reads past a sequence's seq_len nor before its window, so poisoned memory does not
        matter.
        """
        ...

    def poison_blocks(self, block_ids: Sequence[int]) -> None:
        """Debug: fill blocks with NaN, so that a read of memory that was never written shows."""
        ...

    def checksum_blocks(self, block_ids: Sequence[int]) -> list[int]:
        """Debug: a checksum of each block's content over all layers."""
        ...

    def close(self) -> None:
        """Release the pool."""
        ...
