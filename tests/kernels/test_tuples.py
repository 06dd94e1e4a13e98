"""Rows of numbers that store NamedTuples: kernels read the fields that the host wrote."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvboost_edge.kernels.attention.call import AttentionCall, Job, RotationPointers
from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.quantized_kv.code_attend import CodedCall, CodedJob
from kvboost_edge.kernels.tuples import (
    addresses_of,
    load_i32_row,
    load_row,
    num_numbers,
    number_at,
    numbers_of,
)
from kvboost_edge.kernels.vectors import address_of


class Inner(NamedTuple):
    size: int
    factor: float


class Outer(NamedTuple):
    first: int
    inner: Inner
    last: int


class Call(NamedTuple):
    """The fields of `Outer` in another order, one of them an array."""

    last: int
    unused: int
    inner: Inner
    first: Any


@kernel
def read(row):
    outer = load_row(Outer, address_of(row))
    return outer.first, outer.inner.size, outer.inner.factor, outer.last


@kernel
def convert(call):
    outer = addresses_of(Outer, call)
    return outer.first, outer.inner.size, outer.inner.factor, outer.last


@kernel
def read_i32(row):
    outer = load_i32_row(Pair, address_of(row))
    return outer.high - outer.low


class Pair(NamedTuple):
    low: int
    high: int


def test_rows_round_trip():
    array = np.zeros(3, np.float32)
    for first, address in ((array, array.ctypes.data), (array[:0], 0), (-7, -7)):
        call = Call(last=-(2**60), unused=1, inner=Inner(5, -0.1), first=first)
        row = numbers_of(Outer, call)
        assert row.size == num_numbers(Outer) == 4
        assert read(row) == convert(call) == (address, 5, -0.1, -(2**60))


def test_fields_are_found_by_name():
    assert [
        number_at(Outer, path) for path in ("first", "inner", "inner.size", "inner.factor", "last")
    ] == [
        0,
        1,
        1,
        2,
        3,
    ]


def test_int32_rows_keep_signs():
    assert read_i32(np.array([-5, 3], np.int32)) == 8


def test_jobs_have_the_fields_of_their_calls():
    assert {*Job._fields, *RotationPointers._fields} == set(AttentionCall._fields)
    assert set(CodedJob._fields) == set(CodedCall._fields)
