"""Span search: finds runs of prompt tokens that cached blocks hold, at any position.

A rolling hash (Rabin-Karp, modulo 2^61 - 1) finds candidate blocks. Comparing tokens then confirms
and extends them. The oracle, reference/span_scan.py, compares every block at every position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir

from kvboost_edge.kernels.entry import KernelEntry
from kvboost_edge.kernels.jit import intrinsic, kernel
from kvboost_edge.kernels.lazy import types
from kvboost_edge.kernels.signature import INT64, Tuple, array
from kvboost_edge.kernels.span_tables import (
    HASH_BITS,
    MODULUS,
    MOST_TRIED,
    NONE,
    SpanSearch,
    SpanTables,
)
from kvboost_edge.kernels.tuples import addresses_of
from kvboost_edge.kernels.vectors import load_i32, load_i64, store_i64

__all__ = ["scan", "scan_entry"]

_I64 = ir.IntType(64)
_I128 = ir.IntType(128)


@intrinsic
def _multiply(typing: Any, x: Any, y: Any) -> Any:
    """Return x * y modulo MODULUS for int64 in [0, MODULUS)."""

    def codegen(context: Any, b: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        # 2^61 = 1 modulo MODULUS, so the bits above the lowest 61 are added to the lowest 61.
        product = b.mul(*(b.zext(argument, _I128) for argument in arguments))
        modulus = ir.Constant(_I64, MODULUS)
        low = b.and_(b.trunc(product, _I64), modulus)
        total = b.add(low, b.trunc(b.lshr(product, ir.Constant(_I128, HASH_BITS)), _I64))
        return b.select(b.icmp_unsigned(">=", total, modulus), b.sub(total, modulus), total)

    return types.int64(types.int64, types.int64), codegen


@kernel
def _add(x: Any, y: Any) -> Any:
    """Return x + y modulo MODULUS for two numbers below it."""
    total = x + y
    return total - MODULUS if total >= MODULUS else total


@kernel
def _token(search: SpanSearch, place: int) -> Any:
    """Return the prompt token at an index, in [0, 2^32)."""
    return load_i32(search.tokens + 4 * place) & 0xFFFFFFFF


@kernel
def _link(links: Any, block: int) -> Any:
    """Return the link of a block: an element of one of the arrays of links."""
    return load_i32(links + 4 * block)


@kernel
def _hash_all(tables: SpanTables, search: SpanSearch) -> None:
    """Compute the hash of the block_size tokens at every index where a whole block fits."""
    size = tables.block_size
    if search.start + size > search.stop:
        return
    value = 0
    for place in range(search.start, search.start + size):
        value = _add(_multiply(value, tables.base), _token(search, place))
    store_i64(search.hashes + 8 * search.start, value & tables.hash_mask)
    for place in range(search.start, search.stop - size):
        value = _add(value, MODULUS - _multiply(_token(search, place), tables.last_power))
        value = _add(_multiply(value, tables.base), _token(search, place + size))
        store_i64(search.hashes + 8 * (place + 1), value & tables.hash_mask)


@kernel
def _num_same(tables: SpanTables, search: SpanSearch, block: int, place: int) -> Any:
    """Return how many leading tokens of the block equal the prompt's tokens from `place` on."""
    most = min(tables.block_size, search.stop - place)
    held = tables.tokens + 4 * block * tables.block_size
    wanted = search.tokens + 4 * place
    count = 0
    while count < most and load_i32(held + 4 * count) == load_i32(wanted + 4 * count):
        count += 1
    return count


@kernel
def _newest(tables: SpanTables, search: SpanSearch, place: int) -> Any:
    """Return the newest block that holds the prompt's tokens at `place`, or NONE.

    A whole block must fit at `place`. The result is the leader of a group; see `SpanTables`.
    """
    value = load_i64(search.hashes + 8 * place)
    block = _link(tables.heads, (value + search.root) & tables.slot_mask)
    while block != NONE:
        may_be = (
            load_i64(tables.hashes + 8 * block) == value
            and load_i64(tables.roots + 8 * block) == search.root
        )
        if may_be and _num_same(tables, search, block, place) == tables.block_size:
            return block
        block = _link(tables.next_groups, block)
    return block


@kernel
def _child(tables: SpanTables, search: SpanSearch, block: int, place: int) -> Any:
    """Return (child, tokens) for the child of `block` with the longest match at `place`.

    Returns (NONE, 0) if no child matches.
    """
    size = tables.block_size
    best = NONE
    most = 0
    child = _link(tables.first_children, block)
    for _ in range(MOST_TRIED):
        if child == NONE or most == size:
            return best, most
        count = _num_same(tables, search, child, place)
        if count > most:
            best = child
            most = count
        child = _link(tables.older_siblings, child)
    # At most MOST_TRIED children are compared. If the block has more, one of the others may still
    # match in full. The group of blocks with the prompt's tokens then contains it.
    if most < size and child != NONE and place + size <= search.stop:
        other = _newest(tables, search, place)
        for _ in range(MOST_TRIED):
            if other == NONE:
                break
            if _link(tables.parents, other) == block:
                return other, size
            other = _link(tables.older, other)
    return best, most


@kernel
def _reach_back(tables: SpanTables, search: SpanSearch, floor: int, place: int, block: int) -> Any:
    """Extend a run backwards from `block` at `place`.

    Returns:
        (index of the run's first token, number of blocks before `block` that the run touches).
    """
    size = tables.block_size
    count = 0
    parent = _link(tables.parents, block)
    while parent != NONE:
        end = tables.tokens + 4 * (parent + 1) * size
        most = min(size, place - floor)
        same = 0
        while same < most and load_i32(end - 4 * (same + 1)) == load_i32(
            search.tokens + 4 * (place - same - 1)
        ):
            same += 1
        place -= same
        count += same > 0
        if same < size:
            break
        parent = _link(tables.parents, parent)
    return place, count


@kernel
def _reach_on(tables: SpanTables, search: SpanSearch, place: int, block: int) -> Any:
    """Extend a run forwards from `block` at `place` and return its end."""
    count = tables.block_size
    while block != NONE:
        place += count
        if count < tables.block_size:
            break
        block, count = _child(tables, search, block, place)
    return place


@kernel
def _longest(tables: SpanTables, search: SpanSearch, floor: int, place: int) -> Any:
    """Return the longest run at `place`; among equal runs, the one stored at the highest position.

    Returns:
        (block at `place`, first index, end, stored position of the first token). The block is NONE
        if
            no block matches.
    """
    best = NONE
    first = place
    end = place
    context = 0
    block = _newest(tables, search, place)
    for _ in range(MOST_TRIED):
        if block == NONE:
            break
        begin, _ = _reach_back(tables, search, floor, place, block)
        stop = _reach_on(tables, search, place, block)
        stored = load_i64(tables.first_positions + 8 * block) - (place - begin)
        if stop - begin > end - first or (stop - begin == end - first and stored > context):
            best = block
            first = begin
            end = stop
            context = stored
        block = _link(tables.older, block)
    return best, first, end, context


@kernel
def scan(
    tables: SpanTables, search: SpanSearch, runs: npt.NDArray[np.int64], path: npt.NDArray[np.int32]
) -> int:
    """Find runs from left to right and return the number of runs.

    The scan is greedy: each run is extended as far as possible and never revised. The time does not
    grow with the number of cached blocks. A token outside all runs costs at most about MOST_TRIED *
    (min_tokens + MOST_TRIED * block_size) comparisons. A prompt of 10,000 tokens takes 0.3 to 1 ms,
    an adversarial one 9 ms.

    Args:
        tables: the cached blocks. Block ids are not checked.
        search: the prompt.
        runs: int64 [most, NUM_FIELDS], written; most >= (stop - start) // max(min_tokens,
            block_size).
        path: int32 [n], written: block ids of all runs, one run after another; n >= (stop - start)
            // block_size + 2 * most.
    """
    # Use addresses instead of arrays, because taking an array out of a tuple updates its reference
    # count. For a prompt of 10,000 equal tokens and 600 cached blocks of that token, arrays take 24
    # ms and addresses 1.3 ms.
    held = addresses_of(SpanTables, tables)
    wanted = addresses_of(SpanSearch, search)
    _hash_all(held, wanted)
    floor = place = search.start
    num_runs = used = 0
    while place + held.block_size <= search.stop:
        best, first, end, context = _longest(held, wanted, floor, place)
        if best == NONE or end - first < search.min_tokens:
            place += 1
            continue
        _, before = _reach_back(held, wanted, floor, place, best)
        block = best
        for index in range(used + before - 1, used - 1, -1):
            block = _link(held.parents, block)
            path[index] = block
        begin_of_path = used
        used = used + before
        block = best
        while place < end:
            path[used] = block
            used = used + 1
            place = place + held.block_size
            block, _ = _child(held, wanted, block, min(place, end))
        runs[num_runs, 0] = first
        runs[num_runs, 1] = end - first
        runs[num_runs, 2] = context
        runs[num_runs, 3] = used - begin_of_path
        num_runs += 1
        floor = place = end
    return num_runs


def _type_of(kind: Any, **fields: Any) -> Tuple:
    return Tuple(kind, tuple(fields.get(name, INT64) for name in kind._fields))


_LONGS = array("int64")
_INTS = array("int32")
_LINKS = ("heads", "next_groups", "older", "parents", "first_children", "older_siblings")

scan_entry = KernelEntry(
    scan,
    _type_of(
        SpanTables,
        tokens=array("uint32", 2),
        hashes=_LONGS,
        roots=_LONGS,
        first_positions=_LONGS,
        **dict.fromkeys(_LINKS, _INTS),
    ),
    _type_of(SpanSearch, tokens=array("uint32"), hashes=_LONGS),
    array("int64", 2),
    _INTS,
    returns=INT64,
)
