"""Operations of recurrent layers, and the state slots of a pass."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.backends.base import BatchLayout, PassStates
from kvboost_edge.backends.state_pool import StatePool
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.states import sequences as ls
from kvboost_edge.kernels.program.table import BufferRows
from kvboost_edge.models.families.mixers import Mixer
from kvboost_edge.runners.native.buffer_sizes import MixerSizes
from kvboost_edge.runners.native.emitter import Emitter
from kvboost_edge.runners.native.select_native import state_spec

__all__ = ["AcceptedRows", "StateOperations", "accepted_rows", "pass_states"]

Ints = npt.NDArray[np.int32]

_L2_EPS = 1e-6  # epsilon added to the squared length of queries and keys


class StateOperations:
    """Builder for the operations of recurrent layers.

    Attributes:
        mixed: rows that the output projections read.
        held: norm weights whose addresses the operations contain. They must outlive the program.
    """

    def __init__(self, builder: Emitter, mixer: Mixer) -> None:
        self._builder = builder
        self._mixer = mixer
        self._sizes = MixerSizes.of(mixer)
        self._spec = state_spec(mixer)
        self._num_states = sum(layer.state >= 0 for layer in builder.spec.layers)
        # B_QUERY is free at that point, because the layer does not attend and `ScanOp` has already
        # read its queries.
        number = lt.B_MIXED if builder.sizes.mixed else lt.B_QUERY
        self.mixed = BufferRows(number, self._sizes.mixed)
        self._taps = _tap_factors(mixer, builder.spec.factors.mixer_conv)
        dim = max(mixer.key_dim, 1)
        self.held = [np.full(dim, factor, dtype=np.float32) for factor in (1 / dim, dim**-0.5)]
        self._heads = lt.StateHeads(
            mixer.key_heads,
            mixer.key_dim,
            mixer.value_heads,
            mixer.value_dim,
            int(mixer.tiled_heads),
            lt.RULES.get(mixer.kind, 0),
        )

    def emit_to_output_projection(self, layer: str, state: int) -> None:
        """Emit the operations from the hidden state to the input of the output projection.

        `state` is the layer's index in the state pool.
        """
        builder = self._builder
        projected = builder.projected
        is_conv = self._mixer.kind == "conv"
        draft_bytes = self._spec.draft_bytes
        builder.norm(f"{layer}attn_in", f"{layer}mixer_in")
        factors = builder.spec.factors
        gates = projected._replace(first=self._sizes.gates)
        builder.linear(f"{layer}mixer_in", builder.normed, projected, factor=factors.mixer)
        if not is_conv:
            builder.linear(f"{layer}mixer_gates", builder.normed, gates, factor=factors.mixer_gates)
        conv = self._conv(layer, state, projected)._replace(
            gated=int(is_conv),
            draft=state * draft_bytes,
            draft_step=self._num_states * draft_bytes,
        )
        if is_conv:
            builder.ops += [lt.ConvOp(conv, self.mixed), lt.KeepConvOp(conv)]
            return
        self._advance(layer, state, conv, gates)
        builder.ops.append(self._gate(layer))

    def accept(self, layer: str, state: int) -> None:
        """Emit operations that advance a state by the stored inputs of draft tokens."""
        first, step = (each * self._spec.draft_bytes // 4 for each in (state, self._num_states))
        rows = BufferRows(lt.B_DRAFTS, step, first)
        conv = self._conv(layer, state, rows)
        if self._mixer.kind == "conv":
            self._builder.ops.append(lt.KeepConvOp(conv))
        else:
            gates = rows._replace(first=first + self._mixer.channels)
            self._advance(layer, state, conv, gates)

    def _conv(self, layer: str, state: int, rows: BufferRows) -> lt.ConvInputs:
        mixer = self._mixer
        return lt.ConvInputs(
            rows,
            mixer.channels,
            mixer.taps,
            state * self._spec.nbytes,
            self._builder.scaled(f"{layer}conv", self._taps),
            self._builder.packed.address(f"{layer}conv_bias"),
        )

    def _advance(self, layer: str, state: int, conv: lt.ConvInputs, gates: BufferRows) -> None:
        """Emit the update of the state matrices."""
        mixer = self._mixer
        packed = self._builder.packed
        inputs = lt.ScanInputsOp(
            conv,
            self._heads,
            gates,
            packed.address(f"{layer}decay"),
            packed.address(f"{layer}dt_bias"),
            eps=_L2_EPS / mixer.key_dim,
            least=mixer.time_limit[0],
            most=mixer.time_limit[1],
        )
        if mixer.kind == "delta":
            q_norm, k_norm = (norm.ctypes.data for norm in self.held)
            inputs = inputs._replace(q_norm=q_norm, k_norm=k_norm)
        offset = state * self._spec.nbytes + self._spec.tail_bytes
        scan = lt.ScanOp(self._heads, offset, packed.address(f"{layer}skip"))
        self._builder.ops += [inputs, lt.KeepConvOp(conv), scan]

    def _gate(self, layer: str) -> lt.GateOp:
        """Return the operation that applies the norm and the gate to the heads' outputs."""
        mixer = self._mixer
        gates = self._builder.projected._replace(first=mixer.channels)
        op = lt.GateOp(
            gates,
            self.mixed,
            self._heads,
            gate_first=int(mixer.norm == "gated_before"),
            eps=self._builder.spec.eps,
        )
        if mixer.norm == "none":
            return op
        op = op._replace(weight=self._builder.packed.address(f"{layer}mixer_norm"))
        if mixer.norm_groups == 0:
            return op._replace(groups=mixer.value_heads)
        step = self._sizes.mixed // mixer.norm_groups
        return op._replace(groups=mixer.norm_groups, weight_step=step)


def _tap_factors(mixer: Mixer, factors: tuple[float, float, float]) -> npt.NDArray[np.float32]:
    """Return a factor for each convolution weight, with channels [values | keys | queries]."""
    keys = mixer.key_heads * mixer.key_dim
    channels = np.repeat(
        np.array(factors, dtype=np.float32), (mixer.channels - 2 * keys, keys, keys)
    )
    return np.tile(channels, mixer.taps + 1)


def pass_states(layout: BatchLayout, pool: StatePool) -> npt.NDArray[np.int64]:
    """Return B_STATES for a valid layout, as described in program/states/sequences.py.

    The array contains addresses of itself and of the pool.
    """
    assert layout.states is not None
    states = layout.states
    lengths = [end - first for first, end in pairwise(layout.cu_seqlens_q.tolist())]
    certain = lengths if states.certain is None else states.certain.tolist()
    drafts = []
    place = pool.drafts_address
    for length, of in zip(lengths, certain, strict=True):
        drafts.append(place if length > of else 0)
        place += (length - of) * pool.draft_row_bytes
    return _numbers(lengths, states, pool, certain, drafts)


class AcceptedRows(NamedTuple):
    """A pass over rows of draft tokens.

    Attributes:
        numbers: int64, B_STATES of the pass.
        drafts: address of the first row.
        num_rows: number of rows.
    """

    numbers: npt.NDArray[np.int64]
    drafts: int
    num_rows: int


def accepted_rows(
    layout: BatchLayout, pool: StatePool, accepted: Ints, states: PassStates
) -> AcceptedRows:
    """Return a pass over the accepted draft tokens, which come first in each sequence's rows.

    At least one draft token must be accepted. Rejected rows in between belong to no sequence.
    """
    assert layout.states is not None
    assert layout.states.certain is not None
    drafted = np.diff(layout.cu_seqlens_q) - layout.states.certain
    which = np.flatnonzero(accepted)
    own = accepted[which]
    firsts = (np.cumsum(drafted) - drafted)[which]
    saves = states.saves.copy()
    saves[:, 0] = np.searchsorted(which, saves[:, 0])
    # Each length extends to the first row of the next sequence, so that every row belongs to a
    # sequence and reads valid memory.
    lengths = np.diff(firsts, append=firsts[-1] + own[-1])
    taken = PassStates(states.state_in[which], states.state_out[which], saves)
    found = _numbers(lengths.tolist(), taken, pool, own.tolist(), [0] * len(which))
    found[: len(which) * ls.SEQUENCE_NUMBERS].reshape(-1, ls.SEQUENCE_NUMBERS)[:, ls.S_ROWS] = own
    return AcceptedRows(
        found, pool.drafts_address + int(firsts[0]) * pool.draft_row_bytes, int(lengths.sum())
    )


def _numbers(
    lengths: list[int], states: PassStates, pool: StatePool, certain: list[int], drafts: list[int]
) -> npt.NDArray[np.int64]:
    """Build the array B_STATES.

    Args:
        lengths: number of rows of each sequence.
        states: slots to read, to write and to save.
        pool: the state pool.
        certain: number of rows of each sequence that are not drafts.
        drafts: address of each sequence's draft rows, or 0 without drafts.
    """
    read = states.state_in.tolist()
    written = states.state_out.tolist()
    saves = states.saves.tolist()
    num_tokens = sum(lengths)
    first = pool.address(0)
    size = pool.slot_bytes
    found = np.empty(
        len(lengths) * ls.SEQUENCE_NUMBERS + num_tokens + 2 * len(saves), dtype=np.int64
    )
    rows = []
    tokens = []
    pairs = []
    saved = found.ctypes.data + 8 * (found.size - 2 * len(saves))
    start = 0
    counts = Counter(sequence for sequence, _, _ in saves)
    for index, length in enumerate(lengths):
        # In the order of the S_* constants.
        rows += [
            start,
            length,
            first + size * read[index] if read[index] >= 0 else 0,
            first + size * written[index],
        ]
        rows += [saved, counts[index], certain[index], drafts[index]]
        tokens += [index] * length
        start = start + length
        saved = saved + 16 * counts[index]
    for _, position, slot in saves:
        pairs += [position, first + size * slot]
    found[:] = [*rows, *tokens, *pairs]
    return found
