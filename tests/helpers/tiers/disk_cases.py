"""Helpers for the tests of the disk tier: chains of blocks whose payloads follow from their hashes,
and small tiers.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvboost_edge.kvcache.hashing import BlockAddress
from kvboost_edge.tiers.disk import tier as module
from kvboost_edge.tiers.disk.segment_sealing import Job, Sealer
from kvboost_edge.tiers.disk.tier import DiskTier

SPACE = bytes(range(32))
OTHER_SPACE = bytes(range(32, 64))
PAYLOAD_BYTES = 4000  # not a multiple of 64
TOKENS = 16
RECORD_BYTES = 256 + 4032
CAP = 2 << 20


class InlineSealer(Sealer):
    """Sealer that runs each job synchronously, so that the order of system calls is fixed."""

    def start(self, job: Job) -> None:
        job()


def chain(length: int, seed: int = 0, parent: bytes = bytes(32)) -> list[BlockAddress]:
    """Return addresses of consecutive blocks of random tokens."""
    draw = random.Random(seed)
    blocks = []
    for _ in range(length):
        tokens = draw.randbytes(4 * TOKENS)
        blocks.append(BlockAddress(hashlib.sha256(parent + tokens).digest(), parent, tokens))
        parent = blocks[-1].prefix_hash
    return blocks


@functools.lru_cache(4096)
def payload(block: BlockAddress, nbytes: int = PAYLOAD_BYTES) -> bytes:
    """Return the only payload that may ever be served for this block."""
    return random.Random(block.prefix_hash).randbytes(nbytes)


@contextlib.contextmanager
def opened(directory: Path, space: bytes = SPACE, **options: Any) -> Iterator[DiskTier]:
    """Open a tier with a cap of 2 MiB, hence segments of 64 KiB, that seals immediately."""
    with contextlib.closing(tier_of(directory, space, **options)) as tier:
        yield tier


def tier_of(directory: Path, space: bytes = SPACE, **options: Any) -> DiskTier:
    """Open the same tier; the caller closes it."""
    return DiskTier.open(
        directory, space, **{"max_bytes": CAP, "sealer": InlineSealer(), **options}
    )


@contextlib.contextmanager
def opened_apart(directory: Path, space: bytes = SPACE, **options: Any) -> Iterator[DiskTier]:
    """Open a tier that shares nothing with the other tiers of this process, as if it ran in a
    separate process.
    """
    others = dict(module._stores)
    module._stores.clear()
    try:
        tier = tier_of(directory, space, **options)
        others |= {f"{key} #{id(shared)}": shared for key, shared in module._stores.items()}
    finally:
        module._stores.clear()
        module._stores.update(others)
    with contextlib.closing(tier):
        yield tier


def die(tier: DiskTier) -> None:
    """Release the files as the end of a process does, without writing anything more."""
    assert tier._store is not None
    tier._store.after_fork()


def write(tier: DiskTier, blocks: Sequence[BlockAddress], nbytes: int = PAYLOAD_BYTES) -> int:
    return tier.write(blocks, [memoryview(payload(block, nbytes)) for block in blocks])


def read(tier: DiskTier, blocks: Sequence[BlockAddress], nbytes: int = PAYLOAD_BYTES) -> int:
    """Return how many of the first blocks are served, after checking their bytes."""
    into = [memoryview(bytearray(nbytes)) for _ in blocks]
    done = tier.read(blocks, into)
    for block, got in zip(blocks[:done], into, strict=False):
        assert got == payload(block, nbytes), "a block was served with the bytes of another one"
    return done


def present(
    tier: DiskTier, blocks: Sequence[BlockAddress], nbytes: int = PAYLOAD_BYTES
) -> set[bytes]:
    """Return the hashes of the blocks that are served when each is requested alone."""
    return {block.prefix_hash for block in blocks if read(tier, [block], nbytes)}


def has_all(tier: DiskTier, blocks: Sequence[BlockAddress], nbytes: int = PAYLOAD_BYTES) -> bool:
    """Return whether each block is served when requested alone."""
    return len(present(tier, blocks, nbytes)) == len(blocks)


def hashes_of(blocks: Sequence[BlockAddress]) -> list[bytes]:
    return [block.prefix_hash for block in blocks]


def scratch() -> Path:
    """Make a temporary directory that the caller removes, in memory if possible."""
    return Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))


def space_dir(directory: Path, space: bytes = SPACE) -> Path:
    return directory / space.hex()


def segments(directory: Path, space: bytes = SPACE) -> list[Path]:
    return sorted(space_dir(directory, space).glob("*.kvs"))
