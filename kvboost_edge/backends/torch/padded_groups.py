"""A pass in the torch backend's form: padded groups of sequences with equal query lengths.

Positions are int32. Ids of blocks, rows and slots are int64, because devices only index with them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvboost_edge.backends.base import BatchLayout
from kvboost_edge.backends.open_blocks import PassPlan
from kvboost_edge.errors import CapacityError
from kvboost_edge.segments import entry_deltas, entry_positions, has_delta

__all__ = ["SameLength", "TorchBatch"]

Longs = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class SameLength:
    """Sequences with the same number of new tokens, padded to the longest KV among them.

    The slots are those of the gathered blocks. In a quantized pool, the slots of gathered buffers
    follow, which are float16 copies of the blocks that the pass writes.

    Attributes:
        q_len: Number of new tokens of each sequence.
        lead: Largest index of the slot that holds a sequence's first query.
        rows (int64 [num_seqs * q_len]): Rows of the flat batch.
        blocks (int64 [num_seqs, max_blocks]): Block ids to gather; 0 where masked.
        buffers (int64 [num_seqs, max_buffers]): Buffers to gather, see `PassPlan`; None if the pool
            is not quantized.
        q_positions (int32 [num_seqs, q_len]): Positions of the queries.
        q_starts (int32 [num_seqs, q_len]): First position of the block that holds each query; None
            without buffers.
        k_positions (int32 [num_seqs, num_slots]): Absolute positions of the gathered slots.
        k_valid (bool, like k_positions): Slots that at least one query of the sequence sees.
        k_own (bool [num_slots]): True for slots of buffers; None without buffers.
        k_turns (int64, like k_positions): Index of each slot's delta in the batch's deltas; None
            without deltas.
    """

    q_len: int
    lead: int
    rows: torch.Tensor
    blocks: torch.Tensor
    buffers: torch.Tensor | None
    q_positions: torch.Tensor
    q_starts: torch.Tensor | None
    k_positions: torch.Tensor
    k_valid: torch.Tensor
    k_own: torch.Tensor | None
    k_turns: torch.Tensor | None


class TorchBatch:
    """A prepared pass: the layout on the device, and groups by window, built on first use."""

    def __init__(
        self,
        layout: BatchLayout,
        block_size: int,
        device: torch.device,
        *,
        plan: PassPlan | None = None,
        most_slots: int | None = None,
    ) -> None:
        """Copy a checked layout to a device.

        Args:
            layout: The layout.
            block_size: Tokens per block.
            device: The device.
            plan: Writes of a quantized pool; None for other pools.
            most_slots: Maximum number of slots to gather at once; None for no limit.
        """
        self.layout = layout
        self.plan = plan
        self.device = device
        self.slots = self._tensor(np.ascontiguousarray(layout.slot_mapping))
        self.writes = None if plan is None else PlannedWrites(plan, block_size, device)
        self._block_size = block_size
        self._most_slots = most_slots
        self._groups: dict[int, list[SameLength]] = {}
        self._entries = entry_positions(layout.block_tables.shape, layout.segments, block_size)
        # Distinct position deltas of keys, int64 [num_deltas], and the index of each table entry's
        # delta. Without deltas, they are empty and None.
        self.deltas = np.zeros(0, np.int64)
        self._turns = None
        if layout.segments is not None and has_delta(layout.segments):
            deltas = entry_deltas(layout.block_tables.shape, layout.segments)
            self.deltas, turns = np.unique(deltas, return_inverse=True)
            self._turns = turns.reshape(deltas.shape)

    def groups(self, window: int) -> list[SameLength]:
        """Return the groups for a window, which limits the gathered blocks; 0 means no window.

        Raises:
            CapacityError: A single sequence has more slots than can be gathered at once.
        """
        if window not in self._groups:
            q_lens = np.diff(self.layout.cu_seqlens_q)
            self._groups[window] = [
                self._build(seqs, int(q_len), window)
                for q_len in np.unique(q_lens[q_lens > 0])
                for seqs in self._fitting(np.flatnonzero(q_lens == q_len))
            ]
        return self._groups[window]

    def _fitting(self, seqs: Longs) -> list[Longs]:
        """Split sequences so that each part gathers at most the largest number of slots."""
        width = self.layout.block_tables.shape[1] * self._block_size
        if self._most_slots is None:
            return [seqs]
        if width > self._most_slots:
            raise CapacityError(
                f"a sequence of up to {width} tokens does not fit in one buffer of {self.device}, "
                f"which holds the keys of {self._most_slots} tokens; lower max_new_tokens or "
                "shorten the prompt"
            )
        step = self._most_slots // width
        return [seqs[start : start + step] for start in range(0, len(seqs), step)]

    def _build(self, seqs: np.ndarray, q_len: int, window: int) -> SameLength:
        layout = self.layout
        size = self._block_size
        seq_lens = layout.seq_lens[seqs].astype(np.int64)
        q_first = seq_lens - q_len
        q_positions = q_first[:, None] + np.arange(q_len)
        k_first = np.maximum(q_first - window + 1, 0) if window else np.zeros_like(q_first)
        # Later queries of the pass read a full block as codes.
        first_own = (
            np.zeros_like(seq_lens) if self.plan is None else self.plan.first[seqs].astype(np.int64)
        )
        k_end = (
            seq_lens if self.plan is None else first_own + (seq_lens - 1 - first_own) // size * size
        )
        first, served, until = (rows[seqs] for rows in self._entries)
        seen = (until > k_first[:, None]) & (served < np.minimum(until, k_end[:, None]))
        num_blocks = seen.sum(axis=1)
        columns = np.argsort(~seen, axis=1, kind="stable")[:, : num_blocks.max()]
        present = np.arange(columns.shape[1]) < num_blocks[:, None]
        blocks, first, served, until = (
            np.take_along_axis(rows, columns, axis=1)
            for rows in (layout.block_tables[seqs], first, served, until)
        )
        blocks = np.where(present, blocks, 0)
        k_positions = first[:, :, None] + np.arange(size)
        k_valid = (
            present[:, :, None]
            & (k_positions >= served[:, :, None])
            & (k_positions < until[:, :, None])
        )
        k_positions = k_positions.reshape(len(seqs), -1)
        k_valid = k_valid.reshape(len(seqs), -1)
        k_valid &= (k_positions >= k_first[:, None]) & (k_positions < k_end[:, None])
        turns = None
        if self._turns is not None:
            turns = np.take_along_axis(self._turns[seqs], columns, axis=1).repeat(size, axis=1)
        own: dict[str, Any] = {"buffers": None, "q_starts": None, "k_own": None}
        if self.plan is not None:
            tables = self.plan.tables[seqs].astype(np.int64)
            coded = k_positions.shape[1]
            k_own = first_own[:, None] + np.arange(tables.shape[1] * size)
            own_valid = (k_own >= k_first[:, None]) & (k_own < seq_lens[:, None])
            k_positions = np.hstack([k_positions, k_own])
            k_valid = np.hstack([k_valid, own_valid])
            if turns is not None:
                turns = np.hstack([turns, np.full_like(k_own, np.searchsorted(self.deltas, 0))])
            starts = first_own[:, None] + (q_positions - first_own[:, None]) // size * size
            own = {"buffers": tables, "q_starts": starts.astype(np.int32)}
            own["k_own"] = np.arange(k_positions.shape[1]) >= coded
        queries = (k_valid & (k_positions == q_first[:, None])).argmax(axis=1)
        rows = layout.cu_seqlens_q[seqs].astype(np.int64)[:, None] + np.arange(q_len)
        return SameLength(
            q_len=q_len,
            lead=int(queries.max()),
            rows=self._tensor(rows.ravel()),
            blocks=self._tensor(blocks.astype(np.int64)),
            q_positions=self._tensor(q_positions.astype(np.int32)),
            k_positions=self._tensor(k_positions.astype(np.int32)),
            k_valid=self._tensor(k_valid),
            k_turns=None if turns is None else self._tensor(turns),
            **{name: None if array is None else self._tensor(array) for name, array in own.items()},
        )

    def _tensor(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


class PlannedWrites:
    """Writes of a pass in a quantized pool, as int64 tensors.

    Attributes:
        buffers: Buffer of each new token.
        offsets: Offset of each new token in its buffer.
        continued_from: Buffers to copy first.
        continued_to: Buffers that receive these copies.
        closed: Buffers to quantize last.
        targets: Blocks that receive the quantized buffers.
    """

    def __init__(self, plan: PassPlan, block_size: int, device: torch.device) -> None:
        def upload(values: Any) -> torch.Tensor:
            return torch.from_numpy(np.array(values, dtype=np.int64)).to(device)

        self.buffers, self.offsets = (upload(some) for some in np.divmod(plan.slots, block_size))
        self.num_continued = len(plan.continued)
        self.num_closed = len(plan.closed)
        self.continued_from, self.continued_to = (
            upload([pair[at] for pair in plan.continued]) for at in (0, 1)
        )
        self.closed, self.targets = (upload([pair[at] for pair in plan.closed]) for at in (0, 1))
