"""Tensors of a GGUF file under transformers' names and with rows in transformers' order.

An NVFP4 tensor "m.weight" may have a factor of all weights, the F32 tensor "m.scale" or
"m.weight.scale", with one number, or one for each expert. "m.input_scale" is not used, because it
is a factor of activations.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.config.architectures import LATENT, UNSUPPORTED_ARCHITECTURES
from kvboost_edge.models.families.gguf_keys import Keys
from kvboost_edge.models.families.gguf_names import GgufArchitecture
from kvboost_edge.models.families.registry import ARCHITECTURES
from kvboost_edge.models.gguf.blocks import BLOCKS, dequantize, quant_rows_of
from kvboost_edge.models.gguf.file import GgufHeader, GgufTensor
from kvboost_edge.models.gguf.tensor_names import (
    count_ahead,
    hf_name,
    is_ahead,
    is_other_part,
    mtp_name,
)
from kvboost_edge.models.weights.file_bytes import FileBytes, check_stamped, open_stamped
from kvboost_edge.models.weights.mxfp4 import LostWeights
from kvboost_edge.models.weights.split_experts import ExpertRows, expert_number, expert_rows
from kvboost_edge.models.weights.weight_source import QuantRows, StoredRows

__all__ = [
    "LONG_FACTORS",
    "ROPE_FACTORS",
    "SHORT_FACTORS",
    "UNUSED_FACTORS",
    "GgufSource",
    "architecture_of",
    "is_mtp_file",
    "own_layers",
    "trimmed_tensor",
]

ROPE_FACTORS = "rope_freqs.weight"
"""Tensor with divisors of RoPE frequencies, which become part of the config."""

SHORT_FACTORS = "rope_factors_short.weight"
LONG_FACTORS = "rope_factors_long.weight"
"""Tensors with divisors of RoPE frequencies for the two ranges of longrope."""

UNUSED_FACTORS = (".weight.input_scale", ".input_scale")
"""Endings of factors of activations, which are not used and may be infinite."""

Floats = npt.NDArray[np.float32]
_QUERY = (".self_attn.q_proj.weight", ".self_attn.q_proj.bias")
_PLAIN_NORM = ".linear_attn.norm.weight"  # norm weights stored without an offset
_KEY = (".self_attn.k_proj.weight", ".self_attn.k_proj.bias")
_WEIGHT = ".weight"
_FACTORS = (".weight.scale", ".scale")  # replace ".weight" in the names of factors
_FACTOR_TYPE = "NVFP4"  # type of the tensors that may have a factor
# Architectures that only other programs write -> reason why they are not supported.
_OTHER_PROGRAMS = {
    "bitnet-b1.58": "it is an architecture of bitnet.cpp; use the safetensors of this model"
}


def architecture_of(header: GgufHeader) -> GgufArchitecture:
    """Return the architecture of a file.

    Raises:
        ModelFormatError: the architecture is missing or not supported.
    """
    name = header.value("general.architecture", str)
    if name is None:
        raise ModelFormatError(
            f"{header.path} lacks the key 'general.architecture'; it does not contain a model"
        )
    if name not in ARCHITECTURES:
        is_latent = f"{name}.attention.kv_lora_rank" in header.values
        known = f"supported: {', '.join(sorted(ARCHITECTURES))}"
        refused = {**UNSUPPORTED_ARCHITECTURES, **_OTHER_PROGRAMS}
        why = LATENT if is_latent else refused.get(name, known)
        raise ModelFormatError(
            f"{header.path}: general.architecture={name!r} is not supported in GGUF files ({why})"
        )
    return ARCHITECTURES[name]


def own_layers(header: GgufHeader) -> int:
    """Return the number of layers of the model.

    The block count in files also includes layers for multi-token prediction (MTP).
    """
    return Keys(header).layers()


def is_mtp_file(header: GgufHeader) -> bool:
    """Return whether a file contains an MTP head without the layers of the model."""
    first = Keys(header).first_block()
    return first != "blk.0." and any(name.startswith(first) for name in header.tensors)


def trimmed_tensor(header: GgufHeader, vocab_size: int) -> str:
    """Return the name of a tensor that shows an LM head for a part of the vocabulary, or "".

    FastMTP and EAGLE-3 heads have such an LM head, and "d2t" maps its rows to token ids.
    """
    output = header.tensors.get("output.weight")
    mapping = (name for name in header.tensors if "d2t" in name.split("."))
    is_short = output is not None and output.shape[0] < vocab_size
    return next(mapping, "output.weight" if is_short else "")


class GgufSource:
    """`WeightSource` of a GGUF model, whose files must not have changed since the header was read.

    The header is interpreted once. The source may be entered repeatedly, also by several users at
    once. Files are opened when rows are first read, and closed by the last user.

    Args:
        header: header of the model.
        mtp: use the tensors of the MTP head instead of those of the model.
    """

    def __init__(self, header: GgufHeader, *, mtp: bool = False) -> None:
        self.header = header
        self._path = header.path
        self.architecture = architecture_of(header)
        self._heads = _head_counts(header, self.architecture) if self.architecture.permuted else {}
        self._tensors: dict[str, GgufTensor] = {}
        pieces: dict[str, list[str]] = {}  # names here, by name of the tensor with them
        factors: list[str] = []
        layers = own_layers(header)
        if mtp and (count := count_ahead(header.tensors, layers)) > 1:
            raise ModelFormatError(
                f"{self._path}: the multi-token prediction head has {count} layers (from block "
                f"{layers} on); supported are heads with one layer"
            )
        for name, tensor in header.tensors.items():
            is_outside = name in (ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS) or name in (
                *self.architecture.dense,
                *self.architecture.unused,
            )
            if is_outside or is_other_part(name) or is_ahead(name, layers) is not mtp:
                continue
            found = (mtp_name if mtp else hf_name)(self.architecture, name)
            if found is None:
                factors.append(name)
                continue
            for piece in expert_rows(found, tensor.shape) or [ExpertRows(found, 0, tensor.shape)]:
                if piece.name in self._tensors:
                    raise ModelFormatError(
                        f"{self._path}: tensor {name!r} duplicates {piece.name!r}"
                    )
                pieces.setdefault(name, []).append(piece.name)
                start, stop = piece.bytes_in(tensor.start, tensor.stop, tensor.shape)
                self._tensors[piece.name] = dataclasses.replace(
                    tensor, shape=piece.shape, start=start, stop=stop
                )
        self._factors: dict[str, tuple[GgufTensor, int]] = {}
        for name in factors:
            self._add_factor(name, pieces)
        self._lock = threading.Lock()
        self._lost = LostWeights()
        self._users = 0
        self._files: list[FileBytes] = []  # open files

    def __enter__(self) -> GgufSource:
        with self._lock:
            self._users += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._users -= 1
            closing = [] if self._users else self._files
            if closing:
                self._files = []
        for file in closing:
            file.close()

    def check_unchanged(self) -> None:
        """Raise ModelFormatError if a file has changed since the header was read."""
        check_stamped(self.header.parts, "header")

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def type_of(self, name: str) -> str:
        """Return the tensor's type in the file, such as "Q4_K"."""
        return self._tensor(name).type

    def kind(self, name: str) -> str | None:
        return BLOCKS[self._tensor(name).type].kind

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Floats:
        """Return a copy of rows [start, stop) as float32. The rows of a vector are its elements."""
        tensor = self._tensor(name)
        stop = tensor.shape[0] if stop is None else stop
        data = self._bytes(name, tensor, start, stop)
        values = _scaled_floats(tensor.type, self._factor(name), data)
        if (
            self.architecture.norm_offset
            and name.endswith("norm.weight")
            and not name.endswith(_PLAIN_NORM)
        ):
            values = values - np.float32(self.architecture.norm_offset)
        return values.reshape(stop - start, *tensor.shape[1:])

    def quant_rows(self, name: str, start: int, stop: int) -> QuantRows:
        tensor = self._tensor(name)
        data = self._bytes(name, tensor, start, stop)
        block = BLOCKS[tensor.type]
        found = quant_rows_of(tensor.type, data)
        if block.count_lost is None:
            return found._replace(factor=float(self._factor(name)))
        if not np.isfinite(found.scales).all():
            raise ModelFormatError(
                f"{self._path}: tensor {name!r} ({tensor.type}) has scales above 65504, the limit "
                f"of {found.kind!r}, in rows {start} to {stop - 1}; set weights='f32' or 'bf16'"
            )
        lost = block.count_lost(data.reshape(-1, block.nbytes))
        self._lost.note(self._path, name, lost)
        return found

    def file_of(self, name: str) -> Path:
        return self.header.path_of(self._tensor(name))

    def stored_rows(self, name: str) -> StoredRows:
        tensor = self._tensor(name)
        path, stamp = self.header.parts[tensor.part]
        if len(tensor.shape) != 2 or name.endswith(tuple(self._heads)):
            raise ModelFormatError(
                f"{path}: tensor {name!r} has shape {tensor.shape}; single rows cannot be read "
                "from it"
            )
        row_bytes = (tensor.stop - tensor.start) // tensor.shape[0]
        to_floats = None
        if BLOCKS[tensor.type].kind is not None:
            factor = self._factor(name)
            to_floats = partial(_scaled_floats, tensor.type, factor)
        return StoredRows(path, stamp, tensor.type, tensor.start, row_bytes, to_floats)

    def _opened(self) -> list[FileBytes]:
        with self._lock:
            if not self._files:
                self._files = open_stamped(self.header.parts, "header")
            return self._files

    def _add_factor(self, name: str, pieces: Mapping[str, Sequence[str]]) -> None:
        """Note the factor of a tensor.

        Args:
            name: name of a tensor without a name in transformers.
            pieces: names here of the tensors of the model.
        """
        ending = next((one for one in (*_FACTORS, *UNUSED_FACTORS) if name.endswith(one)), "")
        base = name.removesuffix(ending) + _WEIGHT if ending else ""
        if base not in pieces:
            raise ModelFormatError(
                f"{self._path}: tensor {name!r} is not supported for the architecture "
                f"{self.header.value('general.architecture', str)}"
            )
        if ending in UNUSED_FACTORS:
            return
        tensor = self.header.tensors[name]
        numbers = [expert_number(piece) or 0 for piece in pieces[base]]
        count = max(numbers) + 1
        known = self.header.tensors[base].type
        if known != _FACTOR_TYPE or tensor.type != "F32" or tensor.shape != (count,):
            raise ModelFormatError(
                f"{self._path}: tensor {name!r} ({tensor.type} {tensor.shape}) is a factor of "
                f"{base!r} ({known}); factors must be F32 with {count} numbers, of tensors of type "
                f"{_FACTOR_TYPE}"
            )
        for piece, number in zip(pieces[base], numbers, strict=True):
            if piece in self._factors:
                raise ModelFormatError(
                    f"{self._path}: tensor {name!r} is a second factor of {base!r}"
                )
            self._factors[piece] = tensor, number

    def _factor(self, name: str) -> np.float32:
        """Return the factor of a tensor's weights."""
        if name not in self._factors:
            return np.float32(1)
        tensor, number = self._factors[name]
        found = np.empty(1, dtype="<f4")
        self._opened()[tensor.part].read_into(found.view(np.uint8), tensor.start + 4 * number)
        return np.float32(found[0])

    def _tensor(self, name: str) -> GgufTensor:
        found = self._tensors.get(name)
        if found is None:
            raise ModelFormatError(f"{self._path} lacks tensor {name!r}")
        return found

    def _bytes(self, name: str, tensor: GgufTensor, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of rows [start, stop) in transformers' order, uint8 [rows, bytes of a
        row].

        The result is a copy of the file's data.
        """
        if not 0 <= start < stop <= tensor.shape[0]:
            raise ModelFormatError(
                f"{self._path}: tensor {name!r} has {tensor.shape[0]} rows; rows {start} to "
                f"{stop} are out of range"
            )
        first = start
        last = stop
        pick = None
        heads = next((count for ending, count in self._heads.items() if name.endswith(ending)), 0)
        if heads:
            pick = _stored_rows(name, tensor, heads)[start:stop]
            first = int(pick.min())
            last = int(pick.max()) + 1
        width = (tensor.stop - tensor.start) // tensor.shape[0]
        begin = tensor.start + first * width
        data = np.empty((last - first, width), dtype=np.uint8)
        self._opened()[tensor.part].read_into(data, begin)
        return data if pick is None else data[pick - first]


def _head_counts(header: GgufHeader, architecture: GgufArchitecture) -> dict[str, int]:
    """Return the number of heads for tensors whose rows are reordered, by the end of the tensor's
    name.
    """
    keys = Keys(header)
    name = "attention.head_count_kv"
    heads = keys.size("attention.head_count")
    kv_heads = (
        max(keys.sizes(name, 0)) if architecture.no_keys else keys.optional_size(name)
    ) or heads
    return {**dict.fromkeys(_QUERY, heads), **dict.fromkeys(_KEY, kv_heads)}


def _scaled_floats(kind: str, factor: np.float32, data: npt.NDArray[np.uint8]) -> Floats:
    """Return rows of a tensor type, uint8 [rows, bytes of a row], times a factor as float32."""
    values = dequantize(kind, data)
    return values if factor == 1 else values * factor


def _stored_rows(name: str, tensor: GgufTensor, heads: int) -> npt.NDArray[np.int64]:
    """Return the row of the file for each row in transformers' order.

    Row (head, half, i) of transformers is stored as row (head, i, half).
    """
    rows = tensor.shape[0]
    if rows % (2 * heads):
        raise ModelFormatError(
            f"tensor {name!r} has {rows} rows, which cannot be divided into {heads} heads of an "
            "even size"
        )
    return (
        np.arange(rows, dtype=np.int64)
        .reshape(heads, rows // heads // 2, 2)
        .swapaxes(1, 2)
        .reshape(-1)
    )
