"""The protocol of an offload tier, which keeps whole blocks outside the pool.

A tier may lose a block, and never returns a wrong one. It knows bytes and addresses, nothing of
requests, tensors or positions. One thread, the mover, reads and writes; `holds`, `known`,
`dropped`, `touch` and `stat` may be called from any thread at any moment and do no I/O.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from kvboost_edge.kvcache.hashing import BlockAddress

__all__ = ["ClosedTier", "OffloadStore", "Tier", "TierStats"]


@dataclasses.dataclass(frozen=True, slots=True)
class TierStats:
    """Counters since the tier was opened, and what it holds now. Bytes are those of records,
    headers included.

    Attributes:
        blocks, bytes: what it holds; None where only another machine knows.
        max_bytes: its cap; None: somebody else's.
        read_blocks: served, verified; `read_bytes` likewise.
        written_blocks: stored; `written_bytes` likewise.
        missing: asked for and not there.
        refused: there, and not what was asked for, or damaged: dropped, never served.
        evicted: dropped for room.
        not_written: wanted to store, and could not: no room, a failed device, a full queue, another
            owner.
        errors: failed operations of the device or of the connection.
        writable: whether it stores at the moment.
        state: one line on why it does not, or on what is wrong; "" when all is well.
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
    """A store of blocks of one space: one model, KV format, numerics version. `name` ("disk",
    "redis") is the key in `hit_tokens`. No method raises for what a device, a file or a server
    does: that is a miss, counted in `stat`.
    """

    name: str

    def begin(self) -> None:
        """Find out whether it works, so that `stat` can say so. The mover calls it before anything
        else.
        """
        ...

    def holds(self, prefix_hash: bytes) -> bool | None:
        """Whether the block is there, as far as is known without I/O; None: only `read` can
        tell.
        """
        ...

    def ask(self, prefix_hashes: Sequence[bytes]) -> list[bool]:
        """Of each of these blocks whether it is there, unverified: as `holds`, which cannot always
        tell. I/O.
        """
        ...

    def known(self) -> list[bytes]:
        """The blocks of which `holds` is True; may be called from any thread, and does no I/O."""
        ...

    def dropped(self, prefix_hash: bytes) -> bool:
        """Whether the block was there and is not any more, as far as is remembered."""
        ...

    def touch(self, prefix_hashes: Sequence[bytes]) -> None:
        """These blocks of one chain, in its order, were used just now, here or in the pool."""
        ...

    def read(self, blocks: Sequence[BlockAddress], into: Sequence[memoryview]) -> int:
        """Fill `into` with the payloads of consecutive blocks of a chain; how many of them, from
        the first on, are verified. What lies in the others is undefined. A block of another address
        or length, or a damaged one, ends the count, and is dropped. `into[i]` is writable,
        contiguous bytes of the payload's exact length.
        """
        ...

    def write(self, blocks: Sequence[BlockAddress], payloads: Sequence[memoryview]) -> int:
        """Store blocks that are not there yet; how many of them are there afterwards. Any order,
        any lengths.
        """
        ...

    def drop(self, prefix_hashes: Sequence[bytes]) -> None:
        """Forget these blocks; what is not there is passed over."""
        ...

    def tend(self) -> None:
        """See to what nobody asked for. The mover calls it now and then while it has nothing else
        to do.
        """
        ...

    def stat(self) -> TierStats:
        """Counters and sizes."""
        ...

    def close(self) -> None:
        """Write out what is pending, release files and connections. A second call does nothing."""
        ...


class ClosedTier:
    """A tier that was wanted and cannot be had: holds nothing, stores nothing, and says why."""

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
    """KV blocks outside the pool, as the scheduler sees them. Null: no tiers. No call waits."""

    @property
    def has_tiers(self) -> bool:
        """Whether there is anything outside the pool."""
        return False

    def may_hold(self, prefix_hash: bytes) -> bool:
        """Return whether a tier has the block, or might have it."""
        return False

    def holds(self, prefix_hash: bytes) -> bool:
        """Return whether a tier has the block, as far as is known."""
        return False

    def dropped_from(self, prefix_hash: bytes) -> list[str]:
        """Return the names of the tiers that had the block and dropped it."""
        return []

    def load(
        self,
        ticket: int,
        addresses: Sequence[BlockAddress],
        states: Mapping[int, BlockAddress] | None = None,
        num_there: int = 0,
    ) -> None:
        """Read consecutive blocks of a chain, as far as a tier has them; chunks come until one is
        the last.

        With recurrent states, blocks are read up to the deepest state that a tier has, and that
        state after them. Where it is lost, or a block before it, the next one before: three are
        tried.

        Args:
            states: those that a tier may have, by the number of blocks before each.
            num_there: the first of those blocks, which are in the pool and not among the addresses.
        """
        raise AssertionError("there is no tier to load from")

    def cancel(self, ticket: int) -> None:
        """End a load; chunks that are on their way still come, and its last one."""

    def touch(self, prefix_hashes: Sequence[bytes]) -> None:
        """Note that these blocks of one chain, in order, were used."""
