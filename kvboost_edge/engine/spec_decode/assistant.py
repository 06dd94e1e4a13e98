"""A Gemma 4 assistant as a drafter: an MTP head that attends to the KV of the engine's model.

It has no KV of its own, so it stores nothing with the blocks and needs no other state than that of
a sequence's last token. A draft can follow any prefix, wherever its KV comes from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvboost_edge.engine.spec_decode.draft_model import DraftRows, Floats
from kvboost_edge.engine.spec_decode.hidden_states import HiddenStates
from kvboost_edge.engine.spec_decode.mtp_head import MtpHead
from kvboost_edge.kvcache.block_table import BlockTable, CopyOp
from kvboost_edge.runners.base import ForwardBatch

__all__ = ["Assistant"]


class Assistant(MtpHead):
    """Passes of an assistant, which only read the engine's pool."""

    has_kv = False

    def trial(self, *, is_short: bool) -> None:
        batch = self._trial_batch(is_short)
        self._backend.prepare(batch.layout)  # opens the block in a quantized pool
        reading = dataclasses.replace(batch.layout, stores=False)
        super()._forward(dataclasses.replace(batch, layout=reading), [])
        self._backend.release_blocks([0])

    def can_draft(
        self, table: BlockTable, num_tokens: int, hidden_states: HiddenStates | None
    ) -> bool:
        # In a quantized pool, attention reads the last block in 16 bits, which is kept only as long
        # as the block is not full.
        is_full = (num_tokens - 1) % self.block_size == 0
        if is_full and self._backend.spec.is_quantized:
            return False
        return super().can_draft(table, num_tokens, hidden_states)

    def missing(
        self, table: BlockTable, stop: int, hidden_states: HiddenStates | None = None
    ) -> list[tuple[int, int]]:
        return []

    def awaits(self, table: BlockTable) -> bool:
        return False

    def note_filled(self, table: BlockTable, start: int, stop: int) -> None:
        """Do nothing, because drafts store no KV."""

    def forget(self, table: BlockTable) -> None:
        """Do nothing, because drafts store no KV."""

    def copy_blocks(self, copies: Sequence[CopyOp]) -> None:
        """Do nothing, because the engine copies the blocks of its pool before drafts."""

    def _first_block(self, rows: DraftRows) -> int:
        return 0

    def _forward(self, batch: ForwardBatch, rows: Sequence[DraftRows]) -> Floats:
        # All tokens of a draft have the position after those that the engine's model has computed.
        computed = np.array(
            [one.hidden_states.stop for one in rows if one.hidden_states is not None], np.int64
        )
        layout = dataclasses.replace(batch.layout, seq_lens=computed.astype(np.int32), stores=False)
        return super()._forward(dataclasses.replace(batch, positions=computed, layout=layout), rows)

    def close(self) -> None:
        """Release the weights. The pool is the engine's."""
        self._runner.close()
