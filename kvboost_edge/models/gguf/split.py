"""Headers of GGUF models in one file or in split files (`-00001-of-00003.gguf`).

The first file holds all metadata. Each file holds some of the tensors, with offsets into that file.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import MappingProxyType

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.gguf.file import GgufHeader, GgufTensor, read_gguf
from kvboost_edge.models.locate.split_files import part_name

__all__ = ["read_gguf_model"]


def read_gguf_model(path: Path | str) -> GgufHeader:
    """Return the header of the model that a file belongs to. Any file of a split model may be
    given.

    Raises:
        ModelFormatError: a file is invalid or missing, or the files do not belong together; the
            message names the file.
    """
    path = Path(path)
    header = read_gguf(path)
    count = header.value("split.count", int)
    if count is None or count <= 1:
        return header
    name = part_name(path.name)
    if name is None or name.total != count:
        raise ModelFormatError(
            f"{path} is one of {count} parts (split.count), but its name does not end in "
            f"-00001-of-{count:05d}.gguf; restore the original file names of the parts"
        )
    paths = [path.with_name(other) for other in name.names()]
    missing = [other.name for other in paths if not other.is_file()]
    if missing:
        raise ModelFormatError(
            f"{path} is one of {count} parts; missing in its directory: {', '.join(missing[:5])}"
        )
    return _joined([header if other == path else read_gguf(other) for other in paths])


def _joined(headers: list[GgufHeader]) -> GgufHeader:
    tensors: dict[str, GgufTensor] = {}
    for number, header in enumerate(headers):
        _check_key(header, "split.no", number)
        _check_key(header, "split.count", len(headers))
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise ModelFormatError(f"{header.path}: tensor {name!r} is also in another part")
            tensors[name] = dataclasses.replace(tensor, part=number)
    for header in headers:
        _check_key(header, "split.tensors.count", len(tensors))
    parts = tuple(part for header in headers for part in header.parts)
    return GgufHeader(parts, headers[0].version, headers[0].values, MappingProxyType(tensors))


def _check_key(header: GgufHeader, key: str, expected: int) -> None:
    value = header.value(key, int)
    if value != expected:
        raise ModelFormatError(f"{header.path}: key {key!r} is {value}, expected {expected}")
