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
_REDIS = ("redis://", "rediss://", "unix://", "valkey://")


@dataclasses.dataclass(frozen=True)
class LMCacheEngineConfig:
    """Chunk size and backends of an engine. The repr shows neither URLs nor secrets.

    Attributes:
        chunk_size: tokens in a chunk, at least 1.
        save_decode_cache: whether connectors store the KV of decoding. They read this option; the
            engine itself stores everything it is given.
        backend: "memory" (or "cpu"), "file:///directory", or a URL with redis://, rediss://,
            unix:// or valkey://. Of several backends, nearest first, all are written, and the first
            that has a chunk serves it.
        max_memory_bytes: limit of "memory", a number or a text such as "4GB". Least recently used
            chains are evicted first, tails before heads.
        max_disk_bytes: limit of the directory, in the same form; None: the smaller of 16 GiB and a
            fifth of the free space.
        redis_secret: secret that seals values; None: the environment variable
            KVBOOST_EDGE_REDIS_SECRET.
        redis_trust: without a secret, trust every value on the server.
        redis_ttl_s: seconds that a chunk lives in Redis after its last use.
        save_unfull_chunk: whether a last chunk of fewer tokens is stored.

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
        """Return a configuration with the later engine's names and defaults; sizes are in GiB.

        The options are chunk_size=256, local_cpu=True, max_local_cpu_size=5.0, local_disk=None (a
        directory or file:// URL), max_local_disk_size=0.0, remote_url=None (Redis),
        remote_serde="naive", cache_policy="LRU", save_decode_cache=False and
        save_unfull_chunk=False. redis_secret, redis_trust and redis_ttl_s are as above. Other
        options are refused by name.
        """
        unknown = sorted(options.keys() - _LATER.keys() - _OWN)
        if unknown:
            raise ConfigError(
                f"{', '.join(unknown)}: not supported; supported: "
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
        """Return the configuration in LMCACHE_CHUNK_SIZE, LMCACHE_LOCAL_CPU and so on.

        The options are those of `from_defaults`. Unsupported variables are refused by name. The
        secret is KVBOOST_EDGE_REDIS_SECRET.
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
        """Kind ("memory", "disk", "redis") and path or URL of each backend, nearest first."""
        given = (self.backend,) if isinstance(self.backend, str) else self.backend
        return tuple((_kind(backend), backend.removeprefix("file://")) for backend in given)


@dataclasses.dataclass(frozen=True)
class LMCacheEngineMetadata:
    """Identity of the KV; engines of equal metadata share it, all others do not.

    Attributes:
        model_name: any text that names the model.
        world_size: number of workers of the model.
        worker_id: this worker.
        fmt: axes of k and v: "huggingface" is [num_heads, num_tokens, head_size], "vllm" is
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
        """Root hash of its chunk chains."""
        return space_of(self.model_name, self.world_size, self.worker_id, self.fmt)


class Metadata(Protocol):
    """Metadata that an engine uses: axes of k and v, and root hash of its chunk chains."""

    @property
    def fmt(self) -> str: ...

    @property
    def space(self) -> bytes: ...


def space_of(*fields: object) -> bytes:
    """Return a 32-byte hash of fields, the root of chunk chains.

    Only equal fields in equal order have the same hash.
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
    """Return the text converted to the type of the option's default."""
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
    if isinstance(backend, str) and backend.startswith(_REDIS):
        return "redis"
    scheme = (
        backend.partition("://")[0] + "://…"
        if isinstance(backend, str) and "://" in backend
        else repr(backend)
    )
    raise ConfigError(
        f"backend={scheme} must be 'memory', 'file:///directory' or a URL: {', '.join(_REDIS)}"
    )
