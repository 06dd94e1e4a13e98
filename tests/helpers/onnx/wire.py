"""Writer of ONNX files for tests. It writes protobuf's wire format by hand, so that no `onnx`
package is needed.

All functions return bytes of a message; `model` combines them. Weights are stored in the file
itself or in one next to it.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

NUMBERS = {
    "float32": 1,
    "uint8": 2,
    "int8": 3,
    "int32": 6,
    "int64": 7,
    "bool": 9,
    "float16": 10,
    "float64": 11,
}
BFLOAT16 = 16


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def real(field: int, value: float) -> bytes:
    return varint(field << 3 | 5) + struct.pack("<f", value)


def blob(field: int, data: bytes | str) -> bytes:
    data = data.encode() if isinstance(data, str) else data
    return varint(field << 3 | 2) + varint(len(data)) + data


def message(*fields: bytes) -> bytes:
    return b"".join(fields)


def tensor(name: str, array: np.ndarray, *, kind: int | None = None) -> bytes:
    """Return a TensorProto with inline data. `kind` is the type's number, if NumPy lacks it."""
    kind = kind or NUMBERS[array.dtype.name]
    dims = [number(1, size) for size in array.shape]
    return message(
        *dims, number(2, kind), blob(8, name), blob(9, np.ascontiguousarray(array).tobytes())
    )


class Weights:
    """Initializers, and the bytes of those stored in the external file `location`."""

    def __init__(self, location: str | None = None) -> None:
        self.location = location
        self.data = bytearray()
        self.messages: list[bytes] = []

    def add(self, name: str, array: np.ndarray, *, kind: int | None = None) -> str:
        if self.location is None:
            self.messages.append(tensor(name, array, kind=kind))
            return name
        raw = np.ascontiguousarray(array).tobytes()
        entries = {
            "location": self.location,
            "offset": str(len(self.data)),
            "length": str(len(raw)),
        }
        self.messages.append(
            self.outside(name, array.shape, kind or NUMBERS[array.dtype.name], entries)
        )
        self.data += raw
        return name

    @staticmethod
    def outside(name: str, shape: Sequence[int], kind: int, entries: dict[str, str]) -> bytes:
        fields = [number(1, size) for size in shape]
        fields += [blob(13, message(blob(1, key), blob(2, text))) for key, text in entries.items()]
        return message(*fields, number(2, kind), blob(8, name), number(14, 1))


def node(
    op: str, inputs: Iterable[str], outputs: Iterable[str], domain: str = "", **attributes: Any
) -> bytes:
    fields = [blob(1, name) for name in inputs]
    fields += [blob(2, name) for name in outputs]
    fields += [blob(4, op), blob(7, domain)]
    first = next(iter(outputs), "")
    fields += [blob(3, f"/{first}/{op}")]
    return message(
        *fields, *(blob(5, attribute(name, value)) for name, value in attributes.items())
    )


def attribute(name: str, value: Any) -> bytes:
    fields = [blob(1, name)]
    if isinstance(value, float):
        fields += [real(2, value), number(20, 1)]
    elif isinstance(value, int):
        fields += [number(3, value), number(20, 2)]
    elif isinstance(value, str):
        fields += [blob(4, value), number(20, 3)]
    elif isinstance(value, np.ndarray):
        fields += [blob(5, tensor("", value)), number(20, 4)]
    else:
        fields += [*(number(8, item) for item in value), number(20, 7)]
    return message(*fields)


def value(name: str, kind: str, shape: Sequence[int | str]) -> bytes:
    """Return a ValueInfoProto. Names in the shape are symbolic sizes."""
    dims = [blob(1, number(1, size) if isinstance(size, int) else blob(2, size)) for size in shape]
    inner = message(number(1, NUMBERS[kind]), blob(2, message(*dims)))
    return message(blob(1, name), blob(2, blob(1, inner)))


def graph_of(
    nodes: Iterable[bytes],
    weights: Iterable[bytes],
    inputs: Iterable[bytes],
    outputs: Iterable[bytes],
) -> bytes:
    parts = ((1, nodes), (5, weights), (11, inputs), (12, outputs))
    return message(
        blob(2, "graph"), *(blob(field, item) for field, items in parts for item in items)
    )


def model(graph: bytes, *, opset: int = 21) -> bytes:
    opsets = [
        message(blob(1, ""), number(2, opset)),
        message(blob(1, "com.microsoft"), number(2, 1)),
    ]
    return message(
        number(1, 10), blob(2, "tests"), blob(7, graph), *(blob(8, item) for item in opsets)
    )


def damaged(file: bytes, rng: random.Random) -> bytes:
    """Return the file with some bytes changed, removed or inserted, or truncated."""
    found = bytearray(file)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(found))
        kind = rng.random()
        if kind < 0.7:
            found[at] = rng.randrange(256)
        elif kind < 0.8:
            del found[at : at + rng.randrange(1, 20)]
        elif kind < 0.9:
            found[at:at] = rng.randbytes(rng.randrange(1, 20))
        else:
            del found[at:]
            break
    return bytes(found)
