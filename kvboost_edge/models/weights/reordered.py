"""Weight sources that reorder and convert the tensors of a checkpoint for the kernels.

The left column is the tensor in the checkpoint, the right column its form for the kernels:

    conv.conv.weight, linear_attn.conv1d.weight   [channels, taps + 1] or [channels, 1, taps + 1]
                                                  to a vector ordered by tap
    linear_attn.A_log                             linear_attn.decay = -exp(A_log); files may also
                                                  store the decay
    mamba.in_proj                                 its rows as separate matrices, see PieceSource
    shared_mlp.input_linear                       its rows as matrices of gate and up
    self_attn.q_proj, each head [query | gate]    self_attn.q_proj and self_attn.output_gate
    self_attn.q_proj, k_proj with paired RoPE     rows in halves, see HalvedSource
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.config.nested import text_config
from kvboost_edge.models.config.spec import Describe, ModelSpec
from kvboost_edge.models.families.mixers import Mixer, MixerNames
from kvboost_edge.models.families.registry import FAMILIES
from kvboost_edge.models.families.ssm import OUTPUT_GATE
from kvboost_edge.models.weights.weight_source import (
    QuantRows,
    StoredRows,
    WeightSource,
    WrappedSource,
)

__all__ = ["HalvedSource", "MixerSource", "PieceSource", "in_kernel_order", "mixer_pieces"]

Floats = npt.NDArray[np.float32]

_LOG = ".A_log"
_DECAY = ".decay"
_QUERY = ".self_attn.q_proj."
_GATE = f".{OUTPUT_GATE}."


_TURNED = tuple(f".self_attn.{name}_proj.{what}" for name in "qk" for what in ("weight", "bias"))


class HalvedSource(WrappedSource):
    """`WeightSource` with the rows of queries and keys reordered within each head.

    Of the first 2 * half channels, the even ones come first, followed by the odd ones. The other
    channels keep their order. Attention scores are sums over channels, so they do not change.

    Args:
        source: tensors of a checkpoint that rotates the channel pairs (2i, 2i + 1).
        head_dim: size of a head.
        half: number of rotated pairs.
    """

    def __init__(self, source: WeightSource, head_dim: int, half: int) -> None:
        super().__init__(source)
        order = np.arange(head_dim, dtype=np.int64)
        order[: 2 * half] = order[: 2 * half].reshape(half, 2).T.reshape(-1)
        self._order = order

    def names(self) -> set[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Floats:
        if not name.endswith(_TURNED):
            return self._source.rows(name, start, stop)
        stored = self._stored(name, start, self.shape(name)[0] if stop is None else stop)
        first = int(stored.min())
        return self._source.rows(name, first, int(stored.max()) + 1)[stored - first]

    def quant_rows(self, name: str, start: int, stop: int) -> QuantRows:
        if not name.endswith(_TURNED):
            return self._source.quant_rows(name, start, stop)
        stored = self._stored(name, start, stop)
        first = int(stored.min())
        found = self._source.quant_rows(name, first, int(stored.max()) + 1)
        pick = stored - first
        minima = None if found.minima is None else found.minima[pick]
        return found._replace(codes=found.codes[pick], scales=found.scales[pick], minima=minima)

    def stored_rows(self, name: str) -> StoredRows:
        if name.endswith(_TURNED):
            raise ModelFormatError(
                f"{self.file_of(name)}: tensor {name!r} stores its rows in a different order; "
                "single rows cannot be read from it"
            )
        return self._source.stored_rows(name)

    def _stored(self, name: str, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the row of the source for each of rows [start, stop)."""
        rows = self.shape(name)[0]
        dim = len(self._order)
        if rows % dim or not 0 <= start < stop <= rows:
            raise ModelFormatError(
                f"rows {start} to {stop} of tensor {name!r} cannot be read: it has {rows} rows, "
                f"in heads of {dim} rows"
            )
        index = np.arange(start, stop, dtype=np.int64)
        stored: npt.NDArray[np.int64] = index // dim * dim + self._order[index % dim]
        return stored


def in_kernel_order(
    open_files: Callable[[], WeightSource], config: Mapping[str, Any], describe: Describe
) -> WeightSource:
    """Open the tensors of a checkpoint in the layout of the native runner's kernels.

    Args:
        open_files: function that opens the tensors in the layout of the files.
        config: object in config.json.
        describe: function that returns the spec of a config.
    """
    family = FAMILIES.get(str(text_config(config).get("model_type")))
    if family is None or not (family.paired_rope or family.hybrid or family.output_gate):
        return open_files()
    spec = describe(config)
    if family.paired_rope:
        return HalvedSource(open_files(), spec.head_dim, spec.ropes[0].half)
    source = open_files()
    if spec.mixer is not None and spec.named_mixer[1].whole:
        mixer, names = spec.named_mixer
        source = PieceSource(source, names.whole, mixer_pieces(mixer, names))
    if family.mlp_whole and any(f".{family.mlp_whole}." in name for name in source.names()):
        source = PieceSource(
            source, family.mlp_whole, dict.fromkeys(family.mlp[:-1], spec.intermediate_size)
        )
    return MixerSource(source, spec)


class MixerSource(WrappedSource):
    """`WeightSource` with the tensors of mixers and of gated attention in the layout of the
    kernels.

    Quantized queries and gates keep their codes, because only whole rows are moved.
    """

    def __init__(self, source: WeightSource, spec: ModelSpec) -> None:
        super().__init__(source)
        self._taps = spec.mixer.taps if spec.mixer else 0
        self._conv = f".{spec.hybrid.names.conv}" if spec.hybrid is not None and spec.mixer else ""
        self._head_dim = spec.head_dim if spec.family.output_gate else 0

    def names(self) -> set[str]:
        found = set()
        for name in self._source.names():
            found.add(name.removesuffix(_LOG) + _DECAY if name.endswith(_LOG) else name)
            if self._head_dim and _QUERY in name:
                found.add(name.replace(_QUERY, _GATE))
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self._source.shape(self._stored_as(name))
        if self._is_conv(name):
            return (self._conv_shape(name, stored)[0] * stored[-1],)
        if not self._is_interleaved(name):
            return stored
        if stored[0] % (2 * self._head_dim):
            raise ModelFormatError(
                f"{self.file_of(name)}: tensor {self._stored_as(name)!r} has {stored[0]} rows, "
                f"which do not fit queries and gates of heads of size {self._head_dim}"
            )
        return stored[0] // 2, *stored[1:]

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Floats:
        if self._is_conv(name):
            channels, taps = self._conv_shape(name, self._source.shape(name))
            values = self._source.rows(name).reshape(channels, taps)
            return np.ascontiguousarray(values.T).reshape(-1)[start:stop]
        stop = self.shape(name)[0] if stop is None else stop
        if self._is_interleaved(name):
            stored, pick = self._stored(name, start, stop)
            return self._source.rows(self._stored_as(name), *stored)[pick]
        values = self._source.rows(self._stored_as(name), start, stop)
        if self._stored_as(name) == name:
            return values
        with np.errstate(over="ignore"):  # infinity is detected during packing
            decay: Floats = (-np.exp(values.astype(np.float64))).astype(np.float32)
        return decay

    def quant_rows(self, name: str, start: int, stop: int) -> QuantRows:
        if not self._is_interleaved(name):
            return self._source.quant_rows(name, start, stop)
        stored, pick = self._stored(name, start, stop)
        found = self._source.quant_rows(self._stored_as(name), *stored)
        minima = None if found.minima is None else found.minima[pick]
        return found._replace(codes=found.codes[pick], scales=found.scales[pick], minima=minima)

    def stored_rows(self, name: str) -> StoredRows:
        if self._is_conv(name) or self._is_interleaved(name) or self._stored_as(name) != name:
            raise ModelFormatError(
                f"{self.file_of(name)}: tensor {name!r} has a different layout in the file; "
                "single rows cannot be read from it"
            )
        return self._source.stored_rows(name)

    def _stored_as(self, name: str) -> str:
        """Return the name of the source's tensor that contains this tensor."""
        if name.endswith(_DECAY):
            logs = name.removesuffix(_DECAY) + _LOG
            return logs if logs in self._source.names() else name
        return name.replace(_GATE, _QUERY)

    def _is_conv(self, name: str) -> bool:
        return bool(self._conv) and name.endswith(self._conv)

    def _is_interleaved(self, name: str) -> bool:
        return bool(self._head_dim) and (_QUERY in name or _GATE in name)

    def _conv_shape(self, name: str, stored: tuple[int, ...]) -> tuple[int, int]:
        """Return the number of channels and the length of the convolution, taps + 1."""
        if (
            len(stored) not in (2, 3)
            or stored[1:-1] not in ((), (1,))
            or stored[-1] != self._taps + 1
        ):
            raise ModelFormatError(
                f"{self.file_of(name)}: tensor {name!r} has shape {stored}, but the config gives "
                f"{self._taps + 1} taps per channel"
            )
        return stored[0], stored[-1]

    def _stored(
        self, name: str, start: int, stop: int
    ) -> tuple[tuple[int, int], npt.NDArray[np.int64]]:
        """Locate rows [start, stop) in the source.

        Returns:
            The smallest row range that contains them, and the index of each row in that range.
        """
        if not 0 <= start < stop <= self.shape(name)[0]:
            raise ModelFormatError(
                f"tensor {name!r} has {self.shape(name)[0]} rows; rows {start} to {stop} are out "
                "of range"
            )
        index = np.arange(start, stop, dtype=np.int64)
        dim = self._head_dim
        places = index // dim * 2 * dim + index % dim + dim * (_GATE in name)
        first = int(places[0])
        return (first, int(places[-1]) + 1), places - first


def mixer_pieces(mixer: Mixer, names: MixerNames) -> dict[str, int]:
    """Return the name and number of rows of each piece of `names.whole`, in order.

    The rows of the whole matrix are [z | x | B | C | dt].
    """
    (xbc, z) = names.inputs
    (dt,) = names.gates
    return {z: mixer.value_heads * mixer.value_dim, xbc: mixer.channels, dt: mixer.value_heads}


class PieceSource(WrappedSource):
    """`WeightSource` with one matrix in each layer split into pieces, in any stored format."""

    def __init__(self, source: WeightSource, whole: str, pieces: Mapping[str, int]) -> None:
        """Initialize the source.

        Args:
            source: tensors of the checkpoint.
            whole: name of the matrix inside a layer.
            pieces: number of rows of each piece by name, in the order of the rows.
        """
        super().__init__(source)
        self._whole = f".{whole}."
        self._rows = sum(pieces.values())
        self._pieces = {}
        first = 0
        for name, rows in pieces.items():
            self._pieces[f".{name}."] = (first, rows)
            first += rows

    def names(self) -> set[str]:
        found = set()
        for name in self._source.names():
            found |= (
                {name.replace(self._whole, piece) for piece in self._pieces}
                if self._whole in name
                else {name}
            )
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        stored, _, rows = self._place(name)
        shape = self._source.shape(stored)
        if stored == name:
            return shape
        if shape[0] != self._rows:
            raise ModelFormatError(
                f"{self.file_of(name)}: tensor {stored!r} has {shape[0]} rows, but the config "
                f"gives {self._rows}"
            )
        return rows, *shape[1:]

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Floats:
        stored, first, rows = self._place(name)
        if stored == name:
            return self._source.rows(name, start, stop)
        start, stop = self._range(name, start, rows if stop is None else stop)
        return self._source.rows(stored, first + start, first + stop)

    def quant_rows(self, name: str, start: int, stop: int) -> QuantRows:
        stored, first, _ = self._place(name)
        if stored != name:
            start, stop = self._range(name, start, stop)
        return self._source.quant_rows(stored, first + start, first + stop)

    def stored_rows(self, name: str) -> StoredRows:
        stored, first, _ = self._place(name)
        found = self._source.stored_rows(stored)
        return found._replace(start=found.start + first * found.row_bytes)

    def _stored_as(self, name: str) -> str:
        return self._place(name)[0]

    def _place(self, name: str) -> tuple[str, int, int]:
        """Locate a piece in the source.

        Returns:
            Name of the tensor that contains it, its first row, and its number of rows. For a tensor
                that is not a piece, its own name and zeros.
        """
        for piece, (first, rows) in self._pieces.items():
            if piece in name:
                return name.replace(piece, self._whole), first, rows
        return name, 0, 0

    def _range(self, name: str, start: int, stop: int) -> tuple[int, int]:
        rows = self.shape(name)[0]
        if not 0 <= start <= stop <= rows:
            raise ModelFormatError(
                f"tensor {name!r} has {rows} rows; rows {start} to {stop} are out of range"
            )
        return start, stop
