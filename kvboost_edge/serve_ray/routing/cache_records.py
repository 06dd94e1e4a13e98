"""Messages between replicas and the router: small frozen records of integers, floats and bytes."""

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
"""Of each prefix hash 8 bytes are told and remembered. Two hashes that are alike there make the
router believe in a block that is not there: the replica compares whole hashes and tokens, so that
costs time and nothing else.
"""

OUTSIDE_MASK = 3
"""Of blocks outside of pools those are told whose key has these bits 0, one in four: there are many
more of them, and a few blocks that are read or not make little difference.
"""


class Place(enum.IntEnum):
    """Location of a block: a replica's pool, a disk that it can read, or a server that all replicas
    share.

    Each has its own key of a hash: its bytes from 8 times the number on.
    """

    POOL = 0
    DISK = 1
    SHARED = 2


class Cursor(NamedTuple):
    """Position in a replica's events: all batches of `epoch` up to `serial` are known; (0, -1):
    none.
    """

    epoch: int
    serial: int


NOTHING_KNOWN = Cursor(0, -1)


class EventBatch(NamedTuple):
    """Changes in a replica's pool, and in its knowledge of tiers, since the previous batch; or
    everything.

    Attributes:
        epoch: a random number of the replica's process, never 0: another one means an empty cache
            and new serials.
        serial: counts the batches of an epoch from 0.
        is_whole: `published` is everything after batch `serial`; earlier knowledge is forgotten.
        published, evicted: keys of blocks at a `Place`, KEY_BYTES each, concatenated; each key is
            in at most one of the two.
    """

    epoch: int
    serial: int
    is_whole: bool
    published: bytes
    evicted: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """A replica's figures at one moment. Raises ConfigError for an invalid figure.

    Attributes:
        serial: counts a replica's reports; a late one is ignored.
        seconds_per_token: measured time of a prompt token, alone in its batch of prompt tokens;
            above 0.
        queued_tokens: prompt tokens that wait or are being computed.
        num_running: requests after their first token and not done.
        decode_seconds: current time of a decode step; 0 without running requests.
        step_tokens: most tokens in a step (`max_batch_tokens`), shared by running requests and
            prompts.
        num_waiting: requests before their first token.
        max_running: most requests that run together (`max_num_seqs`).
        free_blocks: blocks without references, idle cached ones included.
        answer_seconds: average time that a request holds its place after its first token; 0:
            unknown.
        is_draining: it takes no more requests.
        disk_token_seconds, shared_token_seconds: measured time to read a prompt token there; 0: it
            reads nothing.
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
    """A replica for a request.

    Attributes:
        replica_id: name of the replica.
        matched_tokens: prompt tokens believed to be in its pool.
        missing_tokens: tokens to compute, at least 1; tell the replica, whose `Meter` counts them
            as queued.
        expected_seconds: expected time to first token.
        restored_tokens: the rest of the prompt: believed to be in a tier that the replica reads.
        present_tokens: of those, tokens believed to be in its pool too, so that only the recurrent
            state after them is read.
    """

    replica_id: str
    matched_tokens: int
    missing_tokens: int
    expected_seconds: float
    restored_tokens: int = 0
    present_tokens: int = 0
