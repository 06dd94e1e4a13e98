"""Layers that keep a state: their operations in a program, and the slots of a pass as those find them."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvboost_edge.backends.base import BatchLayout
from kvboost_edge.backends.state_pool import StatePool
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.kernels.linear.tiles import GROUP
from kvboost_edge.kernels.program import sequences as ls
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.conv import CONV_GATED, CONV_SILU, MOST_TAPS
from kvboost_edge.kernels.program.norms import ACT_SILU
from kvboost_edge.kernels.vectors import LANES
from kvboost_edge.models.config.mixers import Mixer
from kvboost_edge.runners.native.plan import state_spec

__all__ = ["MixerSizes", "StateBuilder", "StateOperations", "pass_states"]

_L2_EPS = 1e-6  # of the length of queries and keys
Rows = tuple[int, int]


class MixerSizes(NamedTuple):
    """Floats of a token in the buffers that a mixer's operations use.

    wide    what its matrices make, with `gates` the first float of those of its gates
    mixed   what its output projection reads
    query   queries or keys;  steps: what OP_STEPS has beside them
    """

    wide: int
    gates: int
    mixed: int
    query: int = 0
    steps: int = 0

    @classmethod
    def of(cls, mixer: Mixer) -> MixerSizes:
        """ModelFormatError for sizes that the kernels do not take."""
        width = mixer.value_heads * mixer.value_dim or mixer.channels
        uneven = mixer.channels % LANES or mixer.key_dim % LANES or mixer.value_dim % LANES or width % GROUP
        if uneven or not 1 <= mixer.taps <= MOST_TAPS:
            raise ModelFormatError(
                f"layers with a state of {mixer}: dims and channels must be multiples of {LANES}, values in all of "
                f"{GROUP}, and taps from 1 to {MOST_TAPS}"
            )
        if mixer.kind == "conv":
            return cls(3 * mixer.channels, 0, width)
        gates = mixer.channels + width
        wide = gates + -(-2 * mixer.value_heads // LANES) * LANES
        return cls(wide, gates, width, mixer.key_heads * mixer.key_dim, 2 * mixer.value_heads)


class StateBuilder(Protocol):
    """What the operations of a layer are added to: the builder of a program."""

    spec: Any
    sizes: Any
    packed: Any

    def add(self, op: int, fields: dict[int, int], **params: float) -> None: ...

    def norm(self, weight: str, reader: str) -> None: ...

    def panel(self, reader: str, buffer: int = ...) -> dict[int, int]: ...

    def quantize(self, source: int, step: int, count: int, reader: str) -> None: ...

    def linear(
        self,
        name: str,
        source: Rows,
        out: Rows,
        *,
        add: bool = False,
        factor: float = 1.0,
        panel: int = ...,
        first: int = 0,
    ) -> None: ...


class StateOperations:
    """The operations of layers with a state; `held`: weights of norms that they point to, which must outlive them."""

    def __init__(self, builder: StateBuilder, mixer: Mixer) -> None:
        self._builder, self._mixer, self._sizes = builder, mixer, MixerSizes.of(mixer)
        self._state_bytes = state_spec(mixer).nbytes
        dim = max(mixer.key_dim, 1)
        self.held = [np.full(dim, factor, dtype=np.float32) for factor in (1 / dim, dim**-0.5)]

    def before(self, layer: str, state: int) -> None:
        """From the hidden state to what the mixer leaves in B_WIDE; `state`: its number among the pool's."""
        builder, mixer, sizes = self._builder, self._mixer, self._builder.sizes
        normed, wide = (lt.B_NORMED, sizes.hidden), (lt.B_WIDE, sizes.wide)
        offset = state * self._state_bytes
        builder.norm(f"{layer}attn_in", f"{layer}mixer_in")
        builder.linear(f"{layer}mixer_in", normed, wide)
        rows = {lt.F_SRC: wide[0], lt.F_SRC_STEP: wide[1]}
        weights = {lt.F_WEIGHT: builder.packed.address(f"{layer}conv")}
        weights |= {lt.F_BIAS: builder.packed.address(f"{layer}conv_bias")}
        act = CONV_GATED if mixer.kind == "conv" else CONV_SILU
        shape = {lt.F_COUNT: mixer.channels, lt.F_TAPS: mixer.taps, lt.F_ACT: act, lt.F_STATE: offset}
        if mixer.kind == "conv":
            builder.add(lt.OP_CONV, {**rows, **weights, **shape})
            return
        builder.linear(f"{layer}mixer_gates", normed, wide, first=self._sizes.gates)
        builder.add(lt.OP_CONV, {**rows, **weights, **shape})
        heads = {lt.F_KEY_HEADS: mixer.key_heads, lt.F_KEY_DIM: mixer.key_dim, lt.F_HEADS: mixer.value_heads}
        norms = {field: held.ctypes.data for field, held in zip((lt.F_Q_NORM, lt.F_K_NORM), self.held, strict=True)}
        gates = {lt.F_BY_FIRST: self._sizes.gates, lt.F_WEIGHT: builder.packed.address(f"{layer}decay")}
        gates |= {lt.F_BIAS: builder.packed.address(f"{layer}dt_bias")}
        builder.add(lt.OP_STEPS, {**rows, **heads, **norms, **gates}, eps=_L2_EPS / mixer.key_dim)
        place = {lt.F_STATE: offset + state_spec(mixer).tail_bytes, lt.F_SRC_FIRST: self._first_value}
        which = {lt.F_DIM: mixer.value_dim, lt.F_TILED: int(mixer.tiled_heads)}
        builder.add(lt.OP_SCAN, {**rows, **heads, **place, **which})

    def after(self, layer: str) -> Rows:
        """The rows that the layer's output projection reads, quantized for it where its weights are."""
        builder, mixer, sizes = self._builder, self._mixer, self._builder.sizes
        wide, width = (lt.B_WIDE, sizes.wide), self._sizes.mixed
        if mixer.kind == "conv":
            builder.quantize(*wide, width, f"{layer}out")
            return wide
        fields = {lt.F_SRC: wide[0], lt.F_SRC_STEP: wide[1], lt.F_SRC_FIRST: mixer.channels}
        fields |= {lt.F_BY: wide[0], lt.F_BY_STEP: wide[1], lt.F_BY_FIRST: self._first_value}
        fields |= {lt.F_DST: lt.B_NORMED, lt.F_DST_STEP: width, lt.F_COUNT: width, lt.F_ACT: ACT_SILU}
        fields |= {lt.F_HEADS: mixer.value_heads, lt.F_DIM: mixer.value_dim}
        fields |= {lt.F_WEIGHT: builder.packed.address(f"{layer}mixer_norm")}
        builder.add(lt.OP_GATE, {**fields, **builder.panel(f"{layer}out")}, eps=builder.spec.eps)
        return lt.B_NORMED, width

    @property
    def _first_value(self) -> int:
        return 2 * self._mixer.key_heads * self._mixer.key_dim


def pass_states(layout: BatchLayout, pool: StatePool) -> npt.NDArray[np.int64]:
    """B_STATES of a checked layout, see kernels/program/sequences.py; it holds addresses of itself and of the pool."""
    assert layout.states is not None
    read, written, saves = layout.states
    num_seqs = len(read)
    found = np.zeros(num_seqs * ls.SEQUENCE_NUMBERS + 2 * len(saves), dtype=np.int64)
    rows = found[: num_seqs * ls.SEQUENCE_NUMBERS].reshape(num_seqs, ls.SEQUENCE_NUMBERS)
    pairs = found[rows.size :].reshape(-1, 2)
    first, size = pool.address(0), pool.slot_bytes
    rows[:, ls.S_FIRST], rows[:, ls.S_ROWS] = layout.cu_seqlens_q[:-1], np.diff(layout.cu_seqlens_q)
    rows[:, ls.S_IN] = np.where(read < 0, 0, first + size * read.astype(np.int64))
    rows[:, ls.S_OUT] = first + size * written.astype(np.int64)
    pairs[:, 0], pairs[:, 1] = saves[:, 1], first + size * saves[:, 2].astype(np.int64)
    counts = np.bincount(saves[:, 0], minlength=num_seqs)
    rows[:, ls.S_NUM_SAVES] = counts
    rows[:, ls.S_SAVES] = pairs.ctypes.data + 16 * (np.cumsum(counts) - counts)
    return found
