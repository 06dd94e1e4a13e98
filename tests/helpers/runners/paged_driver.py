"""Driver of a runner without an engine. The manager keeps the block tables, and tests run one pass
at a time.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvboost_edge.backends.base import Backend, BatchLayout, PassStates
from kvboost_edge.kvcache.block_table import BlockTable
from kvboost_edge.kvcache.hashing import root_hash
from kvboost_edge.kvcache.manager import KVCacheManager
from kvboost_edge.runners.base import ForwardBatch, Runner

ROOT = root_hash(model_fingerprint="test", kv_format="test")


@dataclasses.dataclass(slots=True)
class DrivenSequence:
    """A running sequence: all its tokens so far, and the table that holds the first num_computed of
    them.
    """

    token_ids: list[int]
    table: BlockTable

    @property
    def num_left(self) -> int:
        return len(self.token_ids) - self.table.num_computed_tokens


class PagedDriver:
    """Driver that opens sequences and computes them. Free memory is poisoned, so that reads of
    unwritten slots give NaN. `layout` is that of the last pass.
    """

    layout: BatchLayout

    def __init__(self, runner: Runner, backend: Backend) -> None:
        self.runner = runner
        self.backend = backend
        self.manager = KVCacheManager(backend.num_blocks, backend.spec.block_size)
        self.live: list[DrivenSequence] = []
        backend.release_blocks(range(backend.num_blocks))  # unfinished blocks of other drivers
        backend.poison_blocks(range(backend.num_blocks))
        runner.bind(backend)

    def open(self, token_ids: Sequence[int]) -> DrivenSequence:
        sequence = DrivenSequence(list(token_ids), self.manager.open_table(token_ids, ROOT))
        self.live.append(sequence)
        return sequence

    def fork(self, sequence: DrivenSequence) -> DrivenSequence:
        child = DrivenSequence(list(sequence.token_ids), self.manager.fork(sequence.table))
        self.live.append(child)
        return child

    def close(self, sequence: DrivenSequence) -> None:
        self.manager.free(sequence.table)
        self.live.remove(sequence)
        self.manager.check_invariants([other.table for other in self.live])

    def step(self, work: Sequence[tuple[DrivenSequence, int]]) -> list[npt.NDArray[np.float32]]:
        """Run one pass over the next `count` tokens of each sequence and return the logits of every
        new token, per sequence.
        """
        starts = np.cumsum([0, *(count for _, count in work)]).tolist()
        logits, _ = self.step_for(work, range(starts[-1]))
        return [logits[first:stop] for first, stop in itertools.pairwise(starts)]

    def step_for(
        self,
        work: Sequence[tuple[DrivenSequence, int]],
        logit_rows: Sequence[int],
        hidden_state_rows: Sequence[int] = (),
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Run one pass over the next `count` tokens of each sequence and return logits and states
        of these rows of the pass.
        """
        copies = []
        token_ids = []
        positions = []
        slots = []
        starts = [0]
        for sequence, count in work:
            table = sequence.table
            start = sequence.table.num_computed_tokens
            copies += self.manager.extend(table, start + count)
            token_ids += sequence.token_ids[start : start + count]
            positions += range(start, start + count)
            slots += self.manager.slots(table, start, start + count)
            starts.append(starts[-1] + count)
        self.backend.poison_blocks(self.manager.drain_new_blocks())
        self.backend.copy_blocks(copies)
        tables = np.full((len(work), max(len(s.table.block_ids) for s, _ in work)), -1, np.int32)
        for row, (sequence, _) in zip(tables, work, strict=True):
            row[: len(sequence.table.block_ids)] = sequence.table.block_ids
        layout = BatchLayout(
            cu_seqlens_q=np.array(starts, np.int32),
            seq_lens=np.array([s.table.num_computed_tokens + count for s, count in work], np.int32),
            block_tables=tables,
            slot_mapping=np.array(slots, np.int64),
            states=self.states(work),
        )
        states = np.full((len(hidden_state_rows), self.runner.info.hidden_size), np.nan, np.float32)
        rows, of_states = (
            np.array(list(each), dtype=np.int64) for each in (logit_rows, hidden_state_rows)
        )
        tokens = np.array(token_ids, np.int64), np.array(positions, np.int64)
        batch = ForwardBatch(*tokens, layout, rows, of_states, states)
        self.layout, logits = layout, self.runner.forward(batch).copy()
        for sequence, count in work:
            done = sequence.table.num_computed_tokens + count
            self.manager.commit(sequence.table, sequence.token_ids, done)
        self.manager.check_invariants([sequence.table for sequence in self.live])
        return logits, states

    def states(self, work: Sequence[tuple[DrivenSequence, int]]) -> PassStates | None:
        """Return the slots of a pass for a model with recurrent state."""
        return None

    def prefill(self, sequence: DrivenSequence, chunk: int = 1 << 30) -> npt.NDArray[np.float32]:
        """Compute all remaining tokens, at most `chunk` per pass, and return their logits."""
        parts = []
        while sequence.num_left:
            parts += self.step([(sequence, min(chunk, sequence.num_left))])
        return np.concatenate(parts)

    def decode(
        self,
        sequences: Sequence[DrivenSequence],
        last_logits: Sequence[npt.NDArray[np.float32]],
        steps: int,
    ) -> None:
        """Decode several sequences greedily in one batch, appending to their tokens."""
        rows = list(last_logits)
        for step in range(steps):
            for sequence, row in zip(sequences, rows, strict=True):
                sequence.token_ids.append(int(row.argmax()))
            if step < steps - 1:
                rows = [part[-1] for part in self.step([(sequence, 1) for sequence in sequences])]
