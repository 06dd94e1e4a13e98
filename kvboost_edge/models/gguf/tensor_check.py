"""Check of GGUF tensors before loading: they fit the config, and no number is NaN or infinite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.host.file_at import FileAt
from kvboost_edge.host.file_memo import recall, remember
from kvboost_edge.host.processor import default_num_threads
from kvboost_edge.models.config.spec import Describe
from kvboost_edge.models.gguf.blocks import BLOCKS, BlockFormat, half_bits
from kvboost_edge.models.gguf.file import GgufHeader, GgufTensor
from kvboost_edge.models.gguf.source import UNUSED_FACTORS, GgufSource
from kvboost_edge.models.weights.finite_check import first_non_finite
from kvboost_edge.models.weights.shapes import check_shapes
from kvboost_edge.models.weights.weight_source import WeightSummary

__all__ = ["check_gguf"]

_CHUNK_BYTES = 1 << 18  # fits in the L2 cache
_EXPONENT = np.uint16(0x7C00)  # exponent of NaN and infinity, with all bits set
_FLOAT8_NAN = np.uint8(0x7F)  # NaN of an 8-bit float (E4M3), without the sign


def check_gguf(
    source: GgufSource,
    config: Mapping[str, Any],
    describe: Describe,
    *,
    cache_dir: Path | None = None,
) -> WeightSummary:
    """Check the tensors of a GGUF model against its config, as `check_weights` does for a
    directory.

    All floats, and all scales of quantized tensors, must be finite. The result of this check is
    cached.
    """
    header = source.header
    path = header.path
    source.check_unchanged()
    check_shapes(
        {name: (source.file_of(name), source.shape(name)) for name in source.names()},
        config,
        path,
        path.name,
        describe=describe,
    )
    _check_finite(header, cache_dir)
    dtypes: dict[str, int] = {}
    for tensor in header.tensors.values():
        dtypes[tensor.type] = dtypes.get(tensor.type, 0) + math.prod(tensor.shape)
    nbytes = sum(tensor.stop - tensor.start for tensor in header.tensors.values())
    return WeightSummary(
        tuple(part.path for part in header.parts), sum(dtypes.values()), nbytes, dtypes
    )


def _check_finite(header: GgufHeader, cache_dir: Path | None) -> None:
    for number, part in enumerate(header.parts):
        if recall(part.stamp, cache_dir).get("finite") is not True:
            _check_part(
                part.path,
                [
                    tensor
                    for tensor in header.tensors.values()
                    if tensor.part == number and not tensor.name.endswith(UNUSED_FACTORS)
                ],
            )
            remember(part.stamp, {"finite": True}, cache_dir)


def _check_part(path: Path, tensors: Sequence[GgufTensor]) -> None:
    try:
        with ThreadPoolExecutor(default_num_threads()) as pool:
            for tensor, where in zip(
                tensors, pool.map(lambda t: _first_damaged(path, t), tensors), strict=True
            ):
                if where is not None:
                    raise ModelFormatError(
                        f"{path}: tensor {tensor.name!r} ({tensor.type}) holds NaN or infinity, "
                        f"first in block {where} of {BLOCKS[tensor.type].weights} weights; the "
                        "file is damaged"
                    )
    except OSError as error:
        raise ModelFormatError(f"{path} cannot be read: {error}") from error


def _first_damaged(path: Path, tensor: GgufTensor) -> int | None:
    """Return the index of the first block that contains NaN or infinity, or None."""
    block = BLOCKS[tensor.type]
    if block.kind is None:
        return first_non_finite(path, tensor.type, tensor.start, tensor.stop)
    step = _CHUNK_BYTES // block.nbytes * block.nbytes
    # Read into private buffers, because mapped pages would count as memory of this process.
    chunk = np.empty(min(step, tensor.stop - tensor.start), dtype=np.uint8)
    with open(path, "rb", buffering=0) as file:
        source = FileAt(file)
        for start in range(tensor.start, tensor.stop, step):
            part = chunk[: min(step, tensor.stop - start)]
            done = source.read_into(part.data, start)
            if done < len(part):
                raise OSError(f"the file ends {tensor.stop - start - done} bytes early")
            found = _first_non_finite(part.reshape(-1, block.nbytes), block)
            if found is not None:
                return (start - tensor.start) // block.nbytes + found
    return None


def _first_non_finite(blocks: npt.NDArray[np.uint8], block: BlockFormat) -> int | None:
    """Return the index of the first block with a NaN or infinite number, or None.

    Args:
        blocks: uint8 [blocks, bytes of a block].
        block: the format of the blocks.
    """
    exponents = [half_bits(blocks, at)[:, 0] & _EXPONENT for at in block.halves]
    bytes_of = [blocks[:, at] & _FLOAT8_NAN for at in block.float8]
    found = [bits == _EXPONENT for bits in exponents if bits.max() == _EXPONENT]
    found += [bits == _FLOAT8_NAN for bits in bytes_of if bits.max() == _FLOAT8_NAN]
    return int(np.argmax(np.any(found, axis=0))) if found else None
