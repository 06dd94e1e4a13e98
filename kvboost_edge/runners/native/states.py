"""Layers that keep a state: their operations in a program, and the slots of a pass as those find them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvboost_edge.backends.base import BatchLayout
from kvboost_edge.backends.state_pool import StatePool
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.states import sequences as ls
from kvboost_edge.models.config.mixers import Mixer
from kvboost_edge.runners.native.emitter import Emitter, Rows
from kvboost_edge.runners.native.plan import state_spec
from kvboost_edge.runners.native.sizes import MixerSizes

__all__ = ["StateOperations", "pass_states"]

_L2_EPS = 1e-6  # of the length of queries and keys
_CONV = {lt.F_WEIGHT: "conv", lt.F_BIAS: "conv_bias"}
_GATES = {lt.F_DECAY: "decay", lt.F_DT_BIAS: "dt_bias"}


class StateOperations:
    """The operations of layers with a state.

    mixed  the rows that their output projections read
    held   weights of norms that they point to, which must outlive them
    """

    def __init__(self, builder: Emitter, mixer: Mixer) -> None:
        self._builder, self._mixer, self._sizes = builder, mixer, MixerSizes.of(mixer)
        self._state_bytes = state_spec(mixer).nbytes
        # Nobody has queries there: not of attention in this layer, and not of OP_SCAN any more.
        self.mixed = (lt.B_QUERY, self._sizes.mixed)
        dim = max(mixer.key_dim, 1)
        self.held = [np.full(dim, factor, dtype=np.float32) for factor in (1 / dim, dim**-0.5)]

    def before(self, layer: str, state: int) -> Rows:
        """From the hidden state to the rows that the output projection reads; `state`: its number in the pool."""
        builder, mixer, sizes = self._builder, self._mixer, self._builder.sizes
        normed, wide = (lt.B_NORMED, sizes.hidden), (lt.B_WIDE, sizes.wide)
        mixed, offset = self.mixed, state * self._state_bytes
        is_conv = mixer.kind == "conv"
        builder.norm(f"{layer}attn_in", f"{layer}mixer_in")
        builder.linear(f"{layer}mixer_in", normed, wide)
        if not is_conv:
            builder.linear(f"{layer}mixer_gates", normed, wide, first=self._sizes.gates)
        conv = {lt.F_SRC: wide[0], lt.F_SRC_STEP: wide[1], lt.F_DST: mixed[0], lt.F_DST_STEP: mixed[1]}
        conv |= {lt.F_COUNT: mixer.channels, lt.F_TAPS: mixer.taps, lt.F_STATE: offset, lt.F_GATED: int(is_conv)}
        conv |= {field: builder.packed.address(layer + name) for field, name in _CONV.items()}
        if is_conv:
            builder.add(lt.OP_CONV, conv)
            builder.add(lt.OP_TAILS, conv)
            return mixed
        heads = {lt.F_KEY_HEADS: mixer.key_heads, lt.F_KEY_DIM: mixer.key_dim, lt.F_HEADS: mixer.value_heads}
        heads |= {lt.F_DIM: mixer.value_dim, lt.F_TILED: int(mixer.tiled_heads), lt.F_RULE: lt.RULES[mixer.kind]}
        norms = zip((lt.F_Q_NORM, lt.F_K_NORM), self.held, strict=True) if mixer.kind == "delta" else ()
        steps = {field: held.ctypes.data for field, held in norms}
        steps |= {field: builder.packed.address(layer + name) for field, name in _GATES.items()}
        steps[lt.F_BY_FIRST] = self._sizes.gates
        least, most = mixer.time_limit
        builder.add(lt.OP_STEPS, {**conv, **heads, **steps}, eps=_L2_EPS / mixer.key_dim, least=least, most=most)
        builder.add(lt.OP_TAILS, conv)
        place = {lt.F_STATE: offset + state_spec(mixer).tail_bytes, lt.F_SKIP: builder.packed.address(f"{layer}skip")}
        builder.add(lt.OP_SCAN, {**heads, **place})
        builder.add(lt.OP_GATE, {**conv, **heads, **self._norm(layer)}, eps=builder.spec.eps)
        return mixed

    def _norm(self, layer: str) -> dict[int, int]:
        """Fields of what the heads result in: where its gates are in a row, and how it is normed."""
        mixer = self._mixer
        fields = {lt.F_SRC_FIRST: mixer.channels, lt.F_GATE_FIRST: int(mixer.norm == "gated_before")}
        if mixer.norm == "none":
            return fields
        fields |= {lt.F_WEIGHT: self._builder.packed.address(f"{layer}mixer_norm")}
        if mixer.norm_groups == 0:
            return fields | {lt.F_GROUPS: mixer.value_heads}
        return fields | {lt.F_GROUPS: mixer.norm_groups, lt.F_WEIGHT_STEP: self._sizes.mixed // mixer.norm_groups}


def pass_states(layout: BatchLayout, pool: StatePool) -> npt.NDArray[np.int64]:
    """B_STATES of a checked layout, see program/states/sequences.py; it holds addresses of itself and of the pool."""
    assert layout.states is not None
    read, written, saves = layout.states
    num_seqs = len(read)
    lengths = np.diff(layout.cu_seqlens_q)
    tokens = np.repeat(np.arange(num_seqs), lengths)
    found = np.zeros(num_seqs * ls.SEQUENCE_NUMBERS + len(tokens) + 2 * len(saves), dtype=np.int64)
    rows = found[: num_seqs * ls.SEQUENCE_NUMBERS].reshape(num_seqs, ls.SEQUENCE_NUMBERS)
    found[rows.size : rows.size + len(tokens)] = tokens
    pairs = found[rows.size + len(tokens) :].reshape(-1, 2)
    first, size = pool.address(0), pool.slot_bytes
    rows[:, ls.S_FIRST], rows[:, ls.S_ROWS] = layout.cu_seqlens_q[:-1], lengths
    rows[:, ls.S_IN] = np.where(read < 0, 0, first + size * read.astype(np.int64))
    rows[:, ls.S_OUT] = first + size * written.astype(np.int64)
    pairs[:, 0], pairs[:, 1] = saves[:, 1], first + size * saves[:, 2].astype(np.int64)
    counts = np.bincount(saves[:, 0], minlength=num_seqs)
    rows[:, ls.S_NUM_SAVES] = counts
    rows[:, ls.S_SAVES] = pairs.ctypes.data + 16 * (np.cumsum(counts) - counts)
    return found
