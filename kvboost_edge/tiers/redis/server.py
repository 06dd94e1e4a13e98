"""A Redis server as the tier sees it: pipelines of commands, what went wrong in words of our own,
when to ask again.

What a server says is never repeated: its errors may quote what we sent, passwords included.
"""

from __future__ import annotations

import importlib
import logging
import re
import ssl
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvboost_edge.errors import BackendUnavailable, install_extra
from kvboost_edge.tiers.redis.address import ServerAddress
from kvboost_edge.tiers.redis.breaker import CircuitBreaker

if TYPE_CHECKING:
    import redis

__all__ = ["Command", "RedisConnection", "ServerError"]

_LOG = logging.getLogger(__name__)
_TIMEOUT_S = 1.0
Command = tuple[str | bytes | memoryview | int, ...]

_WORDS = {
    "OOM": "it is out of memory and evicts nothing: set its maxmemory-policy to allkeys-lru",
    "READONLY": "it is a read-only replica",
    "MISCONF": "it cannot save its snapshots and refuses writes",
    "WRONGPASS": "it refuses the user or password, or wants one",
    "NOPERM": "the user lacks a permission",
    "LOADING": "it is still loading its data",
    "MOVED": "it is part of a cluster, which is not supported",
    "CLUSTERDOWN": "it is part of a cluster, which is not supported",
}
_CODE = re.compile(r"[A-Z]{2,20}(?= |$)")


class ServerError(Exception):
    """What a server answered to one command in place of a result; `code` is its first word."""

    def __init__(self, code: str) -> None:
        super().__init__(_WORDS.get(code, f"it answers {code}"))
        self.code = code


class RedisConnection:
    """One connection, made on first use. `ask` is called by one thread at a time; the rest by
    any.
    """

    def __init__(self, address: ServerAddress, clock: Callable[[], float]) -> None:
        try:
            self._redis = importlib.import_module("redis")
            retry = importlib.import_module("redis.retry").Retry(
                importlib.import_module("redis.backoff").NoBackoff(), 0
            )
        except ImportError as error:
            raise BackendUnavailable(
                "redis_url needs the package 'redis', which is not installed; "
                f"install the extra: {install_extra('redis')}"
            ) from error
        self.place = address.place
        self.trouble = ""
        """Why it is not asked, or was not reached last time; "" when all is well."""
        self._breaker = CircuitBreaker(clock)
        # A retry would double the time a request waits for a server that is gone. Protocol 2 needs
        # no HELLO.
        self._client: redis.Redis = self._redis.Redis(
            **address.options,
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
            retry=retry,
            protocol=2,
        )

    @property
    def is_off(self) -> bool:
        """Whether the server is left alone for a while after failures."""
        return self._breaker.is_open

    def ask(self, commands: Sequence[Command], at_once: int) -> list[Any] | None:
        """One answer per command, `ServerError`s among them, in pipelines of `at_once`; None: not
        reached, or off.
        """
        answers: list[Any] = []
        if not commands:
            return answers
        for start in range(0, len(commands), at_once):
            if self._breaker.is_open:
                return None
            try:
                pipeline: Any = self._client.pipeline(transaction=False)
                for command in commands[start : start + at_once]:
                    pipeline.execute_command(*command)
                answers += pipeline.execute(raise_on_error=False)
            except (self._redis.RedisError, OSError) as error:
                self._failed(self._in_words(error))
                return None
        answers = [
            ServerError(_code(answer)) if isinstance(answer, Exception) else answer
            for answer in answers
        ]
        errors = [answer for answer in answers if isinstance(answer, ServerError)]
        unusable = next((error for error in errors if error.code not in _OF_ONE_COMMAND), None)
        if unusable is not None:
            self._failed(str(unusable))
            return answers
        if self._breaker.succeeded():
            _LOG.info("%s answers again", self.place)
        self.trouble = next((str(error) for error in errors if error.code == "NOPERM"), "")
        return answers

    def close(self) -> None:
        """Let go of the connection."""
        self._client.close()

    def _failed(self, reason: str) -> None:
        self.trouble = reason
        if self._breaker.failed():
            _LOG.warning(
                "%s is left alone for 30 s at a time, until it answers: %s", self.place, reason
            )

    def _in_words(self, error: Exception) -> str:
        kinds = self._redis
        if isinstance(
            error, (kinds.AuthenticationError, kinds.AuthenticationWrongNumberOfArgsError)
        ):
            return _WORDS["WRONGPASS"]
        if isinstance(error, (kinds.TimeoutError, TimeoutError)):
            return f"no answer within {_TIMEOUT_S:g} s"
        below: BaseException | None = error
        while below is not None:
            if isinstance(below, ssl.SSLCertVerificationError):
                return f"its certificate is refused: {below.verify_message}"
            if (
                isinstance(below, OSError)
                and below.strerror
                and not isinstance(below, kinds.RedisError)
            ):
                return below.strerror
            below = below.__cause__ or below.__context__
        code = _code(error)
        return _WORDS.get(
            code,
            "the connection broke"
            if isinstance(error, kinds.ConnectionError)
            else f"it answers {code}",
        )


_OF_ONE_COMMAND = frozenset({"WRONGTYPE", "OOM", "READONLY", "MISCONF", "NOPERM"})
"""Answers that leave the server usable: for other keys, or for reading."""


def _code(error: Exception) -> str:
    """The first word of a server's error. redis-py takes some of them away and says them by its own
    classes.
    """
    named = _CLASSES.get(type(error).__name__)
    found = _CODE.match(str(error))
    return named or (found.group() if found else "ERR")


_CLASSES = {
    "OutOfMemoryError": "OOM",
    "ReadOnlyError": "READONLY",
    "NoPermissionError": "NOPERM",
    "AuthenticationError": "WRONGPASS",
    "BusyLoadingError": "LOADING",
    "MovedError": "MOVED",
    "AskError": "MOVED",
    "ClusterDownError": "CLUSTERDOWN",
    "MasterDownError": "CLUSTERDOWN",
}
