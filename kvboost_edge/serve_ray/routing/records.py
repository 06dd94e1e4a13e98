"""What replicas and the router tell each other: small frozen records of integers, floats and
bytes.
"""

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
    """Where a block is: a replica's pool, a disk that it can read, a server that all replicas
    share. Of each the hash has another key: its bytes from 8 times the number on.
    """

    POOL = 0
    DISK = 1
    SHARED = 2


class Cursor(NamedTuple):
    """How much of a replica's events somebody knows: all batches of `epoch` up to `serial`; (0,
    -1): none.
    """

    epoch: int
    serial: int


NOTHING_KNOWN = Cursor(0, -1)


class EventBatch(NamedTuple):
    """What changed in a replica's pool and in what it knows of tiers since the batch before it, or
    all there is.

    epoch      a random number of the replica's process, never 0: another one means an empty cache
               and new serials
    serial     counts the batches of an epoch from 0
    is_whole   `published` is all there is after batch `serial`; whatever was known before is
               forgotten
    published, evicted   keys of blocks at a `Place`, KEY_BYTES each, in one piece; each is in at
                         most one of the two
    """

    epoch: int
    serial: int
    is_whole: bool
    published: bytes
    evicted: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """A replica's figures at one moment. ConfigError for a figure that is none.

    serial              counts a replica's reports; one that comes late is ignored
    seconds_per_token   measured: a prompt token to be computed, alone in its batch of prompt
                        tokens; above 0
    queued_tokens       prompt tokens that wait or are being computed
    num_running         requests that have had their first token and are not done
    decode_seconds      a step of those takes so long now; 0 with none
    step_tokens         most tokens in a step (`max_batch_tokens`): those running leave the rest to
                        prompts
    num_waiting         requests that have had no token yet
    max_running         most requests that run together (`max_num_seqs`)
    free_blocks         blocks nobody references, idle cached ones included
    answer_seconds      how long a request holds its place from its first token on, on average; 0:
                        not known
    is_draining         it takes no more requests
    disk_token_seconds, shared_token_seconds   measured: a prompt token that is read from there; 0:
                                               it reads nothing
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
    """Where a request may go.

    replica_id        the name it was added by
    matched_tokens    of the prompt, believed to be in its pool
    missing_tokens    to be computed, at least 1; tell the replica: its `Meter` counts them as
                      queued
    expected_seconds  until the first token, as far as the router knows
    restored_tokens   the rest of the prompt: believed to be in a tier that the replica reads
    present_tokens    of those: believed to be in its pool too, where the state alone behind them is
                      read
    """

    replica_id: str
    matched_tokens: int
    missing_tokens: int
    expected_seconds: float
    restored_tokens: int = 0
    present_tokens: int = 0
