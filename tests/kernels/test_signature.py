"""Arguments of compiled code that is called without Numba."""

import ctypes
from typing import NamedTuple

import numba
import numpy as np
import pytest
from numba.core import types

from kvboost_edge.errors import BackendUnavailable
from kvboost_edge.kernels.signature import (
    BOOL,
    FLOAT32,
    FLOAT64,
    INT64,
    NOTHING,
    Tuple,
    array,
    function_at,
    numba_type,
)


class Inner(NamedTuple):
    rows: object
    factor: float


class Outer(NamedTuple):
    first: int
    inner: Inner
    last: float


INNER = Tuple(Inner, (array("float32", 2), FLOAT32))
OUTER = Tuple(Outer, (INT64, INNER, FLOAT64))
ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)


def compiled(function, kinds):
    """Compile a function with Numba's calling convention. Return its dispatcher and its address."""
    dispatcher = numba.njit(function)
    arguments = tuple(map(numba_type, kinds))
    dispatcher.compile(arguments)
    result = dispatcher.overloads[arguments]
    return dispatcher, result.library.get_pointer_to_function(result.fndesc.llvm_func_name)


def total(outer, more):
    found = float(outer.first) + outer.last
    for row in range(outer.inner.rows.shape[0]):
        for column in range(outer.inner.rows.shape[1]):
            found += outer.inner.factor * outer.inner.rows[row, column]
    return found * more[0]


def test_nested_tuples_and_arrays_are_passed():
    kinds = (OUTER, array("int64"))
    dispatcher, address = compiled(total, kinds)
    values = (Outer(5, Inner(ROWS, np.float32(0.5)), 2.25), np.array([3], dtype=np.int64))
    assert function_at(address, "total", kinds, FLOAT64)(values) == (True, dispatcher(*values))


@pytest.mark.parametrize(
    ("function", "kinds", "returns", "values", "result"),
    [
        (lambda x: x > 3, (INT64,), BOOL, (4,), True),
        (lambda x: x > 3, (INT64,), BOOL, (np.int64(3),), False),
        (lambda x: x - 7, (INT64,), INT64, (2,), -5),
        (lambda x: (x, 2 * x), (FLOAT64,), Tuple(tuple, (FLOAT64, FLOAT64)), (1.5,), (1.5, 3.0)),
    ],
)
def test_results_are_returned(function, kinds, returns, values, result):
    _, address = compiled(function, kinds)
    assert function_at(address, "f", kinds, returns)(values) == (True, result)


def fill(out, value):
    for index in range(out.size):
        out[index] = value


@pytest.mark.parametrize(
    "out",
    [
        np.zeros(4, dtype=np.float64),
        np.zeros((2, 2), dtype=np.float32),
        np.zeros(8, dtype=np.float32)[::2],
        [0.0] * 4,
        None,
    ],
)
def test_mismatched_types_are_not_called(out):
    kinds = (array("float32"), FLOAT32)
    _, address = compiled(fill, kinds)
    call = function_at(address, "fill", kinds, NOTHING)
    before = None if out is None else np.array(out)
    assert call((out, 1.0)) == (False, None)
    assert out is None or np.array_equal(out, before)
    assert call((np.zeros(4, dtype=np.float32),)) == (False, None)


def test_arrays_are_written():
    kinds = (array("float32"), FLOAT32)
    _, address = compiled(fill, kinds)
    out = np.zeros(4, dtype=np.float32)
    assert function_at(address, "fill", kinds, NOTHING)((out, 1.5)) == (True, None)
    assert out.tolist() == [1.5] * 4


def test_a_failure_status_raises():
    failing = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)(lambda *_: 1)
    address = ctypes.cast(failing, ctypes.c_void_p).value
    with pytest.raises(BackendUnavailable, match="the kernel broken ended with status 1"):
        function_at(address, "broken", (), NOTHING)(())


def test_types_equal_numbas():
    assert numba_type(array("uint8", 2)) == types.Array(types.uint8, 2, "C")
    assert numba_type(BOOL) == types.boolean
    kind = numba_type(OUTER)
    assert (kind.instance_class, next(iter(kind))) == (Outer, types.int64)
