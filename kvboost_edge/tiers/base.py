"""Protocols of offload tiers, which store whole blocks outside the pool.

A tier may lose a block but never returns wrong data. It knows bytes and addresses, nothing about
requests, tensors or positions. Only the I/O thread reads and writes. `holds`, `known`, `dropped`,
`touch` and `stat` do no I/O and may be called from any thread at any time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from kvboost_edge.kvcache.hashing import BlockAddress

__all__ = ["ClosedTier", "OffloadStore", "Tier", "TierStats"]


@dataclasses.dataclass(frozen=True, slots=True)
class TierStats:
    """Counters since the tier was opened, and its current contents.

    Bytes are those of whole records, headers included.

    Attributes:
        blocks: stored blocks; None if only a remote server knows.
        bytes: bytes of the stored blocks; None if only a remote server knows.
        max_bytes: capacity; None if a remote server sets it.
        read_blocks: blocks that were read and verified.
        read_bytes: bytes of those blocks.
        written_blocks: blocks that were stored.
        written_bytes: bytes of those blocks.
        missing: requested blocks that were not stored.
        refused: stored blocks that failed verification. They are dropped, never served.
        evicted: blocks dropped to make room.
        not_written: blocks that could not be stored: no room, a failed device, a full queue, or
            another process owns the directory.
        errors: failed operations of the device or of the connection.
        writable: the tier stores blocks at the moment.
        state: one line on why it does not store, or on a problem; "" if there is none.
    """

    blocks: int | None = 0
    bytes: int | None = 0
    max_bytes: int | None = None
    read_blocks: int = 0
    read_bytes: int = 0
    written_blocks: int = 0
    written_bytes: int = 0
    missing: int = 0
    refused: int = 0
    evicted: int = 0
    not_written: int = 0
    errors: int = 0
    writable: bool = True
    state: str = ""


class Tier(Protocol):
    """Store for the blocks of one space: one model, KV format and numerics version.

    No method raises for a failure of a device, file or server. Such a failure is a miss, counted in
    `stat`.

    Attributes:
        name: "disk" or "redis", the key in `hit_tokens`.
    """

    name: str

    def begin(self) -> None:
        """Check that the tier works, for `stat` to report. The I/O thread calls this first."""
        ...

    def holds(self, prefix_hash: bytes) -> bool | None:
        """Return whether the block is stored, as far as is known without I/O.

        None means that only `read` can tell.
        """
        ...

    def ask(self, prefix_hashes: Sequence[bytes]) -> list[bool]:
        """Return whether each of these blocks is stored, unverified. Does I/O, unlike `holds`."""
        ...

    def known(self) -> list[bytes]:
        """Return the blocks for which `holds` is True."""
        ...

    def dropped(self, prefix_hash: bytes) -> bool:
        """Return whether the block was stored and then dropped, as far as is remembered."""
        ...

    def touch(self, prefix_hashes: Sequence[bytes]) -> None:
        """Record that these blocks of one chain, in its order, were used, here or in the pool."""
        ...

    def read(self, blocks: Sequence[BlockAddress], into: Sequence[memoryview]) -> int:
        """Read consecutive blocks of a chain into `into`; return how many are verified.

        Reading ends at the first block that is missing, damaged, or of another address or length. A
        bad block is dropped. The rest of `into` is undefined.

        Args:
            blocks: addresses in the order of the chain.
            into: one writable, contiguous buffer of the payload's exact length for each block.
        """
        ...

    def write(self, blocks: Sequence[BlockAddress], payloads: Sequence[memoryview]) -> int:
        """Store the blocks that are missing; return how many of `blocks` are stored afterwards.

        Order and lengths are arbitrary.
        """
        ...

    def drop(self, prefix_hashes: Sequence[bytes]) -> None:
        """Delete these blocks, and ignore those that are not stored."""
        ...

    def tend(self) -> None:
        """Do background maintenance. The I/O thread calls this now and then while it is idle."""
        ...

    def stat(self) -> TierStats:
        """Return counters and sizes."""
        ...

    def close(self) -> None:
        """Write out pending data, and release files and connections. A second call does nothing."""
        ...


class ClosedTier:
    """Tier that could not be opened. It stores nothing and reports the reason in its state."""

    def __init__(self, name: str, state: str) -> None:
        self.name = name
        self._state = state

    def begin(self) -> None:
        pass

    def holds(self, prefix_hash: bytes) -> bool:
        return False

    def ask(self, prefix_hashes: Sequence[bytes]) -> list[bool]:
        return [False] * len(prefix_hashes)

    def known(self) -> list[bytes]:
        return []

    def dropped(self, prefix_hash: bytes) -> bool:
        return False

    def touch(self, prefix_hashes: Sequence[bytes]) -> None:
        pass

    def read(self, blocks: Sequence[BlockAddress], into: Sequence[memoryview]) -> int:
        return 0

    def write(self, blocks: Sequence[BlockAddress], payloads: Sequence[memoryview]) -> int:
        return 0

    def drop(self, prefix_hashes: Sequence[bytes]) -> None:
        pass

    def tend(self) -> None:
        pass

    def stat(self) -> TierStats:
        return TierStats(writable=False, state=self._state)

    def close(self) -> None:
        pass


class OffloadStore:
    """Offload tiers as the scheduler sees them. No call waits.

    This base class is the null object, without any tier.
    """

    @property
    def has_tiers(self) -> bool:
        """True if there is a tier."""
        return False

    def may_hold(self, prefix_hash: bytes) -> bool:
        """Return whether a tier has the block, or might have it."""
        return False

    def holds(self, prefix_hash: bytes) -> bool:
        """Return whether a tier is known to have the block."""
        return False

    def dropped_from(self, prefix_hash: bytes) -> list[str]:
        """Return the names of the tiers that had the block and dropped it."""
        return []

    def load(
        self,
        ticket: int,
        addresses: Sequence[BlockAddress],
        states: Mapping[int, BlockAddress] | None = None,
        num_in_pool: int = 0,
    ) -> None:
        """Start to read consecutive blocks of a chain, as far as a tier has them.

        The results arrive as chunks; the last one says so. For a hybrid model, blocks are read up
        to the deepest state that a tier has, and then that state. If the state or a block before it
        is lost, the next shallower state is tried, up to three states in all.

        Args:
            ticket: identifies the load.
            addresses: the blocks to read, in order.
            states: addresses of states that a tier may have, by the number of blocks before each.
            num_in_pool: number of blocks before the first address. They are in the pool already.
        """
        raise AssertionError("there is no tier to load from")

    def cancel(self, ticket: int) -> None:
        """Cancel a load. Chunks that are under way still arrive, and so does the last one."""

    def touch(self, prefix_hashes: Sequence[bytes]) -> None:
        """Record that these blocks were used. They are in the order of one chain."""
