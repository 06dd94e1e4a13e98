"""The draft model: a smaller model whose KV lies in blocks with the ids of the engine's pool.

A block table of the engine is therefore also one of the draft model. Its blocks are shared, copied
and evicted together with their KV of the draft model. `KVCacheManager.drafted` counts the tokens of
each block that have such KV. Missing or wrong KV of the draft model costs accepted draft tokens,
but never changes an answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.backends.base import DEFAULT_NUM_OPEN, Backend, BatchLayout
from kvboost_edge.engine.spec_decode.hidden_states import HiddenStates
from kvboost_edge.kvcache.block_table import BlockTable, CopyOp
from kvboost_edge.kvcache.manager import KVCacheManager
from kvboost_edge.runners.base import ForwardBatch, PassAbandoned, Runner

__all__ = ["DraftModel", "DraftParts", "DraftRows"]

Floats = npt.NDArray[np.float32]


class DraftParts(NamedTuple):
    """A loaded draft model, MTP head or assistant.

    Attributes:
        runner: runner of the draft model or head, bound to `backend`.
        backend: pool of its KV. It has as many blocks of the same size as the engine's pool, and
            the same bits per value. For an assistant, it is the engine's pool.
        digest: 32-byte digest of everything that affects the bits of its KV: its files, weight
            format, numerics and KV format.
        num_open: number of blocks of a quantized pool that may be partly written at a time.
    """

    runner: Runner
    backend: Backend
    digest: bytes
    num_open: int = DEFAULT_NUM_OPEN

    @property
    def has_kv(self) -> bool:
        """True if the drafter has a KV pool of its own."""
        return not self.runner.info.borrows_kv

    @property
    def pool_bytes(self) -> int:
        """Size of its own KV pool in bytes."""
        return self.backend.pool_bytes if self.has_kv else 0


class DraftRows(NamedTuple):
    """Consecutive tokens of one sequence that a pass of the draft model computes.

    Attributes:
        table: block table of the sequence, which has slots for the tokens.
        start: position of the first token.
        token_ids: ids of the tokens.
        wants_logits: whether the logits of the last token are wanted.
        hidden_states: hidden states of the sequence for an MTP head, or None for a draft model.
    """

    table: BlockTable
    start: int
    token_ids: Sequence[int]
    wants_logits: bool = False
    hidden_states: HiddenStates | None = None

    @property
    def stop(self) -> int:
        """The position after the last token."""
        return self.start + len(self.token_ids)


class DraftModel:
    """Passes of a draft model, and the record of the tokens whose KV it has.

    Only the engine thread uses it. Tables must have a single segment.

    Attributes:
        source: name of the source of its drafts.
        has_kv: False for an assistant, which attends to the KV of the engine's model.
        block_size: tokens per block.
    """

    source = "draft_model"
    has_kv = True

    def __init__(self, parts: DraftParts, manager: KVCacheManager) -> None:
        self._runner = parts.runner
        self._backend = parts.backend
        self._drafted = manager.drafted
        self._is_quantized = parts.has_kv and parts.backend.spec.is_quantized
        self._num_open = parts.num_open
        # Blocks of a quantized pool that were partly written, the least recently used first. Some
        # have been emptied since.
        self._open: dict[int, None] = {}
        if parts.has_kv:
            self._drafted.copy_kv = parts.backend.copy_blocks
            self._drafted.copies_full = self._is_quantized
        self.block_size = manager.block_size

    @property
    def max_context(self) -> int:
        """Maximum length of a sequence, in tokens."""
        return self._runner.info.max_context

    @property
    def weight_bytes(self) -> int:
        """Size of the weights, in bytes."""
        return self._runner.info.weight_bytes

    @property
    def short_vocabulary(self) -> int:
        """Number of ids in the short vocabulary, or 0 without one. See `RunnerInfo`."""
        return self._runner.info.short_vocabulary

    @property
    def num_ids(self) -> int:
        """Number of ids that draft tokens are usually chosen from."""
        return self.short_vocabulary or self._runner.info.vocab_size

    def trial(self, *, is_short: bool) -> None:
        """Compute one token in block 0, which must be empty, to measure how long that takes.

        Args:
            is_short: see `forward`.
        """
        self._forward(self._trial_batch(is_short), [])
        self._backend.release_blocks([0])

    def _trial_batch(self, is_short: bool) -> ForwardBatch:
        """Return a batch of one token in block 0."""
        layout = BatchLayout(
            cu_seqlens_q=np.array([0, 1], np.int32),
            seq_lens=np.array([1], np.int32),
            block_tables=np.zeros((1, 1), np.int32),
            slot_mapping=np.zeros(1, np.int64),
        )
        zero = np.zeros(1, np.int64)
        return ForwardBatch(zero, zero, layout, logit_rows=zero, is_short=is_short)

    def new_hidden_states(self) -> HiddenStates | None:
        """Return the hidden states of a new sequence, or None if drafts do not need them."""
        return None

    def can_draft(
        self, table: BlockTable, num_tokens: int, hidden_states: HiddenStates | None
    ) -> bool:
        """Return whether a draft after the first `num_tokens` tokens is possible."""
        return True

    def missing(
        self, table: BlockTable, stop: int, hidden_states: HiddenStates | None = None
    ) -> list[tuple[int, int]]:
        """Return the runs [first, end) of positions before `stop` without KV, in order.

        Args:
            table: block table of a sequence.
            stop: end of the positions.
            hidden_states: hidden states of the sequence for an MTP head.
        """
        return self._missing(table, 0, stop)

    def _missing(self, table: BlockTable, start: int, stop: int) -> list[tuple[int, int]]:
        """Return `missing` for the blocks from that of position `start` on."""
        size = self.block_size
        runs: list[tuple[int, int]] = []
        for index in range(start // size, -(-stop // size)):
            filled = self._drafted.filled[table.block_ids[index]]
            first = index * size + filled
            end = min((index + 1) * size, stop)
            if first >= end:
                continue
            if not filled and runs and runs[-1][1] == first:
                runs[-1] = runs[-1][0], end
            else:
                runs.append((first, end))
        return runs

    def awaits(self, table: BlockTable) -> bool:
        """Return whether KV of the draft model is being loaded for a block of a table."""
        return self._drafted.awaits(table.block_ids)

    def note_filled(self, table: BlockTable, start: int, stop: int) -> None:
        """Record that the tokens [start, stop), which are certain, have KV.

        The tokens before them in the block of `start` must have KV already.
        """
        size = self.block_size
        for index in range(start // size, -(-stop // size)):
            self._drafted.fill(table.block_ids[index], min(stop - index * size, size))

    def settle(self, table: BlockTable, start: int, stop: int) -> None:
        """Record that the draft tokens [start, stop), whose KV was computed, were accepted."""
        self.note_filled(table, start, stop)

    def forget(self, table: BlockTable) -> None:
        """Drop the KV of all blocks of a table."""
        for block_id in table.block_ids:
            self._drafted.empty(block_id)

    def stop(self) -> None:
        """Drop the KV of all blocks and keep none from now on, because a pass failed."""
        self._drafted.stop()

    def copy_blocks(self, copies: Sequence[CopyOp]) -> None:
        """Copy blocks in order, as the engine's pool does."""
        wanted = [copy for copy in copies if self._drafted.filled[copy.dst]]
        if wanted:
            self._backend.copy_blocks(wanted)

    def forward(
        self,
        rows: Sequence[DraftRows],
        is_abandoned: Callable[[], bool],
        *,
        is_short: bool = False,
    ) -> Floats:
        """Compute tokens, and return the logits of the rows that want them.

        Tokens that are drafts are not recorded as filled. Later rows attend to the KV of earlier
        ones of their sequence.

        Args:
            rows: at least one item. Each slot is written at most once.
            is_abandoned: function that tells the runner to abandon the pass.
            is_short: whether to compute only logits of the short vocabulary.

        Returns:
            Logits [number of wanted rows, vocab_size or short_vocabulary], valid until the next
            call.

        Raises:
            PassAbandoned: the pass was abandoned. Its KV is incomplete.
        """
        size = self.block_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        wanted: list[int] = []
        firsts = [self._first_block(one) for one in rows]
        tables = [
            one.table.block_ids[first : -(-one.stop // size)]
            for one, first in zip(rows, firsts, strict=True)
        ]
        block_tables = np.full((len(rows), max(map(len, tables))), -1, np.int32)
        for index, (one, block_ids) in enumerate(zip(rows, tables, strict=True)):
            block_tables[index, : len(block_ids)] = block_ids
            tokens += one.token_ids
            positions += range(one.start, one.stop)
            slots += one.table.slots(one.start, one.stop, size)
            starts.append(len(tokens))
            if one.wants_logits:
                wanted.append(len(tokens) - 1)
        lengths = [one.stop - first * size for one, first in zip(rows, firsts, strict=True)]
        batch = ForwardBatch(
            # A prompt may hold ids of padding, of which the engine's model may have more.
            token_ids=np.minimum(np.array(tokens, np.int64), self._runner.info.vocab_size - 1),
            positions=np.array(positions, np.int64),
            layout=BatchLayout(
                cu_seqlens_q=np.array(starts, np.int32),
                seq_lens=np.array(lengths, np.int32),
                block_tables=block_tables,
                slot_mapping=np.array(slots, np.int64),
            ),
            logit_rows=np.array(wanted, np.int64),
            is_short=is_short,
            is_abandoned=is_abandoned,
        )
        return self._forward_open(batch, rows) if self._is_quantized else self._forward(batch, rows)

    def _forward_open(self, batch: ForwardBatch, rows: Sequence[DraftRows]) -> Floats:
        """Run a pass in a quantized pool, where a block is written in order from its first slot."""
        size = self.block_size
        if any(
            one.start % size and one.table.block_ids[one.start // size] not in self._open
            for one in rows
        ):
            # An earlier pass of the step dropped the block. The next step computes it again.
            raise PassAbandoned
        written = [
            block_id
            for one in rows
            for block_id in one.table.block_ids[one.start // size : -(-one.stop // size)]
        ]
        for block_id in written:
            self._open.pop(block_id, None)
        self._hold_open([one.table.block_ids[one.stop // size] for one in rows if one.stop % size])
        try:
            return self._forward(batch, rows)
        except BaseException:
            # The pass may have closed blocks without all of their KV. They cannot be continued.
            self._drop(written)
            raise

    def _hold_open(self, block_ids: Sequence[int]) -> None:
        """Reserve buffers for blocks that are going to be partly written.

        Blocks stay partly written where a sequence went on without drafts. The KV of those that
        were used least recently is dropped if there are too many.
        """
        num_dropped = max(0, len(self._open) + len(block_ids) - self._num_open)
        dropped = list(itertools.islice(self._open, num_dropped))
        for block_id in dropped:
            del self._open[block_id]
        self._drop([block_id for block_id in dropped if not self._drafted.is_full(block_id)])
        self._open.update(dict.fromkeys(block_ids))

    def _drop(self, block_ids: Sequence[int]) -> None:
        """Drop the KV of blocks, whose buffers become free."""
        for block_id in block_ids:
            self._drafted.drop(block_id)
        self._backend.release_blocks(block_ids)

    def _first_block(self, rows: DraftRows) -> int:
        """Return the index of the first block of a table that rows attend to."""
        return 0

    def _forward(self, batch: ForwardBatch, rows: Sequence[DraftRows]) -> Floats:
        """Run a pass on the runner."""
        return self._runner.forward(batch)

    def close(self) -> None:
        """Release the weights and the pool."""
        self._runner.close()
        self._backend.close()
