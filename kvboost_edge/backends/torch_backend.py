"""KV storage and paged attention in plain torch: one implementation for the devices cpu, mps and cuda.

Sequences with equally many new tokens are computed together: their blocks are gathered through the block tables into
one padded tensor, and a masked softmax follows. Gather indices and masks are built once per pass and window and shared
by all layers. There is no Python loop over tokens.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvboost_edge.backends.base import DEFAULT_NUM_OPEN, AttentionParams, BackendInfo, BatchLayout, KVSpec
from kvboost_edge.backends.block_bytes import check_block_ids, check_content, gather, scatter
from kvboost_edge.backends.layout import check_layout, refuse_deltas
from kvboost_edge.errors import BackendUnavailable, CapacityError, ConfigError
from kvboost_edge.kernels.attention.parts import entry_deltas, entry_positions, has_delta
from kvboost_edge.kvcache.block_table import CopyOp

__all__ = ["TorchBackend", "TorchBatch", "make", "turn_keys", "unsupported_reason"]

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# float32 scores held at once; more query rows are computed in turns. On the CPU they should stay in the cache.
_MAX_SCORES = {"cpu": 1 << 20}
_MAX_SCORES_ELSEWHERE = 1 << 26


def unsupported_reason(device: str, spec: KVSpec | None = None) -> str | None:
    """Why torch cannot use a device here, or keep KV of this kind; None when it can."""
    kind, _, index = device.partition(":")
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            return "torch sees no CUDA device"
        if index and (not index.isdigit() or int(index) >= count):
            return f"torch sees {count} CUDA device(s)"
    if kind == "mps" and not torch.backends.mps.is_available():
        return "torch sees no Apple GPU (MPS)"
    if spec is not None and spec.is_quantized:
        return (
            f"torch keeps KV at 16 or 32 bits, not at {spec.bits}: kv_cache_bits needs backend='cpu' (or 'reference') "
            "and the native runner"
        )
    return None


def make(
    spec: KVSpec, num_blocks: int, *, device: str, num_threads: int | None = None, num_open: int = DEFAULT_NUM_OPEN
) -> TorchBackend:
    """See `select.BackendModule`; torch has its own number of threads, and no block of its pools is open."""
    return TorchBackend(spec, num_blocks, device=device)


@dataclasses.dataclass(frozen=True, slots=True)
class _SameLength:
    """Sequences with the same number of new tokens, padded to the longest KV among them.

    rows        int64 [num_seqs * q_len]              rows of the flat batch
    blocks      int64 [num_seqs, max_blocks]          block ids to gather; 0 where masked
    q_positions int64 [num_seqs, q_len]
    k_positions int64 [num_seqs, max_blocks * block]  absolute positions of the gathered slots
    k_valid     bool, like k_positions                slots that some query of the sequence sees
    k_turns     int64, like k_positions               which of the batch's deltas; None where it has none
    lead        the gathered column of the first query, in the sequence where it is largest
    """

    q_len: int
    lead: int
    rows: torch.Tensor
    blocks: torch.Tensor
    q_positions: torch.Tensor
    k_positions: torch.Tensor
    k_valid: torch.Tensor
    k_turns: torch.Tensor | None


class TorchBatch:
    """A prepared pass: device tensors of the layout, and the groups per window, built on first use."""

    def __init__(self, layout: BatchLayout, block_size: int, device: torch.device) -> None:
        self.layout = layout
        self.device = device
        self.slots = torch.from_numpy(np.ascontiguousarray(layout.slot_mapping)).to(device)
        self._block_size = block_size
        self._groups: dict[int, list[_SameLength]] = {}
        self._entries = entry_positions(layout.block_tables.shape, layout.parts, block_size)
        # By how much keys are turned: int64 [num_deltas], and which of those each entry has; none where there are none.
        self.deltas, self._turns = np.zeros(0, np.int64), None
        if layout.parts is not None and has_delta(layout.parts):
            deltas = entry_deltas(layout.block_tables.shape, layout.parts)
            self.deltas, turns = np.unique(deltas, return_inverse=True)
            self._turns = turns.reshape(deltas.shape)

    def groups(self, window: int) -> list[_SameLength]:
        """The groups for a window (0: none); the window bounds the blocks that are gathered."""
        if window not in self._groups:
            q_lens = np.diff(self.layout.cu_seqlens_q)
            self._groups[window] = [
                self._build(np.flatnonzero(q_lens == q_len), int(q_len), window)
                for q_len in np.unique(q_lens[q_lens > 0])
            ]
        return self._groups[window]

    def _build(self, seqs: np.ndarray, q_len: int, window: int) -> _SameLength:
        layout, size = self.layout, self._block_size
        seq_lens = layout.seq_lens[seqs].astype(np.int64)
        q_first = seq_lens - q_len
        k_first = np.maximum(q_first - window + 1, 0) if window else np.zeros_like(q_first)
        first, served, until = (rows[seqs] for rows in self._entries)
        seen = (until > k_first[:, None]) & (served < np.minimum(until, seq_lens[:, None]))
        num_blocks = seen.sum(axis=1)
        columns = np.argsort(~seen, axis=1, kind="stable")[:, : num_blocks.max()]
        present = np.arange(columns.shape[1]) < num_blocks[:, None]
        blocks, first, served, until = (
            np.take_along_axis(rows, columns, axis=1) for rows in (layout.block_tables[seqs], first, served, until)
        )
        blocks = np.where(present, blocks, 0)
        k_positions = first[:, :, None] + np.arange(size)
        k_valid = present[:, :, None] & (k_positions >= served[:, :, None]) & (k_positions < until[:, :, None])
        k_positions, k_valid = k_positions.reshape(len(seqs), -1), k_valid.reshape(len(seqs), -1)
        k_valid &= (k_positions >= k_first[:, None]) & (k_positions < seq_lens[:, None])
        k_turns = None
        if self._turns is not None:
            k_turns = self._tensor(np.take_along_axis(self._turns[seqs], columns, axis=1).repeat(size, axis=1))
        queries = (k_valid & (k_positions == q_first[:, None])).argmax(axis=1)
        rows = layout.cu_seqlens_q[seqs].astype(np.int64)[:, None] + np.arange(q_len)
        return _SameLength(
            q_len,
            int(queries.max()),
            self._tensor(rows.ravel()),
            self._tensor(blocks.astype(np.int64)),
            self._tensor(q_first[:, None] + np.arange(q_len)),
            self._tensor(k_positions),
            self._tensor(k_valid),
            k_turns,
        )

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


class TorchBackend:
    """Implements `Backend` with torch tensors in and out. Storage per layer, K and V each: [num_blocks, block_size,
    num_kv_heads, head_dim] in the spec's dtype. Scores and softmax are float32 whatever the storage.

    Raises BackendUnavailable for a device torch does not offer here and CapacityError when the pool cannot be
    allocated.
    """

    name = "torch"
    array_kind = "torch"

    def __init__(self, spec: KVSpec, num_blocks: int, *, device: str = "cpu") -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        self.device = device
        # torch's own setting, which a thread takes over when it first computes.
        self._num_threads = torch.get_num_threads()
        if num_blocks < 1:
            raise ConfigError(f"num_blocks={num_blocks} must be at least 1")
        if spec.dtype not in _DTYPES:
            raise ConfigError(f"KV dtype {spec.dtype!r} is not one of {tuple(_DTYPES)}")
        problem = unsupported_reason(device, spec)
        if problem is not None:
            raise BackendUnavailable(f"backend 'torch' on device={device!r}: {problem}")
        dtype = _DTYPES[spec.dtype]
        try:
            self._device = torch.device(device)
            # NumPy copies rows of bytes there some fifty times as fast as torch.
            self._in_host_memory = self._device.type == "cpu"
            self._pool = [
                torch.zeros(
                    (2, num_blocks, spec.block_size, layer.num_kv_heads, layer.head_dim),
                    dtype=dtype,
                    device=self._device,
                )
                for layer in spec.layers
            ]
        except torch.OutOfMemoryError as error:
            raise CapacityError(self._no_room()) from error
        except (RuntimeError, AssertionError) as error:
            if "memory" in str(error):
                raise CapacityError(self._no_room()) from error
            raise BackendUnavailable(f"device={device!r} is not usable by torch here: {error}") from error

    def _no_room(self) -> str:
        return (
            f"the block pool does not fit on {self.device}: num_blocks={self.num_blocks} x "
            f"{self.spec.bytes_per_block} bytes; lower num_blocks or max_cache_bytes"
        )

    @property
    def pool_bytes(self) -> int:
        """Bytes of the preallocated pool."""
        return sum(pool.numel() * pool.element_size() for pool in self._pool)

    @property
    def kernel_access(self) -> None:
        """torch's kernels run on this pool."""
        return None

    def describe(self) -> BackendInfo:
        """torch's kernels and threads."""
        return BackendInfo(self.name, self.device, threading_layer="torch", num_threads=self._num_threads)

    def prepare(self, layout: BatchLayout) -> TorchBatch:
        """Check the layout (ConfigError says what is wrong) and bind it to the device; valid for one pass."""
        check_layout(layout, self.spec.block_size, self.num_blocks)
        return TorchBatch(layout, self.spec.block_size, self._device)

    def copy_blocks(self, ops: Sequence[CopyOp]) -> None:
        """Copy whole blocks src -> dst over all layers, in order."""
        for src, dst in ops:
            if not (0 <= src < self.num_blocks and 0 <= dst < self.num_blocks):
                raise ConfigError(f"copy {src} -> {dst} leaves the pool's blocks 0..{self.num_blocks - 1}")
            for pool in self._pool:
                pool[:, dst].copy_(pool[:, src])

    def read_blocks(self, block_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
        """The bytes of whole blocks, uint8 [len(block_ids), bytes_per_block], in the host's memory; see `Backend`."""
        check_block_ids(block_ids, self.num_blocks)
        halves = self._byte_rows()
        if self._in_host_memory:
            return gather([half.numpy() for half in halves], block_ids)
        ids = torch.tensor(block_ids, dtype=torch.int64, device=self._device)
        data: npt.NDArray[np.uint8] = torch.cat([half[ids] for half in halves], dim=1).cpu().numpy()
        return data

    def write_blocks(self, block_ids: Sequence[int], data: npt.NDArray[np.uint8]) -> None:
        """Put bytes that were read into whole blocks; see `Backend`."""
        check_block_ids(block_ids, self.num_blocks)
        check_content(block_ids, data, self.spec.bytes_per_block)
        halves = self._byte_rows()
        if self._in_host_memory:
            scatter([half.numpy() for half in halves], block_ids, data)
            return
        ids = torch.tensor(block_ids, dtype=torch.int64, device=self._device)
        source = torch.from_numpy(data.copy()).to(self._device)  # a copy, for torch has no read-only tensors
        for half, part in zip(halves, source.split([half.shape[1] for half in halves], dim=1), strict=True):
            half[ids] = part

    def _byte_rows(self) -> list[torch.Tensor]:
        """The keys and the values of each layer as uint8 [num_blocks, n]."""
        if not self._pool:
            raise ConfigError("backend 'torch' is closed: it holds no blocks")
        return [half.flatten(1).view(torch.uint8) for pool in self._pool for half in pool]

    def release_blocks(self, block_ids: Sequence[int]) -> None:
        """Nothing to give back: only quantized pools have open blocks."""

    def write_kv(self, layer: int, keys: torch.Tensor, values: torch.Tensor, batch: TorchBatch) -> None:
        """Store keys and values, [num_tokens, num_kv_heads, head_dim], at the slots of the batch."""
        pool = self._pool[layer]
        for half, tokens in zip(pool, (keys, values), strict=True):
            half.flatten(0, 1).index_copy_(0, batch.slots, tokens.to(pool.dtype))

    def attention(
        self,
        layer: int,
        queries: torch.Tensor,
        batch: TorchBatch,
        params: AttentionParams,
        frequencies: npt.NDArray[np.float64] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Causal attention: (out like queries, lse float32 [num_tokens, num_q_heads]).

        frequencies   of the layer's plain rope, see `turn_keys`, by which keys of parts with a delta are turned.
                      ConfigError where there are such parts and no frequencies
        """
        if len(batch.deltas) and frequencies is None:
            refuse_deltas(batch.layout, "backend 'torch', not told how rope turns keys,")
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        lse = torch.empty(queries.shape[:2], dtype=torch.float32, device=queries.device)
        sinks = None if params.sinks is None else torch.as_tensor(params.sinks, device=self._device).float()
        for group in batch.groups(params.window):
            keys, values = self._gather(layer, group)
            if group.k_turns is not None and frequencies is not None:
                keys = turn_keys(keys, batch.deltas, group.k_turns[:, None], frequencies)
            for chosen in _query_slices(group, queries.shape[1]):
                seen = slice(group.lead + chosen.stop)  # later columns are in the future of every chosen query
                rows = group.rows.view(-1, group.q_len)[:, chosen]
                visible = _visible(group, chosen, params.window)[:, :, seen]
                part, part_lse = _attend(queries[rows], keys[:, :, seen], values[:, :, seen], visible, params, sinks)
                out[rows] = part.to(out.dtype)
                lse[rows] = part_lse
        return out, lse

    def _gather(self, layer: int, group: _SameLength) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a group in float32, [num_seqs, num_kv_heads, num_slots, head_dim]. Values of slots that
        no query sees become 0: their weight is 0, but 0 x NaN of unwritten memory is NaN."""
        num_seqs = len(group.blocks)
        keys, values = (
            half[group.blocks].flatten(1, 2).transpose(1, 2).float().reshape(num_seqs, half.shape[2], -1, half.shape[3])
            for half in self._pool[layer]
        )
        return keys, torch.where(group.k_valid[:, None, :, None], values, 0.0)

    def stored(self, layer: int, slots: npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer at slots, float32 [num_slots, num_kv_heads, head_dim]."""
        places = torch.from_numpy(slots).to(self._device)
        keys, values = (half.flatten(0, 1)[places].float() for half in self._pool[layer])
        return keys, values

    def poison_blocks(self, block_ids: Sequence[int]) -> None:
        """Fill blocks with NaN."""
        for pool in self._pool:
            pool[:, list(block_ids)] = float("nan")

    def checksum_blocks(self, block_ids: Sequence[int]) -> list[int]:
        """CRC-32 of each block's bytes over all layers."""
        return [self._checksum(block_id) for block_id in block_ids]

    def _checksum(self, block_id: int) -> int:
        crc = 0
        for pool in self._pool:
            crc = zlib.crc32(pool[:, block_id].cpu().view(torch.uint8).numpy().tobytes(), crc)
        return crc

    def close(self) -> None:
        """Release the pool."""
        self._pool = []


def turn_keys(
    keys: torch.Tensor,
    deltas: npt.NDArray[np.int64],
    which: torch.Tensor,
    frequencies: npt.NDArray[np.float64],
) -> torch.Tensor:
    """Keys [..., head_dim] as they would be so many positions further on: by plain rope, which turns channels i and
    i + n of a head by position x frequencies[i], for n frequencies, and leaves channels from 2n on as they are.

    deltas        int64 [num_deltas]
    which         int64, which of them each key is turned by: broadcast to the keys' leading dimensions
    """
    count = len(frequencies)
    if not count:
        return keys
    angles = deltas[:, None] * frequencies  # in float64: MPS has none
    cos, sin = (torch.from_numpy(f(angles).astype(np.float32)).to(keys.device)[which] for f in (np.cos, np.sin))
    first, second, rest = keys[..., :count], keys[..., count : 2 * count], keys[..., 2 * count :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def _query_slices(group: _SameLength, num_q_heads: int) -> Iterator[slice]:
    """Cut the query rows of a group so that a limited number of scores exists at once."""
    per_query = group.k_positions.numel() * num_q_heads
    step = max(1, _MAX_SCORES.get(group.rows.device.type, _MAX_SCORES_ELSEWHERE) // per_query)
    for start in range(0, group.q_len, step):
        yield slice(start, min(start + step, group.q_len))


def _visible(group: _SameLength, chosen: slice, window: int) -> torch.Tensor:
    """bool [num_seqs, q, num_slots]: which slots each chosen query sees."""
    queries, keys = group.q_positions[:, chosen, None], group.k_positions[:, None, :]
    visible = group.k_valid[:, None, :] & (keys <= queries)
    return visible & (keys > queries - window) if window else visible


def _attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    params: AttentionParams,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Masked attention of padded sequences in float32.

    queries [s, q, num_q_heads, d]; keys, values float32 [s, num_kv_heads, k, d]; visible bool [s, q, k]; sinks [heads].
    Returns out float32 like queries and lse float32 [s, q, num_q_heads]. Every query sees at least itself.
    """
    num_seqs, q_len, num_q_heads, _ = queries.shape
    num_kv_heads, per_kv = keys.shape[1], num_q_heads // keys.shape[1]
    grouped = (queries.float() * params.softmax_scale).view(num_seqs, q_len, num_kv_heads, per_kv, -1)
    scores = grouped.permute(0, 2, 3, 1, 4).flatten(2, 3) @ keys.transpose(2, 3)
    if params.softcap:
        scores.div_(params.softcap).tanh_().mul_(params.softcap)
    split = scores.view(num_seqs, num_kv_heads, per_kv, q_len, -1)
    split.masked_fill_(~visible[:, None, None], float("-inf"))
    top = split.amax(dim=-1, keepdim=True)
    if sinks is not None:
        sinks = sinks.view(num_kv_heads, per_kv, 1, 1)
        top = torch.maximum(top, sinks)
    weights = split.sub_(top).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total += torch.exp(sinks - top)
    out = (weights.flatten(2, 3) @ values).view(num_seqs, num_kv_heads, per_kv, q_len, -1) / total
    lse = (top + total.log()).squeeze(-1)
    shape = (num_seqs, q_len, num_q_heads)
    return out.permute(0, 3, 1, 2, 4).reshape(*shape, -1), lse.permute(0, 3, 1, 2).reshape(shape)
