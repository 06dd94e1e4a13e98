"""The scan: a rolling hash finds blocks whose tokens stand in the prompt; comparing tokens decides and extends.

Its oracle compares every block at every place, see kernels/reference/spans.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types
from numba.core.types.containers import BaseTuple

from kvboost_edge.kernels.entry import Entry
from kvboost_edge.kernels.jit import intrinsic, kernel
from kvboost_edge.kernels.spans.table import HASH_BITS, MODULUS, MOST_TRIED, NONE, SpanSearch, SpanTables

__all__ = ["scan", "scan_entry"]

_I64, _I128 = ir.IntType(64), ir.IntType(128)


@intrinsic
def _multiply(typing: Any, x: Any, y: Any) -> Any:
    """x * y modulo MODULUS, of int64 in [0, MODULUS): the bits above the 61st count once more from the lowest on."""

    def codegen(context: Any, b: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        product = b.mul(*(b.zext(argument, _I128) for argument in arguments))
        modulus = ir.Constant(_I64, MODULUS)
        low = b.and_(b.trunc(product, _I64), modulus)
        total = b.add(low, b.trunc(b.lshr(product, ir.Constant(_I128, HASH_BITS)), _I64))
        return b.select(b.icmp_unsigned(">=", total, modulus), b.sub(total, modulus), total)

    return types.int64(types.int64, types.int64), codegen


@kernel
def _add(x: Any, y: Any) -> Any:
    """x + y modulo MODULUS, of two numbers below it."""
    total = x + y
    return total - MODULUS if total >= MODULUS else total


@kernel
def _hash_all(tables: SpanTables, search: SpanSearch) -> None:
    """Write the hash of every place where a whole block can stand."""
    size = tables.tokens.shape[1]
    if search.start + size > search.stop:
        return
    value = 0
    for place in range(search.start, search.start + size):
        value = _add(_multiply(value, tables.base), np.int64(search.tokens[place]))
    search.hashes[search.start] = value & tables.hash_mask
    for place in range(search.start, search.stop - size):
        gone = _multiply(np.int64(search.tokens[place]), tables.last_power)
        value = _add(value, MODULUS - gone)
        value = _add(_multiply(value, tables.base), np.int64(search.tokens[place + size]))
        search.hashes[place + 1] = value & tables.hash_mask


@kernel
def _num_same(tables: SpanTables, search: SpanSearch, block: int, place: int) -> Any:
    """Tokens from the first of the block on that stand in the prompt from `place` on."""
    most = min(tables.tokens.shape[1], search.stop - place)
    count = 0
    while count < most and tables.tokens[block, count] == search.tokens[place + count]:
        count += 1
    return count


@kernel
def _newest(tables: SpanTables, search: SpanSearch, place: int) -> Any:
    """Leader of the group whose tokens stand at `place`, where a whole block fits; NONE if there is no such group."""
    value = search.hashes[place]
    block = int(tables.heads[(value + search.root) & (tables.heads.size - 1)])
    while block != NONE:
        if tables.hashes[block] == value and tables.roots[block] == search.root:  # noqa: SIM102 (the costly test last)
            if _num_same(tables, search, block, place) == tables.tokens.shape[1]:
                return block
        block = int(tables.next_groups[block])
    return block


@kernel
def _child(tables: SpanTables, search: SpanSearch, block: int, place: int) -> Any:
    """(the block after `block` that the prompt goes on with from `place`, how many of its tokens); (NONE, 0) if none.

    Of more children than are tried one may still go on whole: it is then among the blocks with the prompt's tokens.
    """
    size = tables.tokens.shape[1]
    best, most = NONE, 0
    child = int(tables.first_children[block])
    for _ in range(MOST_TRIED):
        if child == NONE or most == size:
            return best, most
        count = _num_same(tables, search, child, place)
        if count > most:
            best, most = child, count
        child = int(tables.older_siblings[child])
    if most < size and child != NONE and place + size <= search.stop:
        other = _newest(tables, search, place)
        for _ in range(MOST_TRIED):
            if other == NONE:
                break
            if tables.parents[other] == block:
                return other, size
            other = int(tables.older[other])
    return best, most


@kernel
def _reach_back(tables: SpanTables, search: SpanSearch, floor: int, place: int, block: int) -> Any:
    """(first token of the run, how many blocks before `block` it touches), of a run with `block` at `place`."""
    size = tables.tokens.shape[1]
    count = 0
    parent = int(tables.parents[block])
    while parent != NONE:
        left = size
        while left > 0 and place > floor and tables.tokens[parent, left - 1] == search.tokens[place - 1]:
            left -= 1
            place -= 1
        count += left < size
        if left > 0:
            break
        parent = int(tables.parents[parent])
    return place, count


@kernel
def _reach_on(
    tables: SpanTables, search: SpanSearch, place: int, block: int, path: npt.NDArray[np.int32], used: int
) -> Any:
    """(end of the run, end of its path) of a run with `block` at `place`; its blocks from `block` on go to path[used]
    and after."""
    size = tables.tokens.shape[1]
    count = size
    while block != NONE:
        path[used] = block
        used += 1
        place += count
        if count < size:
            break
        block, count = _child(tables, search, block, place)
    return place, used


@kernel
def scan(tables: SpanTables, search: SpanSearch, runs: npt.NDArray[np.int64], path: npt.NDArray[np.int32]) -> int:
    """Find runs from left to right and return how many. What was found at one place is as long as it gets, and never
    looked at again.

    runs  int64 [most, NUM_FIELDS], written; most >= (stop - start) // max(min_tokens, block_size)
    path  int32, written: block ids of all runs, one run after another; at least
          (stop - start) // block_size + 2 * (most + 1) of them

    Block ids in the tables are trusted.
    """
    _hash_all(tables, search)
    size = tables.tokens.shape[1]
    floor = place = search.start
    num_runs = used = 0
    while place + size <= search.stop:
        best, first, end, context = NONE, place, place, 0
        block = _newest(tables, search, place)
        for _ in range(MOST_TRIED):
            if block == NONE:
                break
            begin, _ = _reach_back(tables, search, floor, place, block)
            stop, _ = _reach_on(tables, search, place, block, path, used)
            stored = tables.first_positions[block] - (place - begin)
            if stop - begin > end - first or (stop - begin == end - first and stored > context):
                best, first, end, context = block, begin, stop, stored
            block = int(tables.older[block])
        if best == NONE or end - first < search.min_tokens:
            place += 1
            continue
        _, before = _reach_back(tables, search, floor, place, best)
        block = best
        for index in range(used + before - 1, used - 1, -1):
            block = int(tables.parents[block])
            path[index] = block
        _, stop_of_path = _reach_on(tables, search, place, best, path, used + before)
        runs[num_runs, 0], runs[num_runs, 1] = first, end - first
        runs[num_runs, 2], runs[num_runs, 3] = context, stop_of_path - used
        num_runs, used = num_runs + 1, stop_of_path
        floor = place = end
    return num_runs


def _type_of(kind: Any, **fields: Any) -> Any:
    return BaseTuple.from_types([fields.get(name, types.int64) for name in kind._fields], kind)


_LONGS, _INTS = types.int64[::1], types.int32[::1]
_LINKS = ("heads", "next_groups", "older", "parents", "first_children", "older_siblings")

scan_entry = Entry(
    scan,
    _type_of(
        SpanTables,
        tokens=types.uint32[:, ::1],
        hashes=_LONGS,
        roots=_LONGS,
        first_positions=_LONGS,
        **dict.fromkeys(_LINKS, _INTS),
    ),
    _type_of(SpanSearch, tokens=types.uint32[::1], hashes=_LONGS),
    types.int64[:, ::1],
    _INTS,
)
