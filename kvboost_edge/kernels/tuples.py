"""Rows of numbers that pass NamedTuples from the host to kernels through memory.

A row holds the fields in order, 8 bytes each. The fields of a nested tuple replace that tuple. An
int is stored as int64, a float as float64, and a `Float32` as float32 with 4 bytes of padding. An
array is stored as the address of its first element, or 0 if it is empty.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, get_type_hints

import numpy as np
import numpy.typing as npt
from llvmlite import ir

from kvboost_edge.kernels.jit import intrinsic
from kvboost_edge.kernels.lazy import types
from kvboost_edge.kernels.signature import FLOAT32, FLOAT64, INT64, Kind, Number, Tuple, numba_type
from kvboost_edge.kernels.vectors import F32, I32, I64, emit_load

__all__ = [
    "Float32",
    "addresses_of",
    "load_i32_row",
    "load_row",
    "num_numbers",
    "number_at",
    "numbers_kind",
    "numbers_of",
    "numbers_type",
]

Value = Any
Builder = Any
Float32 = Annotated[float, np.float32]
"""Annotation of a float that is stored as float32 in memory and in kernels."""

# Maps an annotation to (struct format, LLVM type, type).
_NUMBERS: dict[Any, tuple[str, ir.Type, Number]] = {
    int: ("q", I64, INT64),
    float: ("d", ir.DoubleType(), FLOAT64),
    Float32: ("f4x", F32, FLOAT32),
}


@cache
def _fields(kind: Any) -> dict[str, Any]:
    """Map field names to keys of `_NUMBERS` or NamedTuples; other annotations count as int."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        name: hint if hasattr(hint, "_fields") or hint in _NUMBERS else int
        for name, hint in hints.items()
    }


def num_numbers(kind: Any) -> int:
    """Return the length of a NamedTuple class's row in 8-byte numbers."""
    return sum(
        num_numbers(field) if hasattr(field, "_fields") else 1 for field in _fields(kind).values()
    )


def number_at(kind: Any, path: str) -> int:
    """Return the index of a field path such as "shape.head_dim" in a row of `kind`.

    For a nested tuple, this is the index of its first number.
    """
    name, _, rest = path.partition(".")
    fields = _fields(kind)
    before = 0
    for field in kind._fields[: kind._fields.index(name)]:
        before += num_numbers(fields[field]) if hasattr(fields[field], "_fields") else 1
    return before + (number_at(fields[name], rest) if rest else 0)


def numbers_of(kind: Any, values: Any) -> npt.NDArray[np.int64]:
    """Return a tuple with the fields of `kind` as a row, int64 [num_numbers(kind)]."""
    return np.frombuffer(struct.pack(_format(kind), *_flat(kind, values)), dtype=np.int64)


@cache
def _format(kind: Any) -> str:
    """Return the `struct` format of a row."""
    return "".join(
        _NUMBERS[field][0] if field in _NUMBERS else _format(field)
        for field in _fields(kind).values()
    )


def _flat(kind: Any, values: Any) -> list[int | float]:
    """Return the numbers and addresses of a row, with nested tuples flattened."""
    flat: list[int | float] = []
    for name, field in _fields(kind).items():
        value = getattr(values, name)
        if hasattr(field, "_fields"):
            flat += _flat(field, value)
        elif isinstance(value, np.ndarray):
            flat.append(value.__array_interface__["data"][0] if value.size else 0)
        else:
            flat.append(value)
    return flat


def numbers_kind(kind: Any) -> Kind:
    """Return the type of a NamedTuple class, or of one of its fields, as a kernel's argument."""
    if kind in _NUMBERS:
        return _NUMBERS[kind][2]
    return Tuple(kind, tuple(numbers_kind(field) for field in _fields(kind).values()))


def numbers_type(kind: Any) -> Any:
    """Return the Numba type of a NamedTuple class, or of one of its fields."""
    return numba_type(numbers_kind(kind))


def _load(context: Any, b: Builder, kind: Any, address: Value) -> Value:
    """Emit code that loads a tuple of class `kind`, or one of its fields, from a byte address."""
    if kind in _NUMBERS:
        return emit_load(b, _NUMBERS[kind][1], address)
    items = []
    for name, field in _fields(kind).items():
        place = b.add(address, ir.Constant(I64, 8 * number_at(kind, name)))
        items.append(_load(context, b, field, place))
    return context.make_tuple(b, numbers_type(kind), items)


@intrinsic
def load_row(typing: Any, kind: Any, address: Any) -> Any:
    """Load a tuple of class `kind` from a row at a byte address."""

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        return _load(context, b, kind.instance_class, arguments[1])

    return numbers_type(kind.instance_class)(kind, types.int64), codegen


@intrinsic
def load_i32_row(typing: Any, kind: Any, address: Any) -> Any:
    """Load a tuple of class `kind` from a row of int32 at a byte address; all fields are ints."""

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        places = [
            b.add(arguments[1], ir.Constant(I64, 4 * index))
            for index in range(len(kind.instance_class._fields))
        ]
        return context.make_tuple(
            b, signature.return_type, [b.sext(emit_load(b, I32, place), I64) for place in places]
        )

    return numbers_type(kind.instance_class)(kind, types.int64), codegen


@intrinsic
def addresses_of(typing: Any, kind: Any, values: Any) -> Any:
    """Convert a tuple with the fields of `kind` to `kind`; addresses replace its arrays."""

    def codegen(context: Any, b: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
        return _convert(context, b, kind.instance_class, values, arguments[1])

    return numbers_type(kind.instance_class)(kind, values), codegen


def _convert(context: Any, b: Builder, kind: Any, source: Any, value: Value) -> Value:
    names = source.instance_class._fields
    items = []
    for name, field in _fields(kind).items():
        index = names.index(name)
        item = b.extract_value(value, index)
        item_type = source.types[index]
        if hasattr(field, "_fields"):
            items.append(_convert(context, b, field, item_type, item))
        elif isinstance(item_type, types.Array):
            array = context.make_array(item_type)(context, b, item)
            is_empty = b.icmp_signed("==", array.nitems, ir.Constant(I64, 0))
            items.append(b.select(is_empty, ir.Constant(I64, 0), b.ptrtoint(array.data, I64)))
        else:
            items.append(context.cast(b, item, item_type, numbers_type(field)))
    return context.make_tuple(b, numbers_type(kind), items)
