"""The MTP head of a model as a drafter.

The head predicts the token after the next one from a token and the model's hidden state of the
token before it. It has one layer, whose KV lies in a pool with the block ids of the engine's, like
that of a draft model. The KV of a token belongs to the token's own position, so it depends on no
later token, and blocks can be shared.

Hidden states are not stored. KV of a token whose state was not kept stays missing, for example of a
prefix that was cached without it. The head then attends to the blocks from the first one after
which no KV is missing. In that block, and at the start of a sequence, a state of zeros takes the
place of those that are unknown.

A request usually ends before the KV of its last tokens was computed. The next request that reuses
their blocks computes it from states of zeros, together with its own first tokens. This is less
exact than a pass at the end of the request, but such a pass would delay all answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvboost_edge.engine.spec_decode.draft_model import DraftModel, DraftRows, Floats
from kvboost_edge.engine.spec_decode.hidden_states import HiddenStates
from kvboost_edge.kvcache.block_table import BlockTable
from kvboost_edge.runners.base import ForwardBatch

__all__ = ["MtpHead"]

_MOST_UNKNOWN = 48  # tokens before the known states whose KV is made of states of zeros


class MtpHead(DraftModel):
    """Passes of an MTP head, and the record of the tokens whose KV it has."""

    source = "mtp"

    def new_hidden_states(self) -> HiddenStates:
        return HiddenStates(self._runner.info.hidden_size)

    def can_draft(
        self, table: BlockTable, num_tokens: int, hidden_states: HiddenStates | None
    ) -> bool:
        return hidden_states is not None and hidden_states.has(table, num_tokens - 2)

    def missing(
        self, table: BlockTable, stop: int, hidden_states: HiddenStates | None = None
    ) -> list[tuple[int, int]]:
        """Return the runs of positions whose state is known, and of those just before them.

        A request often ends before the KV of its last tokens was computed. Their states are lost,
        and the head would see nothing before them. Their KV is therefore made of states of zeros,
        which is less exact, if that connects the sequence to blocks that are full.
        """
        assert hidden_states is not None
        start = self._connected(table, (hidden_states.first + 1) // self.block_size)
        return self._missing(table, start, min(stop, hidden_states.stop))

    def _connected(self, table: BlockTable, start: int) -> int:
        """Return the position of the first of the blocks before `start` that are to be filled.

        KV that a tier is loading is not missing.
        """
        size = self.block_size
        first = start
        num_missing = 0
        while first and not self._drafted.is_full(table.block_ids[first - 1]):
            first -= 1
            block_id = table.block_ids[first]
            num_missing += size - self._drafted.filled[block_id]
            if num_missing > _MOST_UNKNOWN or self._drafted.awaits([block_id]):
                return start * size
        return first * size

    def settle(self, table: BlockTable, start: int, stop: int) -> None:
        """Leave the KV of draft tokens missing, because it was made of the head's own states."""

    def _first_block(self, rows: DraftRows) -> int:
        assert rows.hidden_states is not None
        # The record lacks draft tokens, but no KV is missing between the first one and its last.
        first = min(rows.start, rows.hidden_states.stop) // self.block_size
        while first and self._drafted.is_full(rows.table.block_ids[first - 1]):
            first -= 1
        return first

    def _forward(self, batch: ForwardBatch, rows: Sequence[DraftRows]) -> Floats:
        size = self._runner.info.hidden_size
        joined = np.zeros((len(batch.token_ids), size), np.float32)
        starts = batch.layout.cu_seqlens_q.tolist()
        for one, start in zip(rows, starts, strict=False):
            assert one.hidden_states is not None
            stop = start + len(one.token_ids)
            joined[start:stop] = one.hidden_states.before(one.start, one.stop)
        hidden_states = np.empty((len(batch.logit_rows), size), np.float32)
        logits = self._runner.forward(
            dataclasses.replace(
                batch,
                joined=joined,
                hidden_state_rows=batch.logit_rows,
                hidden_states=hidden_states,
            )
        )
        wanted = (one for one in rows if one.wants_logits)
        for one, state in zip(wanted, hidden_states, strict=False):
            assert one.hidden_states is not None
            one.hidden_states.draft(state)
        return logits
