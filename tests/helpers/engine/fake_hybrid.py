"""A runner without a model whose next token depends on a recurrent state and on the tokens read
back through the block table.

The state of a sequence is a running hash over its tokens, and their number. It is stored in the
slots of a real `StatePool`; the logits hash it together with all tokens read from the block pool.
The state of another sequence, one that is a token too early or too late, one from a failed pass, or
a slot that was reassigned too early gives other tokens than `expected_hybrid` computes from the
prompt alone. Passes are checked as the compiled backend checks them. A draft row stores its token.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from helpers.backends.state_views import draft, tail
from helpers.engine.fake_runner import CONTEXT, FakeBackend, FakeRunner, fake_parts, token_logits
from kvboost_edge.backends.base import BatchLayout, LayerStateSpec, PassStates
from kvboost_edge.backends.batch_layout import check_layout
from kvboost_edge.backends.state_pool import StatePool
from kvboost_edge.engine.build import EngineParts
from kvboost_edge.kvcache.eviction.policy import TenantFloors
from kvboost_edge.kvcache.manager import KVCacheManager
from kvboost_edge.kvcache.recurrent.snapshots import StateSizes
from kvboost_edge.runners.base import ForwardBatch

SPEC = LayerStateSpec(taps=1, channels=16)  # 64 bytes: room for hash and count
_MODULUS = (1 << 61) - 1

State = tuple[int, int]
ZEROS: State = (0, 0)


def next_state(state: State, token_id: int) -> State:
    """Return the state after one more token."""
    return (state[0] * 1_000_003 + token_id + 1) % _MODULUS, state[1] + 1


def state_logits(
    state: State, token_ids: Sequence[int] | npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """Return the logits [VOCAB_SIZE] after these tokens and their state."""
    return token_logits([*state, *token_ids])


def expected_hybrid(
    prompt_ids: Sequence[int], max_new_tokens: int, stop_ids: frozenset[int] = frozenset()
) -> list[int]:
    """Compute the greedy output without an engine."""
    ids = list(prompt_ids)
    state = ZEROS
    for token_id in ids:
        state = next_state(state, token_id)
    for _ in range(max_new_tokens):
        ids.append(int(np.argmax(state_logits(state, ids))))
        state = next_state(state, ids[-1])
        if ids[-1] in stop_ids:
            break
    return ids[len(prompt_ids) :]


class HybridBackend(FakeBackend):
    """A `FakeBackend` with slots for recurrent states."""

    states: StatePool

    def __init__(
        self, num_blocks: int, block_size: int, num_slots: int, num_draft_rows: int
    ) -> None:
        super().__init__(num_blocks, block_size)
        self.spec = dataclasses.replace(self.spec, states=(SPEC,))
        self.states = StatePool(self.spec.states, num_slots, num_draft_rows)
        self.states.poison(range(num_slots))

    def read_state(self, slot: int) -> State:
        """Return the state in a slot."""
        first, second = tail(self.states, slot, 0).view(np.int64).reshape(-1)[:2].tolist()
        return first, second

    def write_state(self, slot: int, state: State) -> None:
        """Write a state into a slot."""
        tail(self.states, slot, 0).view(np.int64).reshape(-1)[:2] = state

    def drafted(self, row: int) -> npt.NDArray[np.int64]:
        """Return the token of a draft row as a view [1]."""
        return draft(self.states, row, 0).view(np.int64)[:1]


class HybridRunner(FakeRunner):
    """A `FakeRunner` with recurrent states.

    Attributes:
        saved: number of snapshots written in addition to the states of running sequences.
        taken_in: number of accepted draft tokens.
        on_accept: called before drafts are accepted.
    """

    backend: HybridBackend
    expected = staticmethod(expected_hybrid)

    def __init__(self, backend: HybridBackend, max_context: int = CONTEXT) -> None:
        super().__init__(backend, max_context)
        self.saved = self.taken_in = 0
        self.on_accept: Callable[[], None] | None = None
        self._states: dict[int, State] = {}  # row of the pass -> the state after it

    def forward(self, batch: ForwardBatch) -> npt.NDArray[np.float32]:
        """Read all states of the pass before writing the first, as a compiled pass does."""
        if self.on_forward is not None:
            self.on_forward(batch)
        layout = batch.layout
        backend = self.backend
        pool = backend.states
        check_layout(
            layout, backend.spec.block_size, backend.num_blocks, pool.num_slots, pool.num_draft_rows
        )
        states = [
            ZEROS if slot < 0 else backend.read_state(slot)
            for slot in layout.states.state_in.tolist()
        ]
        starts = layout.cu_seqlens_q.tolist()
        ends = _certain_ends(layout)
        drafts = itertools.count()
        for sequence, state in enumerate(states):
            for row in range(starts[sequence], starts[sequence + 1]):
                state = self._states[row] = next_state(state, int(batch.token_ids[row]))
                if row >= ends[sequence]:
                    backend.drafted(next(drafts))[:] = batch.token_ids[row]
            backend.write_state(
                int(layout.states.state_out[sequence]), self._states[ends[sequence] - 1]
            )
        for sequence, rows, slot in layout.states.saves.tolist():
            backend.write_state(slot, self._states[starts[sequence] + rows - 1])
        self.saved += len(layout.states.saves)
        backend.write_kv(0, batch.token_ids, batch.positions, layout)
        self.computed += len(batch.token_ids)
        self._put_states(batch)
        return np.stack([self._row(batch, int(row)) for row in batch.logit_rows])

    def accept_drafts(
        self, layout: BatchLayout, accepted: npt.NDArray[np.int32], states: PassStates
    ) -> None:
        if self.on_accept is not None:
            self.on_accept()
        backend = self.backend
        first = 0
        wanted = {(sequence, rows): slot for sequence, rows, slot in states.saves.tolist()}
        read = [backend.read_state(int(slot)) for slot in states.state_in]
        for sequence, (end, stop) in enumerate(
            zip(_certain_ends(layout), layout.cu_seqlens_q[1:], strict=True)
        ):
            state = read[sequence]
            count = int(accepted[sequence])
            assert count <= stop - end
            for row in range(count):
                state = next_state(state, int(backend.drafted(first + row)[0]))
                if (sequence, row + 1) in wanted:
                    backend.write_state(wanted.pop((sequence, row + 1)), state)
            if count:
                backend.write_state(int(states.state_out[sequence]), state)
            first += int(stop) - end
        assert not wanted
        self.saved += len(states.saves)
        self.taken_in += int(accepted.sum())

    def _row(self, batch: ForwardBatch, row: int) -> npt.NDArray[np.float32]:
        seen = super()._row(batch, row)
        if np.isnan(seen).any():
            return seen
        layout = batch.layout
        sequence = int(np.searchsorted(layout.cu_seqlens_q, row, side="right")) - 1
        tokens, _ = self._read(layout, sequence, int(batch.positions[row]) + 1)
        return state_logits(self._states[row], tokens)


def _certain_ends(layout: BatchLayout) -> list[int]:
    """Return the row after the last certain one of each sequence."""
    assert layout.states.certain is not None
    return (layout.cu_seqlens_q[:-1] + layout.states.certain).tolist()


def hybrid_parts(
    num_blocks: int = 64,
    num_slots: int = 40,
    *,
    interval: int = 1024,
    every_block: bool = False,
    num_draft_rows: int = 31,
) -> EngineParts:
    """Make all parts of an engine around a `HybridRunner`."""
    backend = HybridBackend(num_blocks, 16, num_slots, num_draft_rows)
    sizes = StateSizes(num_slots, interval, every_block, num_draft_rows)
    manager = KVCacheManager(num_blocks, 16, policy=TenantFloors, state_sizes=sizes)
    return dataclasses.replace(
        fake_parts(num_blocks), backend=backend, runner=HybridRunner(backend), manager=manager
    )
