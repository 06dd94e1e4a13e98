"""Redis tier: blocks on a Redis or Valkey server that several machines share.

All I/O happens on the I/O thread.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvboost_edge.errors import ConfigError
from kvboost_edge.kvcache.evicted_hashes import EvictedHashes
from kvboost_edge.kvcache.hashing import BlockAddress
from kvboost_edge.tiers.base import TierStats
from kvboost_edge.tiers.redis.address import parse_url
from kvboost_edge.tiers.redis.connection import Command, RedisConnection, ServerError
from kvboost_edge.tiers.redis.values import (
    HEAD,
    Seal,
    piece_lengths,
    pieces_of,
    stored_bytes,
    value_bytes_at,
)

__all__ = ["PASSWORD_VARIABLE", "SECRET_VARIABLE", "RedisTier"]

_LOG = logging.getLogger(__name__)
SECRET_VARIABLE = "KVBOOST_EDGE_REDIS_SECRET"
PASSWORD_VARIABLE = "KVBOOST_EDGE_REDIS_PASSWORD"
_SHORTEST_SECRET = 16
_PIPELINE_BYTES = 8 << 20
_SMALL_COMMANDS = 1024  # commands without payload per pipeline
_MOST_TOUCHED = 4096  # touched blocks to remember between refreshes
_MOST_REFRESHED = 256  # limit per read or write, because the next operation is waiting
_STALE_SHARE = 8  # the TTL of a used block is renewed once 1/8 of it has passed
_MOST_SEEN = 1 << 16
_SEEN_S = 600.0
# Pause after a failed write or refresh. The user may lack permission for SET or EXPIRE.
_NO_WRITES_S = 30.0
_DAY_S = 86_400


class RedisTier:
    """Tier on a Redis or Valkey server.

    Each value carries a MAC with a secret that all machines sharing the cache must know. Without a
    secret, every client that can write to the server could change the KV that the model reads.
    Running without a secret therefore requires `trust`.

    Opening the tier does no I/O. If the server is down or rejects the password, `stat().state` says
    so after the I/O thread's first attempt. After 3 consecutive failures, the server is not used
    for 30 s.

    Args:
        url: URL of the server. If it contains no password, that in KVBOOST_EDGE_REDIS_PASSWORD is
            used.
        space: 32-byte id of everything that affects a block's bytes: model, KV format and numerics.
        secret: secret of at least 16 characters. None means the environment variable
            KVBOOST_EDGE_REDIS_SECRET.
        trust: accept values without a MAC if no secret is set.
        ttl_s: time to live after a write or the last use, in seconds.
        clock: function that returns monotonic time in seconds.
        environment: environment variables to use instead of those of the process.

    Attributes:
        place: URL of the server without secrets.

    Raises:
        ConfigError: the URL, secret or `ttl_s` is invalid.
        BackendUnavailable: the `redis` package is not installed.
    """

    name = "redis"

    def __init__(
        self,
        url: str,
        space: bytes,
        *,
        secret: str | None = None,
        trust: bool = False,
        ttl_s: int = _DAY_S,
        clock: Callable[[], float] = time.monotonic,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        environment = os.environ if environment is None else environment
        address = parse_url(url, environment.get(PASSWORD_VARIABLE, ""))
        if isinstance(ttl_s, bool) or not isinstance(ttl_s, int) or not 1 <= ttl_s <= 3650 * _DAY_S:
            raise ConfigError(
                f"redis_ttl_s={ttl_s!r} must be a number of seconds from 1 to {3650 * _DAY_S}"
            )
        self.place = address.place
        self._seal = Seal(space, _secret(secret, environment, trust))
        self._ttl_s = ttl_s
        self._clock = clock
        self._server = RedisConnection(address, clock)
        self._lock = threading.Lock()
        self._counts: dict[str, Any] = dict.fromkeys(_COUNTERS, 0)
        self._touched: dict[bytes, None] = {}
        self._refreshed: dict[bytes, float] = {}  # block -> time of the last TTL renewal
        self._refreshes_again_at = 0.0
        # Block -> time at which it was last known to be on the server, which saves sending it
        # again. The server may drop a block at any time, and a later read notices that.
        self._seen: dict[bytes, float] = {}
        self._seen_s = min(_SEEN_S, ttl_s / 2)
        self._dropped = EvictedHashes()
        self._no_writes = ""
        self._writes_again_at = 0.0
        self._advice = ""
        self._has_warned = self._closed = False

    def __repr__(self) -> str:
        return f"RedisTier({self.place!r})"

    def begin(self) -> None:
        """Ping the server, and log a warning if it has a problem. Does I/O."""
        if not self.ping() or self._advice:
            _LOG.warning("%s", self.stat().state)

    def holds(self, prefix_hash: bytes) -> bool | None:
        """Return True for a block that was recently written or read, otherwise None.

        The result is always False while the server is not used.
        """
        if self._closed or self._server.is_off:
            return False
        with self._lock:
            seen = self._seen.get(prefix_hash)
        return True if seen is not None and self._clock() - seen < self._seen_s else None

    def known(self) -> list[bytes]:
        """Return the prefix hashes for which `holds` returns True."""
        since = self._clock() - self._seen_s
        if self._closed or self._server.is_off:
            return []
        with self._lock:
            return [prefix_hash for prefix_hash, seen in self._seen.items() if seen > since]

    def dropped(self, prefix_hash: bytes) -> bool:
        """Return whether the block was once written or read here and is now missing.

        The server evicted the block, or its time to live expired.
        """
        with self._lock:
            return prefix_hash in self._dropped and prefix_hash not in self._seen

    def touch(self, prefix_hashes: Sequence[bytes]) -> None:
        """Schedule renewal of these blocks' time to live. Does no I/O.

        A block that was recently renewed is skipped, no matter how often it is used.
        """
        since = self._clock() - self._ttl_s / _STALE_SHARE
        with self._lock:
            for prefix_hash in prefix_hashes:
                if len(self._touched) == _MOST_TOUCHED:
                    break
                if self._refreshed.get(prefix_hash, since) <= since:
                    self._touched[prefix_hash] = None

    def ping(self) -> bool:
        """Return whether the server answers, and check its memory policy.

        If the policy will make a full server refuse writes, `stat` reports this. Does I/O, which
        may take seconds.
        """
        answers = self._ask([("PING",), ("INFO", "memory")], _SMALL_COMMANDS)
        if answers is None or isinstance(answers[0], ServerError):
            return False
        memory = answers[1] if isinstance(answers[1], Mapping) else {}
        full = memory.get("maxmemory") and memory.get("maxmemory_policy") == "noeviction"
        self._advice = (
            "its maxmemory-policy is noeviction, so it accepts no blocks once full; set allkeys-lru"
            if full
            else ""
        )
        return True

    def ask(self, prefix_hashes: Sequence[bytes]) -> list[bool]:
        """Return whether the server has a value for each block, without verifying it. Does I/O."""
        commands: list[Command] = [
            ("EXISTS", *self._seal.keys(prefix_hash, 0)) for prefix_hash in prefix_hashes
        ]
        answers = self._ask(commands, _SMALL_COMMANDS)
        if answers is None:
            return [False] * len(prefix_hashes)
        for prefix_hash, answer in zip(prefix_hashes, answers, strict=True):
            if answer == 0:
                self._lost(prefix_hash)
        return [answer == 1 for answer in answers]

    def read(self, blocks: Sequence[BlockAddress], into: Sequence[memoryview]) -> int:
        """Read blocks in pipelines of about 8 MiB, up to the first missing or invalid one.

        See `Tier.read`.
        """
        sizes = [
            stored_bytes(self._seal, block, view.nbytes)
            for block, view in zip(blocks, into, strict=True)
        ]
        for batch in _batches(sizes):
            keys = [self._seal.keys(blocks[index].prefix_hash, sizes[index]) for index in batch]
            commands: list[Command] = [
                # Use GETRANGE instead of GET, so a huge foreign value is not transferred as a
                # whole. The range is a byte too long, which reveals a longer value.
                ("GETRANGE", key, 0, length)
                for index, names in zip(batch, keys, strict=True)
                for key, length in zip(names, piece_lengths(sizes[index]), strict=True)
            ]
            answers = self._ask(commands, _at_once(max(sizes)))
            if answers is None:
                self._count(missing=len(blocks) - batch[0])
                return batch[0]
            pieces = iter(answers)
            for index, names in zip(batch, keys, strict=True):
                if not self._accept(
                    blocks[index], [next(pieces) for _ in names], names, into[index]
                ):
                    # The following blocks are probably gone too, so check before writing them
                    # again.
                    self._lost(*(block.prefix_hash for block in blocks[index:]))
                    self._refresh()
                    return index
        self._refresh()
        return len(blocks)

    def write(self, blocks: Sequence[BlockAddress], payloads: Sequence[memoryview]) -> int:
        """Store the blocks that are missing, and return how many of `blocks` are then stored."""
        sizes = [
            stored_bytes(self._seal, block, view.nbytes)
            for block, view in zip(blocks, payloads, strict=True)
        ]
        there = 0
        for batch in _batches(sizes):
            there += self._write_batch([blocks[i] for i in batch], [payloads[i] for i in batch])
        self._count(not_written=len(blocks) - there)
        self._refresh()
        return there

    def drop(self, prefix_hashes: Sequence[bytes]) -> None:
        """Delete all pieces of these blocks on the server, for all machines."""
        self._lost(*prefix_hashes)
        names = self._names_of(prefix_hashes) or {}
        self._ask([("UNLINK", *keys) for keys in names.values() if keys], _SMALL_COMMANDS)

    @property
    def tend_seconds(self) -> float:
        return math.inf

    def tend(self) -> None:
        """Renew the time to live of touched blocks. Does I/O.

        This keeps blocks alive that are in use in the pool and are therefore not read here.
        """
        self._refresh(_MOST_TOUCHED)

    def stat(self) -> TierStats:
        """Return the tier's counters. The sizes of its contents are not known."""
        refused = self._no_writes if self._clock() < self._writes_again_at else ""
        trouble = self._server.trouble or refused or self._advice
        with self._lock:
            return TierStats(
                blocks=None,
                bytes=None,
                **self._counts,
                writable=not (self._closed or self._server.is_off or refused),
                state=f"{self.place}: {trouble}" if trouble else "",
            )

    def close(self) -> None:
        """Renew the time to live of touched blocks, and close the connection. Does I/O."""
        if not self._closed:
            self._refresh(_MOST_TOUCHED)
            self._closed = True
            self._server.close()

    def _accept(
        self, block: BlockAddress, pieces: list[Any], keys: list[str], into: memoryview
    ) -> bool:
        if any(
            isinstance(piece, ServerError) and piece.code != "WRONGTYPE" for piece in pieces
        ) or not all(pieces):
            self._count(missing=1)
            return False
        if all(isinstance(piece, bytes) for piece in pieces):
            value = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            if self._seal.open(value, block, into.cast("B")):
                self._count(read_blocks=1, read_bytes=len(value))
                self._saw(block.prefix_hash)
                return True
        self._count(refused=1)
        if not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "%s holds a value that is damaged or was not written with this secret; such values "
                "are deleted, and their blocks are computed instead (counted in refused)",
                self.place,
            )
        self._ask([("UNLINK", *keys)], 1)
        return False

    def _write_batch(self, blocks: list[BlockAddress], payloads: list[memoryview]) -> int:
        if self._clock() < self._writes_again_at:
            return 0
        sizes = [
            stored_bytes(self._seal, block, view.nbytes)
            for block, view in zip(blocks, payloads, strict=True)
        ]
        keys = [
            self._seal.keys(block.prefix_hash, size)
            for block, size in zip(blocks, sizes, strict=True)
        ]
        lengths = self._ask([("STRLEN", key) for names in keys for key in names], _SMALL_COMMANDS)
        if lengths is None:
            return 0
        found = iter(lengths)
        commands = list[Command]()
        missing = list[int]()
        for index, names in enumerate(keys):
            held = [next(found) for _ in names]
            if held == piece_lengths(sizes[index]):
                self._saw(blocks[index].prefix_hash)
                continue
            missing.append(index)
            pieces = pieces_of(self._seal.value(blocks[index], payloads[index].cast("B")))
            # With NX, a value that another machine stored in the meantime is kept. A value with
            # missing pieces or another length is replaced as a whole, so all pieces match.
            condition = () if any(held) else ("NX",)
            # Write the first piece last. Its presence then implies that the others are stored.
            commands += [
                ("SET", key, piece, "EX", self._ttl_s, *condition)
                for key, piece in zip(reversed(names), reversed(pieces), strict=True)
            ]
        answers = self._ask(commands, _at_once(max(sizes)))
        if answers is None:
            return len(blocks) - len(missing)
        stored = iter(answers)
        not_stored = 0
        for index in missing:
            errors = [
                answer
                for answer in [next(stored) for _ in keys[index]]
                if isinstance(answer, ServerError)
            ]
            if errors:
                not_stored += 1
                self._stop_writing(str(errors[0]))
            else:
                self._count(written_blocks=1, written_bytes=sizes[index])
                self._saw(blocks[index].prefix_hash)
        if missing and not not_stored and self._no_writes:
            _LOG.info("%s accepts blocks again", self.place)
            self._no_writes = ""
        return len(blocks) - not_stored

    def _stop_writing(self, reason: str) -> None:
        self._writes_again_at = self._clock() + _NO_WRITES_S
        if reason != self._no_writes:
            _LOG.warning("%s does not accept blocks, retrying every 30 s: %s", self.place, reason)
        self._no_writes = reason

    def _refresh(self, most: int = _MOST_REFRESHED) -> None:
        """Renew the time to live of up to `most` touched blocks, oldest first.

        Blocks beyond `most` and blocks whose renewal failed remain scheduled.
        """
        with self._lock:
            touched = list(itertools.islice(self._touched, most))
        if not touched or self._clock() < self._refreshes_again_at:
            return
        done = self._renewed(touched)
        with self._lock:
            now = self._clock()
            _remember(self._refreshed, done, now)
            for prefix_hash in done:
                del self._touched[prefix_hash]
            self._refreshes_again_at = now if len(done) == len(touched) else now + _NO_WRITES_S

    def _renewed(self, prefix_hashes: Sequence[bytes]) -> list[bytes]:
        """Renew the time to live of these blocks, and return all except those that failed."""
        names = self._names_of(prefix_hashes) or {}
        keys = list(itertools.chain(*names.values()))
        answers = self._ask([("EXPIRE", key, self._ttl_s) for key in keys], _SMALL_COMMANDS)
        if answers is None:
            return []
        errors = {
            key
            for key, answer in zip(keys, answers, strict=True)
            if isinstance(answer, ServerError)
        }
        return [prefix_hash for prefix_hash, pieces in names.items() if errors.isdisjoint(pieces)]

    def _names_of(self, prefix_hashes: Sequence[bytes]) -> dict[bytes, list[str]] | None:
        """Return the keys of each block's pieces, or None if the server is unreachable.

        The length in the first piece determines the number of keys. The list is empty if the block
        is missing or has a foreign value. Blocks with other errors are omitted.
        """
        commands: list[Command] = [
            ("GETRANGE", *self._seal.keys(prefix_hash, 0), *HEAD) for prefix_hash in prefix_hashes
        ]
        heads = self._ask(commands, _SMALL_COMMANDS)
        if heads is None:
            return None
        return {
            prefix_hash: self._seal.keys(prefix_hash, value_bytes_at(self._seal, head))
            if head and isinstance(head, bytes)
            else []
            for prefix_hash, head in zip(prefix_hashes, heads, strict=True)
            if not isinstance(head, ServerError) or head.code == "WRONGTYPE"
        }

    def _ask(self, commands: Sequence[Command], at_once: int) -> list[Any] | None:
        if self._closed or self._server.is_off:
            return None
        answers = self._server.ask(commands, at_once)
        failed = answers is None or any(isinstance(answer, ServerError) for answer in answers)
        self._count(errors=int(failed))
        return answers

    def _saw(self, prefix_hash: bytes) -> None:
        """Record that a block is on the server now."""
        with self._lock:
            _remember(self._seen, [prefix_hash], self._clock())

    def _lost(self, *prefix_hashes: bytes) -> None:
        """Record that the first of these blocks is missing from the server.

        The other blocks follow it in the chain and are probably gone too. All of them are removed
        from the blocks known to be on the server.
        """
        with self._lock:
            self._dropped.add(hash_ for hash_ in prefix_hashes[:1] if hash_ in self._seen)
            for prefix_hash in prefix_hashes:
                self._seen.pop(prefix_hash, None)

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, number in more.items():
                self._counts[name] += number


_COUNTERS = [field.name for field in dataclasses.fields(TierStats) if field.type == "int"]


def _remember(times: dict[bytes, float], prefix_hashes: Sequence[bytes], now: float) -> None:
    """Set the time of these blocks, and keep only the latest `_MOST_SEEN` entries."""
    for prefix_hash in prefix_hashes:
        times.pop(prefix_hash, None)
        times[prefix_hash] = now
        if len(times) > _MOST_SEEN:
            del times[next(iter(times))]


def _secret(secret: str | None, environment: Mapping[str, str], trust: bool) -> str | None:
    if secret is None:
        secret = environment.get(SECRET_VARIABLE)
    if secret is not None and len(secret) < _SHORTEST_SECRET:
        raise ConfigError(
            f"the secret of the Redis tier has {len(secret)} characters, but needs at least "
            f"{_SHORTEST_SECRET}; set {SECRET_VARIABLE} to the output of: openssl rand -hex 32"
        )
    if secret is None and not trust:
        raise ConfigError(
            f"redis_url needs a secret: set {SECRET_VARIABLE} to the same random string on all "
            "machines that share this cache (openssl rand -hex 32), or redis_trust=True to trust "
            "every value on the server"
        )
    return secret


def _batches(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield batches of consecutive indices, each with about 8 MiB and at least one block."""
    batch: list[int] = []
    taken = 0
    for index, size in enumerate(sizes):
        if batch and taken + size > _PIPELINE_BYTES:
            yield batch
            batch = []
            taken = 0
        batch.append(index)
        taken += size
    if batch:
        yield batch


def _at_once(value_bytes: int) -> int:
    """Return how many commands fit in a pipeline of about 8 MiB, for values of this length."""
    return max(1, _PIPELINE_BYTES // piece_lengths(value_bytes)[0])
