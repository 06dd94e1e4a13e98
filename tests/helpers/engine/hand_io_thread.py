"""An in-memory tier and an I/O thread that is driven by hand, so that tests can produce every
interleaving of loads, stores and steps.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from kvboost_edge.kvcache.hashing import BlockAddress
from kvboost_edge.tiers.base import TierStats
from kvboost_edge.tiers.io_thread import IOChunk, IOThread


class DictTier:
    """A tier that keeps its blocks in a dict.

    Args:
        knows: whether `holds` can answer.
        losses: probability that a block is gone when it is read.
    """

    def __init__(
        self, name: str = "shelf", *, knows: bool = True, losses: float = 0.0, seed: int = 0
    ) -> None:
        self.name = name
        self.tend_seconds = math.inf
        self.blocks: dict[bytes, tuple[BlockAddress, bytes]] = {}
        self.writable = True
        self.closed = False
        self.touched: list[bytes] = []
        self.lost: set[bytes] = set()
        self.num_read = self.num_written = self.num_asked = 0
        self._knows = knows
        self._losses = losses
        self._rng = random.Random(seed)

    def begin(self) -> None:
        pass

    def holds(self, prefix_hash: bytes) -> bool | None:
        return prefix_hash in self.blocks if self._knows else None

    def ask(self, prefix_hashes: Sequence[bytes]) -> list[bool]:
        self.num_asked += 1
        return [prefix_hash in self.blocks for prefix_hash in prefix_hashes]

    def known(self) -> list[bytes]:
        return list(self.blocks) if self._knows else []

    def dropped(self, prefix_hash: bytes) -> bool:
        return prefix_hash in self.lost and prefix_hash not in self.blocks

    def touch(self, prefix_hashes: Sequence[bytes]) -> None:
        self.touched += prefix_hashes

    def read(self, blocks: Sequence[BlockAddress], into: Sequence[memoryview]) -> int:
        for count, (address, buffer) in enumerate(zip(blocks, into, strict=True)):
            if self._rng.random() < self._losses:
                self.drop([address.prefix_hash])
            known, data = self.blocks.get(address.prefix_hash, (None, b""))
            if known != address:
                self.drop([address.prefix_hash])
                buffer[:] = b"\xff" * len(buffer)  # unverified data may be anything
                return count
            buffer[:] = data
            self.num_read += 1
        return len(blocks)

    def write(self, blocks: Sequence[BlockAddress], payloads: Sequence[memoryview]) -> int:
        for address, payload in zip(blocks, payloads, strict=True):
            data = bytes(payload)
            known = self.blocks.setdefault(address.prefix_hash, (address, data))
            assert known == (address, data), "equal addresses must hold equal bytes"
            self.num_written += 1
        return len(blocks)

    def drop(self, prefix_hashes: Sequence[bytes]) -> None:
        for prefix_hash in prefix_hashes:
            if self.blocks.pop(prefix_hash, None) is not None:
                self.lost.add(prefix_hash)

    def stat(self) -> TierStats:
        return TierStats(blocks=len(self.blocks), writable=self.writable)

    def close(self) -> None:
        self.closed = True


class HandIOThread(IOThread):
    """An I/O thread without a thread: `pump` does its work."""

    def start(self, deliver: Callable[[IOChunk], None]) -> None:
        self._deliver = deliver

    def pump(self, most: int = 1000) -> int:
        """Run up to `most` loads and stores and return their number."""
        for count in range(most):
            if (job := self._next()) is None:
                return count
            self._do(job)
        return most
