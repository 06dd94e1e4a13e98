"""Conversion between KV arrays and the bytes of chunks.

KV arrays are NumPy arrays or torch tensors of any real type. The bytes of a chunk are one blob
[num_layers, 2, …] of its tokens, keys before values, in the engine's format. A `ChunkShape`
describes the blob and the kind of array. Loading returns the same kind, on the CPU.
"""

from __future__ import annotations

import importlib
import re
import struct
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvboost_edge.compat.lmcache.chunk_addresses import is_tensor
from kvboost_edge.errors import BackendUnavailable, RequestError, install_extra

__all__ = ["SHAPE_BYTES", "ChunkShape", "KeysAndValues", "assemble", "decode_shape", "read_kv"]

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_TORCH_WORDS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
_PACKED = struct.Struct("<8s32sIIIII")
SHAPE_BYTES = _PACKED.size
_MAGIC = {"numpy": b"KVB-NP01", "torch": b"KVB-PT01"}
_TOKEN_AXIS = {"huggingface": 1, "vllm": 0}


class ChunkShape(NamedTuple):
    """Shape and type of a chunk's arrays.

    Attributes:
        library: "numpy" or "torch".
        dtype: element type, as named by the library.
        itemsize: bytes per element.
        num_layers: number of layers.
        num_heads: number of KV heads.
        head_size: elements per head.
        num_tokens: number of tokens in the chunk.
    """

    library: str
    dtype: str
    itemsize: int
    num_layers: int
    num_heads: int
    head_size: int
    num_tokens: int

    @property
    def nbytes(self) -> int:
        """Size of the chunk in bytes."""
        return (
            self.itemsize * self.num_layers * 2 * self.num_heads * self.head_size * self.num_tokens
        )

    def encode(self) -> bytes:
        """Encode the shape as `SHAPE_BYTES` bytes."""
        return _PACKED.pack(_MAGIC[self.library], self.dtype.encode(), *self[2:])


class KeysAndValues(NamedTuple):
    """A view of the KV of all layers.

    Attributes:
        shape: shape of all tokens.
        layers: (k, v) of each layer. Each has three axes in the engine's format, and its elements
            are viewed as unsigned integers.
    """

    shape: ChunkShape
    layers: list[tuple[NDArray[Any], NDArray[Any]]]

    def chunk(self, start: int, end: int, fmt: str) -> tuple[ChunkShape, NDArray[np.uint8]]:
        """Copy the tokens [start, end) to a chunk."""
        shape = self.shape._replace(num_tokens=end - start)
        blob = np.empty(_blob_shape(shape, fmt), _WORDS[shape.itemsize])
        window = (slice(None),) * _TOKEN_AXIS[fmt] + (slice(start, end),)
        for layer, (k, v) in enumerate(self.layers):
            blob[layer, 0] = k[window]
            blob[layer, 1] = v[window]
        return shape, blob.reshape(-1).view(np.uint8)


def read_kv(kv: Any, fmt: str) -> KeysAndValues:
    """View KV arrays, given as (k, v) of each layer or as a blob [num_layers, 2, …].

    Raises:
        RequestError: the arrays differ in shape or type, or cannot be stored.
    """
    if isinstance(kv, np.ndarray) or is_tensor(kv):
        if kv.ndim != 5 or kv.shape[1] != 2:
            raise RequestError(
                f"a KV blob must have 5 axes, [num_layers, 2, …], not {list(kv.shape)}"
            )
        kv = [(kv[layer, 0], kv[layer, 1]) for layer in range(kv.shape[0])]
    if (
        not isinstance(kv, Sequence)
        or not kv
        or not all(isinstance(p, Sequence) and len(p) == 2 for p in kv)
    ):
        raise RequestError(
            "KV must be at least one (k, v) pair, one per layer, or a blob [num_layers, 2, …], "
            f"not {type(kv).__name__}"
        )
    words = [[_as_words(array) for array in pair] for pair in kv]
    kinds = {(*kind, array.shape) for pair in words for kind, array in pair}
    if len(kinds) > 1:
        raise RequestError(
            f"k and v of all layers must have the same type and shape, but have {sorted(kinds)}"
        )
    library, dtype, itemsize, axes = kinds.pop()
    if len(axes) != 3:
        raise RequestError(f"k and v must have 3 axes in the format {fmt!r}, not {list(axes)}")
    tokens = axes[_TOKEN_AXIS[fmt]]
    heads = axes[1 - _TOKEN_AXIS[fmt]]
    head_size = axes[2]
    if not heads * head_size:
        raise RequestError(f"k and v are empty: {heads} heads of size {head_size}")
    shape = ChunkShape(library, dtype, itemsize, len(words), heads, head_size, tokens)
    return KeysAndValues(shape, [(k, v) for (_, k), (_, v) in words])


def assemble(chunks: Sequence[tuple[ChunkShape, NDArray[np.uint8]]], skip: int, fmt: str) -> Any:
    """Copy the tokens of chunks, except the first `skip`, into one blob [num_layers, 2, …].

    The blob is an array or a tensor, as stored.

    Raises:
        BackendUnavailable: the chunks hold tensors, and torch is not installed.
    """
    first = chunks[0][0]
    total = sum(shape.num_tokens for shape, _ in chunks) - skip
    blob = np.empty(_blob_shape(first._replace(num_tokens=total), fmt), _WORDS[first.itemsize])
    axis = 2 + _TOKEN_AXIS[fmt]
    at = 0
    for shape, data in chunks:
        source = data.view(blob.dtype).reshape(_blob_shape(shape, fmt))
        rest = (slice(None),) * axis + (slice(skip, None),)
        window = (slice(None),) * axis + (slice(at, at + shape.num_tokens - skip),)
        blob[window] = source[rest]
        at = at + shape.num_tokens - skip
        skip = 0
    if first.library == "numpy":
        return blob.view(np.dtype(first.dtype))
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise BackendUnavailable(
            "this KV was stored as torch tensors, but torch is not installed; install the extra: "
            f"{install_extra('torch')}"
        ) from error
    words = torch.from_numpy(blob.view(np.dtype(_TORCH_WORDS[first.itemsize])))
    return words.view(getattr(torch, first.dtype))


def decode_shape(data: bytes, num_tokens: int) -> ChunkShape | None:
    """Decode the shape of a chunk of `num_tokens` tokens; return None if it is invalid."""
    magic, name, *numbers = _PACKED.unpack(data)
    library = next((library for library, own in _MAGIC.items() if own == magic), None)
    dtype = name.rstrip(b"\0").decode("ascii", "replace")
    if library is None or numbers[0] not in _WORDS or numbers[-1] != num_tokens or not all(numbers):
        return None
    known = (
        _is_numpy_type(dtype, numbers[0])
        if library == "numpy"
        else re.fullmatch(r"[a-z][a-z0-9_]*", dtype)
    )
    return ChunkShape(library, dtype, *numbers) if known else None


def _blob_shape(shape: ChunkShape, fmt: str) -> tuple[int, ...]:
    rows = (
        (shape.num_tokens, shape.num_heads)
        if fmt == "vllm"
        else (shape.num_heads, shape.num_tokens)
    )
    return (shape.num_layers, 2, *rows, shape.head_size)


def _as_words(array: Any) -> tuple[tuple[str, str, int], NDArray[Any]]:
    """Return (library, type, item size), and the elements as unsigned integers.

    Elements on the CPU are not copied.
    """
    if is_tensor(array):
        torch = sys.modules["torch"]
        if (
            array.layout != torch.strided
            or array.is_quantized
            or array.is_complex()
            or array.itemsize not in _WORDS
        ):
            raise RequestError(f"KV of type {array.dtype}, layout {array.layout}, cannot be stored")
        plain = array.detach().cpu().view(getattr(torch, _TORCH_WORDS[array.itemsize])).numpy()
        kind = ("torch", str(array.dtype).removeprefix("torch."), int(array.itemsize))
    elif isinstance(array, np.ndarray):
        if not _is_numpy_type(array.dtype.str, array.itemsize):
            raise RequestError(
                f"KV of type {array.dtype} cannot be stored; use real numbers of 1 to 8 bytes"
            )
        plain = array
        kind = ("numpy", array.dtype.str, array.itemsize)
    else:
        raise RequestError(f"KV must be NumPy arrays or torch tensors, not {type(array).__name__}")
    return kind, plain.view(_WORDS[kind[2]])


def _is_numpy_type(name: str, itemsize: int) -> bool:
    """Return whether a NumPy type is a real number.

    Objects must not be stored, because their bytes are addresses.
    """
    found = re.fullmatch(r"[<>|][fiub]([1248])", name)
    return found is not None and int(found[1]) == itemsize
