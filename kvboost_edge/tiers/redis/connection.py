"""Connection to a Redis server, with pipelined commands, readable errors and a circuit breaker.

Error texts from the server are never quoted, because they may repeat what was sent, including
passwords.
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
    "WRONGPASS": "it rejects the user or password, or requires one",
    "NOPERM": "the user lacks a permission",
    "LOADING": "it is still loading its data",
    "MOVED": "it is part of a cluster, which is not supported",
    "CLUSTERDOWN": "it is part of a cluster, which is not supported",
}
_CODE = re.compile(r"[A-Z]{2,20}(?= |$)")


class ServerError(Exception):
    """Error reply of the server to one command.

    Attributes:
        code: error code, which is the first word of the reply.
    """

    def __init__(self, code: str) -> None:
        super().__init__(_WORDS.get(code, f"it answers {code}"))
        self.code = code


class RedisConnection:
    """Connection to a Redis server, opened on first use.

    Only one thread at a time may call `ask`. All other members are safe to use from any thread.

    Attributes:
        place: URL of the server without secrets.
        trouble: why the server is not used or could not be reached. "" if all is well.
    """

    def __init__(self, address: ServerAddress, clock: Callable[[], float]) -> None:
        try:
            self._redis = importlib.import_module("redis")
            retry = importlib.import_module("redis.retry").Retry(
                importlib.import_module("redis.backoff").NoBackoff(), 0
            )
        except ImportError as error:
            raise BackendUnavailable(
                "redis_url needs the 'redis' package, which is not installed; install the extra: "
                f"{install_extra('redis')}"
            ) from error
        self.place = address.place
        self.trouble = ""
        self._breaker = CircuitBreaker(clock)
        # Do not retry, which would double the time that requests wait for an unreachable server.
        # Use protocol 2, because it needs no HELLO command.
        self._client: redis.Redis = self._redis.Redis(
            **address.options,
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
            retry=retry,
            protocol=2,
        )

    @property
    def is_off(self) -> bool:
        """True while the server is not used, because it failed repeatedly."""
        return self._breaker.is_open

    def ask(self, commands: Sequence[Command], at_once: int) -> list[Any] | None:
        """Send commands in pipelines, and return one reply for each.

        A failed command has a `ServerError` as its reply. The result is None if the server is
        unreachable or currently not used.

        Args:
            commands: the commands to send.
            at_once: maximum number of commands per pipeline.
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
            _LOG.info("%s is available again", self.place)
        self.trouble = next((str(error) for error in errors if error.code == "NOPERM"), "")
        return answers

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _failed(self, reason: str) -> None:
        self.trouble = reason
        if self._breaker.failed():
            _LOG.warning("%s is unavailable, retrying every 30 s: %s", self.place, reason)

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
                return f"its certificate is not trusted: {below.verify_message}"
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
"""Error codes that leave the server usable, at least for other keys or for reading."""


def _code(error: Exception) -> str:
    """Return the error code of an error reply."""
    # redis-py strips the code from some messages and raises a specific class for each instead.
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
