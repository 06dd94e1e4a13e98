"""The protocol of offload tiers, which store whole blocks outside the pool.

A tier may lose a block but never returns wrong data. It works with bytes and addresses, and knows
nothing about requests, tensors or positions. Only the I/O thread may call its methods, with these
exceptions: `holds`, `known`, `dropped`, `touch` and `stat` do no I/O and may be called from any
thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from kvboost_edge.kvcache.hashing import BlockAddress

__all__ = ["Tier", "TierStats"]


@dataclasses.dataclass(frozen=True, slots=True)
class TierStats:
    """Counters of a tier since it was opened, and its current contents.

    All sizes are those of whole records, including headers.

    Attributes:
        blocks: number of stored blocks. None if only a remote server knows.
        bytes: size of the stored blocks, in bytes. None if only a remote server knows.
        max_bytes: capacity in bytes. None if a remote server sets it.
        read_blocks: number of blocks that were read and verified.
        read_bytes: size of the blocks that were read and verified, in bytes.
        written_blocks: number of blocks that were written.
        written_bytes: size of the blocks that were written, in bytes.
        missing: number of requested blocks that were not stored.
        refused: number of blocks that failed verification. They are dropped and never served.
        evicted: number of blocks dropped to make room.
        not_written: number of blocks that could not be stored. Reasons are lack of room, a failed
            device, a full queue, or another process that owns the directory.
        errors: number of failed operations on the device or connection.
        writable: whether the tier currently stores blocks. False while another process owns the
            directory.
        state: one line that describes the current problem, or "".
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
    """Storage for the blocks of one space: one model, KV format and numerics version.

    No method raises because a device, file or server failed. Such a failure counts as a miss and is
    reported by `stat`.

    Attributes:
        name: "disk" or "redis", which is the tier's key in `hit_tokens`.
    """

    name: str

    @property
    def tend_seconds(self) -> float:
        """Longest time between two calls of `tend`, or infinity if the tier has no preference."""
        ...

    def begin(self) -> None:
        """Check that the tier works, and record the result for `stat`.

        The I/O thread calls this before any other method.
        """
        ...

    def holds(self, prefix_hash: bytes) -> bool | None:
        """Return whether a block is stored, if that is known without I/O.

        None means that only I/O can tell.
        """
        ...

    def ask(self, prefix_hashes: Sequence[bytes]) -> list[bool]:
        """Return whether each block is stored, without verifying its contents. May do I/O."""
        ...

    def known(self) -> list[bytes]:
        """Return the prefix hashes for which `holds` returns True."""
        ...

    def dropped(self, prefix_hash: bytes) -> bool:
        """Return whether a block is remembered as stored and later dropped."""
        ...

    def touch(self, prefix_hashes: Sequence[bytes]) -> None:
        """Record a use of these blocks, in this tier or in the pool.

        Args:
            prefix_hashes: blocks of one chain, in the order of the chain.
        """
        ...

    def read(self, blocks: Sequence[BlockAddress], into: Sequence[memoryview]) -> int:
        """Read consecutive blocks of a chain, and return how many were read and verified.

        Reading ends at the first block that is missing, is damaged, or has a different address or
        length. An invalid block is dropped. Buffers after the last verified block are undefined.

        Args:
            blocks: addresses of the blocks, in the order of the chain.
            into: one writable, contiguous buffer per block, with the exact length of its payload.
        """
        ...

    def write(self, blocks: Sequence[BlockAddress], payloads: Sequence[memoryview]) -> int:
        """Store the blocks that are missing, and return how many of `blocks` are then stored.

        The blocks may be in any order and have any length.
        """
        ...

    def drop(self, prefix_hashes: Sequence[bytes]) -> None:
        """Delete these blocks. Blocks that are not stored are ignored."""
        ...

    def tend(self) -> None:
        """Do background maintenance. The I/O thread calls this periodically while it is idle."""
        ...

    def stat(self) -> TierStats:
        """Return the tier's counters and sizes."""
        ...

    def close(self) -> None:
        """Flush pending data, and close files and connections. A second call does nothing."""
        ...
