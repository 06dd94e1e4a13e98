"""Span index: finds blocks by their own tokens, regardless of the tokens before them."""

from __future__ import annotations

import operator
import secrets
from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import CacheCorruption, ConfigError
from kvboost_edge.kernels.span_tables import HASH_BITS, MODULUS, NONE, SpanTables
from kvboost_edge.kvcache.block_table import PrefixEntry
from kvboost_edge.kvcache.hashing import TOKEN_BYTES, LoneRoot
from kvboost_edge.kvcache.prefix_index import ROOT_SERIAL

__all__ = ["SpanIndex"]

Ints = npt.NDArray[np.int32]


class SpanIndex:
    """Index of blocks by span hash, which is the hash of a block's own tokens only.

    Between `offer` and `withdraw`, a block must hold the KV of exactly these tokens, computed at
    these positions and after the chain identified by its serial. Offer the blocks of a
    `PrefixIndex`, and withdraw a block before it is reused or rewritten. A block may be offered
    before its parent. A block may also be withdrawn and offered again while its children stay.

    Lookups only find blocks of their own root. Of several blocks with equal tokens, only the
    MOST_TRIED newest are tried, so repeated text does not slow down a search. The newest ones are
    also evicted last. Older blocks stay indexed, and take the place of withdrawn ones. They can
    also be reached through their neighbours in a chain.

    The index is not thread-safe. It takes about 130 bytes per block of 16 tokens.

    Args:
        num_blocks: number of blocks in the pool.
        block_size: tokens per block.
        hash_bits: number of bits to use of a span hash, 1 to 61. Fewer bits cause more collisions,
            which cost time but do not change results.
    """

    def __init__(self, num_blocks: int, block_size: int, *, hash_bits: int = HASH_BITS) -> None:
        _check_number("num_blocks", num_blocks)
        _check_number("block_size", block_size)
        if not 1 <= hash_bits <= HASH_BITS:
            raise ConfigError(f"hash_bits={hash_bits!r} must be between 1 and {HASH_BITS}")
        base = 2**32 + secrets.randbelow(MODULUS - 2**32)
        self._powers = tuple(
            pow(base, block_size - 1 - index, MODULUS) for index in range(block_size)
        )
        self.num_blocks = num_blocks
        self.block_size = block_size
        num_slots = 1 << (2 * num_blocks - 1).bit_length()
        self._tables = SpanTables(
            tokens=np.zeros((num_blocks, block_size), dtype=np.uint32),
            hashes=np.zeros(num_blocks, dtype=np.int64),
            roots=np.zeros(num_blocks, dtype=np.int64),
            first_positions=np.zeros(num_blocks, dtype=np.int64),
            heads=_links(num_slots),
            next_groups=_links(num_blocks),
            older=_links(num_blocks),
            parents=_links(num_blocks),
            first_children=_links(num_blocks),
            older_siblings=_links(num_blocks),
            block_size=block_size,
            slot_mask=num_slots - 1,
            base=base,
            last_power=self._powers[0],
            hash_mask=(1 << hash_bits) - 1,
        )
        self._newer = _links(num_blocks)
        self._newer_siblings = _links(num_blocks)
        # (serial, parent serial, root) of each offered block, by block id.
        self._offered: list[tuple[int, int, bytes] | None] = [None] * num_blocks
        self._by_serial: dict[int, int] = {}
        # Serial of a block that is not offered -> its newest offered child.
        self._orphans: dict[int, int] = {}
        # Root -> [number of the root, count of its offered blocks]. Numbers are never reused.
        self._roots: dict[bytes, list[int]] = {}
        self._next_root = 0

    @property
    def tables(self) -> SpanTables:
        """Arrays that the search kernel reads, valid until the index changes."""
        return self._tables

    def root_number(self, root: bytes) -> int | None:
        """Return the number of a root in `tables`, or None if none of its blocks is offered."""
        known = self._roots.get(root)
        return None if known is None else known[0]

    def __len__(self) -> int:
        """Return the number of offered blocks."""
        return len(self._by_serial)

    def __contains__(self, block_id: object) -> bool:
        """Return whether a block is offered."""
        return (
            isinstance(block_id, int)
            and 0 <= block_id < self.num_blocks
            and self._offered[block_id] is not None
        )

    def offer(
        self,
        root: bytes,
        block_id: int,
        serial: int,
        parent_serial: int,
        tokens: bytes,
        first_position: int,
    ) -> None:
        """Add a full block to the index.

        Args:
            root: root that the block belongs to.
            block_id: id of the block, in [0, num_blocks).
            serial: `PrefixEntry.serial` of the block, at least 1. It identifies the block and all
                blocks before it. A block that is offered again must have the same serial.
            parent_serial: serial of the previous block, or ROOT_SERIAL for the first block of a
                chain. It must be lower than `serial`, but its block need not be offered. Two blocks
                of a root must not have the same parent and tokens.
            tokens: the block's own tokens, little-endian u32.
            first_position: position at which the block's first token was computed, which is also
                the number of tokens before it.

        Raises:
            CacheCorruption: the block or serial is already offered, an argument is out of range, or
                the block does not fit its parent or a child. The index is unchanged.
        """
        self._check_offer(root, block_id, serial, parent_serial, tokens, first_position)
        tables = self._tables
        row = np.frombuffer(tokens, dtype="<u4")
        tables.tokens[block_id] = row
        tables.hashes[block_id] = (
            sum(map(operator.mul, row.tolist(), self._powers)) % MODULUS & tables.hash_mask
        )
        tables.first_positions[block_id] = first_position
        counted = self._roots.setdefault(root, [self._next_root, 0])
        self._next_root += counted[1] == 0
        counted[1] += 1
        tables.roots[block_id] = counted[0]
        self._offered[block_id] = serial, parent_serial, root
        self._by_serial[serial] = block_id
        self._lead(block_id)
        self._join(block_id, serial, parent_serial)

    def offer_entry(self, block_id: int, entry: PrefixEntry) -> None:
        """Add a published block, unless it is a hidden block, which only provides context."""
        if not isinstance(entry.root, LoneRoot):
            self.offer(
                entry.root,
                block_id,
                entry.serial,
                entry.parent_serial,
                entry.own_tokens,
                entry.depth * self.block_size,
            )

    def withdraw(self, block_id: int) -> None:
        """Remove a block from the index.

        Raises:
            CacheCorruption: the block is not offered.
        """
        offered = self._offered[block_id] if block_id in self else None
        if offered is None:
            raise CacheCorruption(f"block {block_id} is not in the span index")
        serial, parent_serial, root = offered
        self._leave_group(block_id)
        self._leave_family(block_id, serial, parent_serial)
        self._offered[block_id] = None
        del self._by_serial[serial]
        counted = self._roots[root]
        counted[1] -= 1
        if not counted[1]:
            del self._roots[root]

    def _check_offer(
        self,
        root: bytes,
        block_id: int,
        serial: int,
        parent_serial: int,
        tokens: bytes,
        first_position: int,
    ) -> None:
        if not 0 <= block_id < self.num_blocks:
            raise CacheCorruption(
                f"stale block id {block_id}: the index has blocks 0 .. {self.num_blocks - 1}"
            )
        if block_id in self or serial in self._by_serial:
            raise CacheCorruption(
                f"block {block_id} or serial {serial} is already in the span index; withdraw it "
                "first"
            )
        if len(tokens) != self.block_size * TOKEN_BYTES or first_position < 0:
            raise CacheCorruption(
                f"block {block_id} must have {self.block_size} tokens and a position of at least "
                f"0, not {len(tokens)} bytes of tokens at position {first_position}"
            )
        if not ROOT_SERIAL <= parent_serial < serial:
            raise CacheCorruption(
                f"serial {serial} must be greater than its parent's serial {parent_serial}"
            )
        kin = [(self._by_serial.get(parent_serial, NONE), -self.block_size)]
        kin.append((self._orphans.get(serial, NONE), self.block_size))
        for other, distance in kin:
            known = None if other == NONE else self._offered[other]
            if known and (
                known[2] != root or self._tables.first_positions[other] != first_position + distance
            ):
                raise CacheCorruption(
                    f"block {block_id} at position {first_position} does not adjoin block {other} "
                    f"at position {self._tables.first_positions[other]}"
                )

    def _slot(self, block_id: int) -> int:
        tables = self._tables
        return (int(tables.hashes[block_id]) + int(tables.roots[block_id])) & tables.slot_mask

    def _leader_before(self, block_id: int) -> tuple[int, int]:
        """Return the leader of a block's group, and the group leader linked before it.

        A group is the blocks of one root with equal tokens, led by the newest. A missing leader is
        reported as NONE.
        """
        tables = self._tables
        value = tables.hashes[block_id]
        root = tables.roots[block_id]
        tokens = tables.tokens[block_id].tobytes()
        before = NONE
        leader = int(tables.heads[self._slot(block_id)])
        while leader != NONE:
            equal = tables.hashes[leader] == value and tables.roots[leader] == root
            if equal and tables.tokens[leader].tobytes() == tokens:
                break
            before = leader
            leader = int(tables.next_groups[leader])
        return leader, before

    def _relink(self, block_id: int, before: int, to: int) -> None:
        """Replace the group of `block_id` with `to` in its linked list."""
        if before == NONE:
            self._tables.heads[self._slot(block_id)] = to
        else:
            self._tables.next_groups[before] = to

    def _lead(self, block_id: int) -> None:
        """Make a newly offered block the leader of its group."""
        tables = self._tables
        slot = self._slot(block_id)
        leader, before = self._leader_before(block_id)
        tables.older[block_id] = leader
        self._newer[block_id] = NONE
        if leader == NONE:
            tables.next_groups[block_id] = tables.heads[slot]
            tables.heads[slot] = block_id
        else:
            self._newer[leader] = block_id
            tables.next_groups[block_id] = tables.next_groups[leader]
            self._relink(block_id, before, block_id)

    def _leave_group(self, block_id: int) -> None:
        tables = self._tables
        newer = int(self._newer[block_id])
        older = int(tables.older[block_id])
        if older != NONE:
            self._newer[older] = newer
        if newer != NONE:
            tables.older[newer] = older
            return
        _, before = self._leader_before(block_id)
        if older == NONE:
            self._relink(block_id, before, int(tables.next_groups[block_id]))
        else:
            tables.next_groups[older] = tables.next_groups[block_id]
            self._relink(block_id, before, older)

    def _join(self, block_id: int, serial: int, parent_serial: int) -> None:
        """Link a newly offered block with its parent, siblings and children."""
        tables = self._tables
        self._set_parent(self._orphans.get(serial, NONE), block_id)
        tables.first_children[block_id] = self._orphans.pop(serial, NONE)
        parent = self._by_serial.get(parent_serial, NONE)
        tables.parents[block_id] = parent
        self._newer_siblings[block_id] = tables.older_siblings[block_id] = NONE
        if parent_serial == ROOT_SERIAL:
            return
        sibling = (
            self._orphans.get(parent_serial, NONE)
            if parent == NONE
            else int(tables.first_children[parent])
        )
        tables.older_siblings[block_id] = sibling
        if sibling != NONE:
            self._newer_siblings[sibling] = block_id
        self._set_first_child(parent, parent_serial, block_id)

    def _leave_family(self, block_id: int, serial: int, parent_serial: int) -> None:
        tables = self._tables
        child = int(tables.first_children[block_id])
        if child != NONE:
            self._set_parent(child, NONE)
            self._orphans[serial] = child
        if parent_serial == ROOT_SERIAL:
            return
        newer = int(self._newer_siblings[block_id])
        older = int(tables.older_siblings[block_id])
        if older != NONE:
            self._newer_siblings[older] = newer
        if newer != NONE:
            tables.older_siblings[newer] = older
        else:
            self._set_first_child(int(tables.parents[block_id]), parent_serial, older)

    def _set_first_child(self, parent: int, parent_serial: int, child: int) -> None:
        """Record the newest child of a block. `parent` is NONE if that block is not offered."""
        if parent != NONE:
            self._tables.first_children[parent] = child
        elif child != NONE:
            self._orphans[parent_serial] = child
        else:
            del self._orphans[parent_serial]

    def _set_parent(self, child: int, parent: int) -> None:
        """Set the parent of a child and of all its older siblings."""
        while child != NONE:
            self._tables.parents[child] = parent
            child = int(self._tables.older_siblings[child])

    def check(self) -> None:
        """Recompute all links from the offered blocks, and raise CacheCorruption if any differs."""
        offered = {
            block_id: entry for block_id, entry in enumerate(self._offered) if entry is not None
        }
        if self._by_serial != {entry[0]: block_id for block_id, entry in offered.items()}:
            raise CacheCorruption("the map of serials does not match the indexed blocks")
        counts: dict[bytes, int] = {}
        children: dict[int, set[int]] = {}
        groups: dict[Any, set[int]] = {}
        tables = self._tables
        for block_id, (_, parent_serial, root) in offered.items():
            counts[root] = counts.get(root, 0) + 1
            if parent_serial != ROOT_SERIAL:
                children.setdefault(parent_serial, set()).add(block_id)
            if tables.parents[block_id] != self._by_serial.get(parent_serial, NONE):
                raise CacheCorruption(
                    f"block {block_id} is linked to the wrong parent, block "
                    f"{tables.parents[block_id]}"
                )
            for links, back in (
                (tables.older, self._newer),
                (tables.older_siblings, self._newer_siblings),
            ):
                if links[block_id] != NONE and back[links[block_id]] != block_id:
                    raise CacheCorruption(
                        f"block {links[block_id]} is not linked to the newer block {block_id}"
                    )
            groups.setdefault((root, tables.tokens[block_id].tobytes()), set()).add(block_id)
        if counts != {root: number for root, (_, number) in self._roots.items()}:
            raise CacheCorruption(
                f"block counts by root are wrong: {len(counts)} roots have indexed blocks"
            )
        firsts = {
            entry[0]: int(tables.first_children[block_id]) for block_id, entry in offered.items()
        }
        firsts = {
            serial: child for serial, child in firsts.items() if child != NONE
        } | self._orphans
        if {
            serial: self._listed(child, tables.older_siblings) for serial, child in firsts.items()
        } != children:
            raise CacheCorruption("a list of children does not match the indexed blocks")
        linked = [int(head) for head in tables.heads if head != NONE]
        for leader in linked:  # the list grows during the loop
            if tables.next_groups[leader] != NONE:
                linked.append(int(tables.next_groups[leader]))
        found = sorted(sorted(self._listed(leader, tables.older)) for leader in linked)
        if found != sorted(sorted(group) for group in groups.values()):
            raise CacheCorruption("the groups do not match the indexed blocks")

    def _listed(self, block_id: int, links: Ints) -> set[int]:
        found: set[int] = set()
        while block_id != NONE and block_id not in found:
            found.add(block_id)
            block_id = int(links[block_id])
        return found


def _links(count: int) -> Ints:
    return np.full(count, NONE, dtype=np.int32)


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r} must be an integer of at least 1")
