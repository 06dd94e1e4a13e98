"""Messages between replicas and the router: frozen records of integers, floats and bytes."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import NamedTuple

from kvboost_edge.errors import ConfigError

__all__ = [
    "KEY_BYTES",
    "OUTSIDE_MASK",
    "Cursor",
    "EventBatch",
    "Place",
    "ReplicaReport",
    "RoutingDecision",
]

KEY_BYTES = 8
"""Size of a key: the bytes of each prefix hash that are reported and stored.

If two hashes have equal keys, the router may believe in a block that does not exist. The replica
compares whole hashes and tokens, so this only costs time.
"""

OUTSIDE_MASK = 3
"""Key bits that must be unset for a block outside of pools to be reported: one block in four.

Tiers hold many more blocks than pools, and reading a few blocks more or less makes little
difference.
"""


class Place(enum.IntEnum):
    """The location of a block: a replica's pool, a disk that the replica reads, or a shared server.

    The key of a block at place n consists of bytes 8 n to 8 n + 7 of its hash.
    """

    POOL = 0
    DISK = 1
    SHARED = 2


class Cursor(NamedTuple):
    """A position in a replica's events: all batches of `epoch` up to `serial` are known.

    (0, -1) means that no batch is known.
    """

    epoch: int
    serial: int


NOTHING_KNOWN = Cursor(0, -1)


class EventBatch(NamedTuple):
    """Changes of a replica's pool and tiers since the previous batch, or their whole content.

    Attributes:
        epoch: Random number of the replica's process, never 0. A new epoch starts with an empty
            cache and serial 0.
        serial: Number of the batch within its epoch, from 0.
        is_whole: True if `published` is the whole content after batch `serial`, which replaces all
            earlier knowledge.
        published: Keys of blocks added at any `Place`, KEY_BYTES each, concatenated.
        evicted: Keys of evicted blocks. No key is in both `published` and `evicted`.
    """

    epoch: int
    serial: int
    is_whole: bool
    published: bytes
    evicted: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """A replica's load at one moment. The constructor raises ConfigError for an invalid value.

    Attributes:
        serial: Number of the report. Older reports are ignored.
        seconds_per_token: Measured seconds per prompt token, without other prompts in the batch;
            above 0.
        queued_tokens: Prompt tokens that are waiting or being computed.
        num_running: Number of requests after their first token.
        decode_seconds: Current seconds per decode step; 0 without running requests.
        step_tokens: Maximum tokens per step (`max_batch_tokens`), for running requests and prompts.
        num_waiting: Number of requests before their first token.
        max_running: Maximum number of requests that run at the same time (`max_num_seqs`).
        free_blocks: Blocks without references, including cached blocks.
        answer_seconds: Average seconds from a request's first to its last token; 0 if unknown.
        is_draining: True if the replica accepts no more requests.
        disk_token_seconds: Measured seconds to read a prompt token from disk; 0 without a disk
            tier.
        shared_token_seconds: Measured seconds to read a prompt token from the shared server; 0
            without a server.
    """

    serial: int
    seconds_per_token: float
    queued_tokens: int = 0
    num_running: int = 0
    decode_seconds: float = 0.0
    step_tokens: int = 512
    num_waiting: int = 0
    max_running: int = 64
    free_blocks: int = 1 << 40
    answer_seconds: float = 0.0
    is_draining: bool = False
    disk_token_seconds: float = 0.0
    shared_token_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds_per_token) and self.seconds_per_token > 0):
            raise ConfigError(
                f"seconds_per_token={self.seconds_per_token!r} must be finite and above 0"
            )
        for name in (
            "decode_seconds",
            "answer_seconds",
            "disk_token_seconds",
            "shared_token_seconds",
        ):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name}={value!r} must be finite and at least 0")
        for name in ("serial", "queued_tokens", "num_running", "num_waiting", "free_blocks"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be at least 0")
        for name in ("step_tokens", "max_running"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be at least 1")


class RoutingDecision(NamedTuple):
    """A replica chosen for a request.

    Attributes:
        replica_id: Name of the replica.
        matched_tokens: Prompt tokens believed to be in the replica's pool.
        missing_tokens: Prompt tokens to compute, at least 1. The replica's `Meter` counts them as
            queued.
        expected_seconds: Expected time to first token.
        restored_tokens: Prompt tokens believed to be in a tier that the replica reads.
        present_tokens: Part of `restored_tokens` whose KV is believed to be in the pool too, so
            that only the recurrent state after it is read.
    """

    replica_id: str
    matched_tokens: int
    missing_tokens: int
    expected_seconds: float
    restored_tokens: int = 0
    present_tokens: int = 0
