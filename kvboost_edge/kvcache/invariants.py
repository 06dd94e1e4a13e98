"""Consistency checks that recompute the manager's tables, claims and chains from scratch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from kvboost_edge.errors import CacheCorruption
from kvboost_edge.kvcache.block_table import WHOLE, BlockTable
from kvboost_edge.kvcache.hashing import TOKEN_BYTES, HashFn
from kvboost_edge.kvcache.prefix_index import ROOT_SERIAL, PrefixIndex
from kvboost_edge.kvcache.table_spans import own_blocks

__all__ = ["check_chains", "check_tables"]


def check_tables(
    tables: Sequence[BlockTable],
    live: Mapping[int, BlockTable],
    in_flight: Mapping[bytes, int],
    block_size: int,
) -> None:
    """Check that `tables` are exactly the live tables, and that they are consistent.

    Args:
        tables: the tables to check.
        live: live tables of the manager, by serial.
        in_flight: claims of the manager: prefix hash -> serial of the claiming table.
        block_size: tokens per block.

    Raises:
        CacheCorruption: a check failed.
    """
    if {id(table) for table in tables} != {id(table) for table in live.values()} or len(
        tables
    ) != len(live):
        raise CacheCorruption(
            f"{len(live)} tables are live, but {len(tables)} were passed to the check"
        )
    claims: dict[bytes, int] = {}
    for table in tables:
        own = [*own_blocks(table, block_size).values(), *table.reserve]
        shared = {block_id for span in table.spans for block_id in span.block_ids}
        if len(set(own)) != len(own) or not shared.isdisjoint(
            own[table.num_cached_tokens // block_size :]
        ):
            raise CacheCorruption(
                f"a table lists a block twice: block_ids={table.block_ids}, reserve={table.reserve}"
            )
        if table.num_computed_tokens > table.num_slots(block_size):
            raise CacheCorruption(
                f"a table of {len(table.block_ids)} blocks has {table.num_computed_tokens} "
                "computed tokens, more than its blocks hold"
            )
        _check_segments(table, block_size)
        if table._num_hashed > len(table.block_ids):
            raise CacheCorruption(
                f"a table of {len(table.block_ids)} blocks has more hashed blocks than that: "
                f"{table._num_hashed}"
            )
        if any(index >= len(table.block_ids) for index in (*table._duplicates, *table._withdrawn)):
            raise CacheCorruption(
                f"a table of {len(table.block_ids)} blocks has a duplicate or rewritten block "
                "beyond its end"
            )
        claims.update(dict.fromkeys(table._claims.values(), table._serial))
    if claims != in_flight:
        raise CacheCorruption(
            f"{len(in_flight)} prefixes are in flight, but live tables claim {len(claims)}"
        )


def _check_segments(table: BlockTable, block_size: int) -> None:
    """Check that a table's segments are contiguous and stay within its blocks."""
    if not table.segments or table.segments[0] != WHOLE:
        raise CacheCorruption(
            f"a table begins with segments {table.segments[:1]}, but must begin with {WHOLE}"
        )
    for one, other in itertools.pairwise(table.segments):
        end = one.first_position + (other.first_index - one.first_index) * block_size
        if not (
            one.valid_from < other.valid_from <= end and other.first_position <= other.valid_from
        ):
            raise CacheCorruption(f"table segment {other} does not directly follow {one}")
    if table.segments[-1].first_index > len(table.block_ids):
        raise CacheCorruption(
            f"{table.segments[-1]} begins beyond the {len(table.block_ids)} blocks of its table"
        )


def check_chains(
    tables: Sequence[BlockTable], index: PrefixIndex, hash_fn: HashFn, block_size: int
) -> None:
    """Check the hashes of published blocks, and compare tables with the index.

    The hash of a block can be recomputed only if its parent is published too.

    Raises:
        CacheCorruption: a check failed.
    """
    num_bytes = block_size * TOKEN_BYTES
    entries = index.entries()
    by_serial = {entry.serial: entry for entry in entries.values()}
    for block_id, entry in entries.items():
        root = entry.tokens[:-num_bytes]
        tokens = entry.tokens[-num_bytes:]
        if len(tokens) != num_bytes or (root and entry.parent_serial != ROOT_SERIAL):
            raise CacheCorruption(
                f"block {block_id} is published with {len(entry.tokens)} bytes of tokens, not "
                f"{num_bytes}"
            )
        parent = by_serial.get(entry.parent_serial)
        parent_hash = root if entry.parent_serial == ROOT_SERIAL else parent and parent.prefix_hash
        if parent_hash is not None and hash_fn(parent_hash, tokens) != entry.prefix_hash:
            raise CacheCorruption(
                f"the prefix hash of published block {block_id} does not match its tokens"
            )
    for table in tables:
        if table._num_hashed:
            last = entries.get(table.block_ids[table._num_hashed - 1])
            if last is not None and last.serial != table._chain_serial:
                raise CacheCorruption(
                    f"the last chained block of a table has serial {last.serial}, but the table "
                    f"recorded {table._chain_serial}"
                )
        for block_index in table._withdrawn:
            if table.block_ids[block_index] in entries:
                raise CacheCorruption(
                    f"block {table.block_ids[block_index]} is being rewritten but is still "
                    "published"
                )
