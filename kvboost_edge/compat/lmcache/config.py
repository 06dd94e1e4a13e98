"""Configuration and metadata of an engine, under LMCache's names."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kvboost_edge.errors import ConfigError
from kvboost_edge.kvcache.hashing import narrowed_root
from kvboost_edge.options import read_bytes
from kvboost_edge.tiers.redis.address import URL_SCHEMES

__all__ = ["FORMATS", "LMCacheEngineConfig", "LMCacheEngineMetadata", "Metadata", "space_of"]

FORMATS = ("huggingface", "vllm")
_OWN = frozenset({"redis_secret", "redis_trust", "redis_ttl_s"})
_NOT_OF_THE_CACHE = frozenset({"log_level", "track_usage", "use_experimental"})
_LATER: dict[str, Any] = {
    "chunk_size": 256,
    "local_cpu": True,
    "max_local_cpu_size": 5.0,
    "local_disk": None,
    "max_local_disk_size": 0.0,
    "remote_url": None,
    "remote_serde": "naive",
    "cache_policy": "LRU",
    "save_decode_cache": False,
    "save_unfull_chunk": False,
}


@dataclasses.dataclass(frozen=True)
class LMCacheEngineConfig:
    """Chunk size and backends of an engine. URLs and secrets are left out of the repr.

    Attributes:
        chunk_size: tokens per chunk, at least 1.
        save_decode_cache: whether connectors store the KV of generated tokens. Only connectors read
            this option. The engine stores everything that is passed to it.
        backend: "memory" (or "cpu"), "file:///directory", or the URL of a Redis or Valkey server
            (redis://, valkey://, with TLS rediss://, valkeys://, or unix://). A list of backends is
            ordered from nearest to farthest: all of them are written, and the first one that has a
            chunk serves it.
        max_memory_bytes: limit of "memory", as a number or a text such as "4GB". The least recently
            used chains are evicted first, beginning at their tails.
        max_disk_bytes: limit of the directory, as a number or a text. The default, None, means 16
            GiB or a fifth of the free space, whichever is smaller.
        redis_secret: secret that authenticates stored values. The default, None, reads the
            environment variable KVBOOST_EDGE_REDIS_SECRET.
        redis_trust: whether to trust all values on the server if there is no secret.
        redis_ttl_s: seconds that a chunk stays in Redis after its last use.
        save_unfull_chunk: whether to store a last chunk with fewer tokens.

    Raises:
        ConfigError: an option is invalid.
    """

    chunk_size: int = 256
    save_decode_cache: bool = False
    backend: str | Sequence[str] = dataclasses.field(default="memory", repr=False)
    max_memory_bytes: int | float | str = 1 << 30
    max_disk_bytes: int | float | str | None = None
    redis_secret: str | None = dataclasses.field(default=None, repr=False)
    redis_trust: bool = False
    redis_ttl_s: int = 86_400
    save_unfull_chunk: bool = True

    def __post_init__(self) -> None:
        if (
            isinstance(self.chunk_size, bool)
            or not isinstance(self.chunk_size, int)
            or self.chunk_size < 1
        ):
            raise ConfigError(f"chunk_size={self.chunk_size!r} must be an integer of at least 1")
        for name in ("save_decode_cache", "redis_trust", "save_unfull_chunk"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be True or False")
        for name in ("max_memory_bytes", "max_disk_bytes"):
            value = getattr(self, name)
            if isinstance(value, str):
                with contextlib.suppress(ValueError):
                    value = read_bytes(value)
                    object.__setattr__(self, name, value)
            if value is not None and not _is_size(value):
                raise ConfigError(f"{name}={value!r} must be a number of bytes of at least 1")
        given = tuple(self.backend) if isinstance(self.backend, (list, tuple)) else (self.backend,)
        object.__setattr__(self, "backend", given[0] if len(given) == 1 else given)
        kinds = [_kind(backend) for backend in given]
        if not kinds or len(set(kinds)) < len(kinds):
            raise ConfigError(
                f"backend={kinds} must name at least one backend and each kind at most once"
            )

    @classmethod
    def from_defaults(cls, **options: Any) -> LMCacheEngineConfig:
        """Build a configuration from lmcache.v1's options, whose sizes are in GiB.

        The options and their defaults are chunk_size=256, local_cpu=True, max_local_cpu_size=5.0,
        local_disk=None (a directory or file:// URL), max_local_disk_size=0.0, remote_url=None
        (Redis), remote_serde="naive", cache_policy="LRU", save_decode_cache=False and
        save_unfull_chunk=False. redis_secret, redis_trust and redis_ttl_s are accepted too.

        Raises:
            ConfigError: an option is unknown or invalid.
        """
        unknown = sorted(options.keys() - _LATER.keys() - _OWN)
        if unknown:
            raise ConfigError(
                f"{', '.join(unknown)}: not supported; use only "
                f"{', '.join(sorted(_LATER.keys() | _OWN))}"
            )
        own = {name: value for name, value in options.items() if name in _OWN}
        given = {**_LATER, **options}
        for name, only in (("cache_policy", "LRU"), ("remote_serde", "naive")):
            if given[name] != only:
                raise ConfigError(f"{name}={given[name]!r} is not supported; use {only!r}")
        backends = ["memory"] if given["local_cpu"] else []
        if given["local_disk"]:
            backends.append("file://" + str(given["local_disk"]).removeprefix("file://"))
            own["max_disk_bytes"] = _gib("max_local_disk_size", given["max_local_disk_size"])
        if given["remote_url"]:
            backends.append(given["remote_url"])
        for name in ("chunk_size", "save_decode_cache", "save_unfull_chunk"):
            own[name] = given[name]
        return cls(
            **own,
            backend=backends,
            max_memory_bytes=_gib("max_local_cpu_size", given["max_local_cpu_size"]),
        )

    @classmethod
    def from_env(cls, environment: Mapping[str, str] | None = None) -> LMCacheEngineConfig:
        """Build a configuration from LMCACHE_CHUNK_SIZE, LMCACHE_LOCAL_CPU and similar variables.

        The options are those of `from_defaults`. The Redis secret is read from
        KVBOOST_EDGE_REDIS_SECRET.

        Raises:
            ConfigError: a variable is not supported, or its value is invalid.
        """
        environment = os.environ if environment is None else environment
        options: dict[str, Any] = {}
        for variable in sorted(environment):
            name = variable.removeprefix("LMCACHE_").lower()
            if not variable.startswith("LMCACHE_") or name in _NOT_OF_THE_CACHE:
                continue
            if name not in _LATER:
                raise ConfigError(f"the environment variable {variable} is not supported; unset it")
            options[name] = _parsed(variable, environment[variable], _LATER[name])
        return cls.from_defaults(**options)

    @property
    def places(self) -> tuple[tuple[str, str], ...]:
        """Kind ("memory", "disk" or "redis") and path or URL of each backend, nearest first."""
        given = (self.backend,) if isinstance(self.backend, str) else self.backend
        return tuple((_kind(backend), backend.removeprefix("file://")) for backend in given)


@dataclasses.dataclass(frozen=True)
class LMCacheEngineMetadata:
    """Identity of the stored KV. Only engines with equal metadata share chunks.

    Attributes:
        model_name: any text that identifies the model.
        world_size: number of workers of the model.
        worker_id: index of this worker.
        fmt: axes of k and v: "huggingface" for [num_heads, num_tokens, head_size], "vllm" for
            [num_tokens, num_heads, head_size].
    """

    model_name: str
    world_size: int
    worker_id: int
    fmt: str

    def __post_init__(self) -> None:
        if not isinstance(self.model_name, str) or not self.model_name:
            raise ConfigError(f"model_name={self.model_name!r} must be a non-empty string")
        for name in ("world_size", "worker_id"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"{name}={value!r} must be an integer of at least 0")
        if self.fmt not in FORMATS:
            raise ConfigError(f"fmt={self.fmt!r} must be one of {', '.join(FORMATS)}")

    @property
    def space(self) -> bytes:
        """Root hash of the engine's chunk chains."""
        return space_of(self.model_name, self.world_size, self.worker_id, self.fmt)


class Metadata(Protocol):
    """Metadata that an engine needs: the axes of k and v, and the root hash of its chunk chains."""

    @property
    def fmt(self) -> str: ...

    @property
    def space(self) -> bytes: ...


def space_of(*fields: object) -> bytes:
    """Return a 32-byte hash of fields, used as the root of chunk chains.

    Fields have the same hash only if they and their order are equal.
    """
    root = b"kvboost-edge lmcache space 1"
    for index, field in enumerate(fields):
        root = narrowed_root(root, f"{index} {type(field).__name__}", repr(field))
    return root


def _gib(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 2**33:
        raise ConfigError(f"{name}={value!r} must be a size in GiB above 0")
    return max(1, int(value * 2**30))


def _parsed(variable: str, text: str, default: object) -> object:
    """Convert the text of a variable to the type of the option's default."""
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    try:
        if isinstance(default, bool):
            return words[text.lower()]
        return text if default is None else type(default)(text)  # type: ignore[call-arg]
    except (KeyError, ValueError):
        kind = "true or false" if isinstance(default, bool) else "a number"
        raise ConfigError(f"{variable}={text!r} must be {kind}") from None


def _is_size(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and 1 <= value < 2**63


def _kind(backend: object) -> str:
    if backend in ("memory", "cpu"):
        return "memory"
    if isinstance(backend, str) and backend.startswith("file://") and backend != "file://":
        return "disk"
    if isinstance(backend, str) and backend.lower().startswith(URL_SCHEMES):
        return "redis"
    scheme = (
        backend.partition("://")[0] + "://…"
        if isinstance(backend, str) and "://" in backend
        else repr(backend)
    )
    raise ConfigError(
        f"backend={scheme} must be 'memory', 'file:///directory' or a URL: {', '.join(URL_SCHEMES)}"
    )
