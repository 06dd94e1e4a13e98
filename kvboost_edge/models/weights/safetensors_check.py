"""Checks of safetensors before loading: complete, in bounds, consistent with the config, finite.

Memory is allocated only for headers, up to a limit. Tensor data is read in small pieces, and pickle
files are never opened.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.host.file_memo import FileStamp, recall, remember
from kvboost_edge.host.json_file import read_json_object
from kvboost_edge.host.processor import default_num_threads
from kvboost_edge.models.config.quant_config import NVFP4_METHODS
from kvboost_edge.models.weights.finite_check import DTYPE_BITS, first_bad_scale, first_non_finite
from kvboost_edge.models.weights.nvfp4_parts import FACTORS, SCALE, UNUSED_SCALES, weight_factor
from kvboost_edge.models.weights.shapes import check_shapes
from kvboost_edge.models.weights.weight_source import WeightSummary

__all__ = ["TensorEntry", "check_weights", "read_header", "weight_files"]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Header limit in the format's specification.
_MAX_HEADER_BYTES = 100_000_000
# Larger headers take seconds to check. They must describe at least this multiple of their own size
# in data. An entry takes about 100 bytes, and a real tensor has thousands.
_SMALL_HEADER_BYTES = 1 << 20
_DATA_PER_HEADER = 4
# Endings of tensors that are not read and may be infinite: the mask constant in old GPT-NeoX and
# GPT-2 checkpoints, which is -inf in half precision, and scales of activations.
_NOT_READ = (".masked_bias", *UNUSED_SCALES)
# Weights per element in packed tensors, by the last word of the name and the dtype: AWQ and GPTQ,
# MXFP4, NVFP4 of compressed-tensors and of ModelOpt. BitNet packs 4 rows, under ModelOpt's name.
_WHOLE = ("weight", "U8")
_PACKED = {("qweight", "I32"): 8, ("blocks", "U8"): 2, ("packed", "U8"): 2, _WHOLE: 2}
_BITNET_ROWS = 4
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclasses.dataclass(frozen=True, slots=True)
class TensorEntry:
    """Entry for a tensor in the header of a file.

    Attributes:
        name: name in the file.
        dtype: dtype, such as "BF16".
        shape: shape.
        start: byte offset of the data in the file.
        stop: byte offset of the end of the data.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def check_weights(
    model_dir: Path | str,
    config: Mapping[str, Any],
    *,
    check_finite: bool = True,
    cache_dir: Path | None = None,
) -> WeightSummary:
    """Check that the weight files of a model directory are valid and match the config.

    Args:
        model_dir: directory of the model.
        config: object in config.json.
        check_finite: also search float tensors for NaN and infinity, and the scales of NVFP4 for
            damaged ones. If a file passes, this is cached and the file is not searched again.
        cache_dir: directory for cached results.

    Raises:
        ModelFormatError: a file is invalid or does not match; the message names the file and the
            tensor.
    """
    directory = Path(model_dir)
    entries: dict[str, tuple[Path, TensorEntry]] = {}
    files = weight_files(directory)
    for path in files:
        for entry in read_header(path):
            if entry.name in entries:
                raise ModelFormatError(
                    f"tensor {entry.name!r} is in both {entries[entry.name][0]} and {path}"
                )
            entries[entry.name] = (path, entry)
    _check_index(directory, entries)
    settings = config.get("quantization_config")
    method = str(settings.get("quant_method")) if isinstance(settings, Mapping) else ""
    is_bitnet = method == "bitnet"
    is_nvfp4 = method in NVFP4_METHODS
    check_shapes(
        {
            name: (path, _unpacked_shape(entry, is_bitnet=is_bitnet))
            for name, (path, entry) in entries.items()
        },
        config,
        directory,
    )
    if check_finite:
        for path in files:
            _check_finite(
                path,
                [
                    e
                    for where, e in entries.values()
                    if where == path and not e.name.endswith(_NOT_READ)
                ],
                cache_dir,
                is_nvfp4=is_nvfp4,
            )
    dtypes: dict[str, int] = {}
    scales = (SCALE, *FACTORS, *UNUSED_SCALES) if is_nvfp4 else ()
    for _, entry in entries.values():
        if entry.name.endswith(scales):
            continue  # not a parameter
        each = _BITNET_ROWS if is_bitnet and _packing(entry) == _WHOLE else None
        count = math.prod(entry.shape) * (each or _PACKED.get(_packing(entry), 1))
        dtypes[entry.dtype] = dtypes.get(entry.dtype, 0) + count
    nbytes = sum(entry.stop - entry.start for _, entry in entries.values())
    return WeightSummary(tuple(files), sum(dtypes.values()), nbytes, dtypes)


def _packing(entry: TensorEntry) -> tuple[str, str]:
    """Return the key of a tensor in `_PACKED`."""
    return entry.name.rpartition(".")[2].rpartition("_")[2], entry.dtype


def _unpacked_shape(entry: TensorEntry, *, is_bitnet: bool) -> tuple[int, ...]:
    """Return the shape of a tensor, or of the matrix that it packs under its own name."""
    if _packing(entry) != _WHOLE or len(entry.shape) != 2:
        return entry.shape
    rows, columns = entry.shape
    return (rows * _BITNET_ROWS, columns) if is_bitnet else (rows, columns * _PACKED[_WHOLE])


def weight_files(model_dir: Path) -> list[Path]:
    """Return the safetensors files of a model directory.

    They are the single file, or the shards in the index, sorted by name.
    """
    single = model_dir / SINGLE_FILE
    index = model_dir / INDEX_FILE
    if single.is_file():
        return [single]
    if index.is_file():
        names = sorted(set(_weight_map(index).values()))
        for name in names:
            if not (model_dir / name).is_file():
                raise ModelFormatError(
                    f"shard {model_dir / name} is missing; {index} lists {len(names)} shards"
                )
        return [model_dir / name for name in names]
    pickles = sorted(
        p.name
        for p in model_dir.glob("*")
        if p.suffix in _PICKLES and "training_args" not in p.name
    )
    if pickles:
        raise ModelFormatError(
            f"{model_dir / pickles[0]} is a pickle, which can run any code and is never opened; "
            f"convert the weights to {SINGLE_FILE}"
        )
    raise ModelFormatError(
        f"{model_dir} has no weights: {SINGLE_FILE} and {INDEX_FILE} are missing"
    )


def read_header(path: Path) -> list[TensorEntry]:
    """Return the tensors in a safetensors file, in the order of their data.

    Offsets are checked against the size of the file.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or not 2 <= length <= size - 8:
                raise ModelFormatError(
                    f"{path} is truncated or not a safetensors file: "
                    f"its header claims {length} bytes, the file has {size}"
                )
            if length > _MAX_HEADER_BYTES:
                raise ModelFormatError(
                    f"{path}: the header has {length} bytes, more than the limit of "
                    f"{_MAX_HEADER_BYTES}"
                )
            if length > max(_SMALL_HEADER_BYTES, (size - 8 - length) // _DATA_PER_HEADER):
                raise ModelFormatError(
                    f"{path}: a header of {length} bytes describes only {size - 8 - length} bytes "
                    "of data; download the file again"
                )
            raw = file.read(length)
    except OSError as error:
        raise ModelFormatError(f"{path} cannot be read: {error}") from error
    return _check_layout(path, _parse_header(path, raw), 8 + length, size)


def _parse_header(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path}: the header is not readable JSON: {error}") from error
    if not isinstance(header, dict):
        raise ModelFormatError(
            f"{path}: the header must be a JSON object, got {type(header).__name__}"
        )
    header.pop("__metadata__", None)
    if not header:
        raise ModelFormatError(f"{path} holds no tensor")
    return header


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"{next(n for n in counts if counts[n] > 1)!r} appears twice")
    return found


def _check_layout(
    path: Path, header: dict[str, Any], data_start: int, size: int
) -> list[TensorEntry]:
    """Check that tensor data fills the file after the header, without overlaps or gaps."""
    entries = sorted(
        (_entry(path, name, fields, data_start) for name, fields in header.items()),
        key=lambda e: (e.start, e.stop),
    )
    end = data_start
    for entry in entries:
        if entry.stop > size:
            raise ModelFormatError(
                f"{path}: tensor {entry.name!r} ends at byte {entry.stop}, but the file has {size} "
                "bytes; it is truncated"
            )
        if entry.start != end:
            what = (
                "overlaps the tensor before it" if entry.start < end else "leaves a gap before it"
            )
            raise ModelFormatError(
                f"{path}: tensor {entry.name!r} {what} (starts at {entry.start}, expected {end})"
            )
        end = entry.stop
    if end != size:
        raise ModelFormatError(
            f"{path} contains {size - end} unexpected bytes after the last tensor "
            f"{entries[-1].name!r}"
        )
    return entries


def _entry(path: Path, name: str, fields: Any, data_start: int) -> TensorEntry:
    if not isinstance(fields, dict):
        raise ModelFormatError(f"{path}: the description of tensor {name!r} must be an object")
    dtype: Any = fields.get("dtype")
    shape: Any = fields.get("shape")
    offsets: Any = fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise ModelFormatError(f"{path}: tensor {name!r} has unknown dtype {dtype!r}")
    if not _sizes(shape):
        raise ModelFormatError(f"{path}: tensor {name!r} has invalid shape {shape!r}")
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelFormatError(f"{path}: tensor {name!r} has invalid data_offsets {offsets!r}")
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits != 8 * (offsets[1] - offsets[0]):
        raise ModelFormatError(
            f"{path}: tensor {name!r} of shape {tuple(shape)} and dtype {dtype} takes {bits // 8} "
            f"bytes, but its offsets span {offsets[1] - offsets[0]}"
        )
    return TensorEntry(name, dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _sizes(value: Any) -> bool:
    if not isinstance(value, list) or len(value) > 32:
        return False
    return all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 62 for n in value)


def _weight_map(index: Path) -> dict[str, str]:
    names = read_json_object(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ModelFormatError(f"{index} lacks the key 'weight_map'")
    shards: set[str] = set()
    for tensor, name in names.items():
        if isinstance(name, str) and name in shards:
            continue
        if (
            not isinstance(name, str)
            or Path(name).name != name
            or not name.endswith(".safetensors")
        ):
            raise ModelFormatError(
                f"{index}: tensor {tensor!r} is assigned to {name!r}, which is not a valid shard "
                "name"
            )
        shards.add(name)
    return names


def _check_index(model_dir: Path, entries: Mapping[str, tuple[Path, TensorEntry]]) -> None:
    index = model_dir / INDEX_FILE
    if (model_dir / SINGLE_FILE).is_file() or not index.is_file():
        return
    for tensor, name in _weight_map(index).items():
        found = entries.get(tensor)
        if found is None or found[0].name != name:
            raise ModelFormatError(
                f"{model_dir / name} lacks tensor {tensor!r}, which {index} assigns to this file"
            )


def _check_finite(
    path: Path, entries: list[TensorEntry], cache_dir: Path | None, *, is_nvfp4: bool
) -> None:
    key = "nvfp4" if is_nvfp4 else "finite"
    try:
        stamp = FileStamp.of(path)
        if recall(stamp, cache_dir).get(key) is True:
            return
        with ThreadPoolExecutor(default_num_threads()) as pool:
            damages = pool.map(lambda e: _damage(path, e, is_nvfp4=is_nvfp4), entries)
            for entry, damage in zip(entries, damages, strict=True):
                if damage:
                    raise ModelFormatError(
                        f"{path}: tensor {entry.name!r} {damage}; the weights are damaged"
                    )
    except OSError as error:
        raise ModelFormatError(f"{path} cannot be read: {error}") from error
    remember(stamp, {key: True}, cache_dir)


def _damage(path: Path, entry: TensorEntry, *, is_nvfp4: bool) -> str:
    """Return which numbers of a tensor are damaged, or ""."""
    what = "NaN or infinity"
    index = first_non_finite(path, entry.dtype, entry.start, entry.stop)
    if is_nvfp4 and entry.dtype == "F8_E4M3" and entry.name.endswith(SCALE):
        what = "negative or NaN scales"
        index = first_bad_scale(path, entry.start, entry.stop)
    if index is not None:
        return f"holds {what} (first at element {index} of {math.prod(entry.shape)})"
    divides = next((FACTORS[end] for end in FACTORS if entry.name.endswith(end)), None)
    if is_nvfp4 and divides is not None and entry.dtype == "F32" and math.prod(entry.shape) == 1:
        stored = float(np.fromfile(path, "<f4", 1, offset=entry.start)[0])
        if weight_factor(stored, divides=divides) is None:
            return f"is {stored:g}, expected a positive number that keeps weights finite"
    return ""
