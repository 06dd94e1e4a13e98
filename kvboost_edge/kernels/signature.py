"""Types of arguments and results of compiled kernels, in Numba and in C.

A kernel library is called without Numba. Its functions have Numba's calling convention: a pointer
to the result, a pointer to an exception, then the arguments, where tuples and arrays are replaced
by their parts. The return value is a status.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvboost_edge.errors import BackendUnavailable
from kvboost_edge.kernels.lazy import types

__all__ = [
    "BOOL",
    "FLOAT32",
    "FLOAT64",
    "INT64",
    "NOTHING",
    "Array",
    "Kind",
    "Number",
    "Tuple",
    "array",
    "function_at",
    "numba_type",
]


class Number(NamedTuple):
    """A scalar.

    Attributes:
        name: name of the type in Numba.
    """

    name: str


class Array(NamedTuple):
    """A C-contiguous array.

    Attributes:
        name: NumPy dtype.
        ndim: number of dimensions.
    """

    name: str
    ndim: int


class Tuple(NamedTuple):
    """A tuple or NamedTuple.

    Attributes:
        kind: class of the tuple.
        items: types of its items.
    """

    kind: Any
    items: tuple[Kind, ...]


Kind = Number | Array | Tuple

BOOL = Number("boolean")
FLOAT32 = Number("float32")
FLOAT64 = Number("float64")
INT64 = Number("int64")
NOTHING = Number("none")

_C_TYPES: dict[str, Any] = {
    "boolean": ctypes.c_uint8,
    "float32": ctypes.c_float,
    "float64": ctypes.c_double,
    "int64": ctypes.c_int64,
}
_OK = (0, -2)  # Numba's status of a result and of None
_dtype = functools.cache(np.dtype)


def array(name: str, ndim: int = 1) -> Array:
    """Return the type of a C-contiguous array."""
    return Array(name, ndim)


@functools.cache
def numba_type(kind: Kind) -> Any:
    """Return Numba's type."""
    if isinstance(kind, Number):
        return getattr(types, kind.name)
    if isinstance(kind, Array):
        return types.Array(getattr(types, kind.name), kind.ndim, "C")
    return types.BaseTuple.from_types([numba_type(item) for item in kind.items], kind.kind)


def _c_types(kind: Kind) -> list[Any]:
    """Return the C types of the parts of an argument."""
    if isinstance(kind, Number):
        return [_C_TYPES[kind.name]]
    if isinstance(kind, Array):
        # owner, parent, number of items, bytes per item, data, shape, strides
        pointers = [ctypes.c_void_p] * 2
        sizes = [ctypes.c_int64] * 2
        return [*pointers, *sizes, ctypes.c_void_p, *[ctypes.c_int64] * (2 * kind.ndim)]
    return [part for item in kind.items for part in _c_types(item)]


def _add_parts(kind: Kind, value: Any, parts: list[Any]) -> bool:
    """Append the parts of an argument; return False if it has another type."""
    if isinstance(kind, Number):
        parts.append(float(value) if kind in (FLOAT32, FLOAT64) else int(value))
        return True
    if isinstance(kind, Array):
        if (
            not isinstance(value, np.ndarray)
            or value.dtype != _dtype(kind.name)
            or value.ndim != kind.ndim
            or not value.flags.c_contiguous
        ):
            return False
        place = value.__array_interface__["data"][0]
        parts += (None, None, value.size, value.itemsize, place, *value.shape, *value.strides)
        return True
    return all(_add_parts(item, one, parts) for item, one in zip(kind.items, value, strict=True))


def _result_type(kind: Kind) -> Any:
    if isinstance(kind, Tuple):
        return _C_TYPES[kind.items[0].name] * len(kind.items)  # type: ignore[union-attr]
    return ctypes.c_int64 if kind == NOTHING else _C_TYPES[kind.name]


def function_at(
    address: int, name: str, arguments: Sequence[Kind], returns: Kind
) -> Callable[[tuple[Any, ...]], tuple[bool, Any]]:
    """Return a Python function that calls compiled code without the GIL.

    The function takes a tuple of arguments. It returns whether their types match, and the result.
    If they do not match, nothing is called.

    Args:
        address: address of the code.
        name: name of the kernel, for errors.
        arguments: types of the arguments.
        returns: type of the result: a number, or a tuple of equal numbers.
    """
    kinds = [part for kind in arguments for part in _c_types(kind)]
    pointers = [ctypes.c_void_p, ctypes.c_void_p]
    call = ctypes.CFUNCTYPE(ctypes.c_int32, *pointers, *kinds)(address)
    result_type = _result_type(returns)

    def function(values: tuple[Any, ...]) -> tuple[bool, Any]:
        result = result_type()
        problem = ctypes.c_void_p()
        parts: list[Any] = [ctypes.addressof(result), ctypes.addressof(problem)]
        if len(values) != len(arguments):
            return False, None
        for kind, value in zip(arguments, values, strict=True):
            if not _add_parts(kind, value, parts):
                return False, None
        status = call(*parts)
        if status not in _OK:
            raise BackendUnavailable(f"the kernel {name} ended with status {status}; report this")
        if returns == NOTHING:
            return True, None
        if returns == BOOL:
            return True, bool(result.value)
        return True, tuple(result) if isinstance(returns, Tuple) else result.value

    return function
