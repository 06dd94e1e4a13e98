"""All flags of the server in one frozen object, checked when it is made. Needs no web framework."""

from __future__ import annotations

import dataclasses
import hashlib
import ipaddress
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from kvboost_edge.config import MAX_WEIGHT
from kvboost_edge.errors import ConfigError

__all__ = [
    "CONTEXT_OVERFLOWS",
    "LOG_FORMATS",
    "LOG_LEVELS",
    "MAX_KEEP_ALIVE",
    "NORMALISERS",
    "ServerSettings",
    "collect_api_keys",
    "is_loopback",
    "tenant_of_key",
]

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
LOG_FORMATS = ("auto", "json", "text")
MAX_KEEP_ALIVE = 365 * 86_400.0
CONTEXT_OVERFLOWS = ("error", "drop_oldest")
NORMALISERS = ("tools", "arguments", "billing", "thinking")
"""What is put back as it was first given, or left out, so that prompts begin alike; see
cache_report/normalization.py.
"""

_KEEP_ALIVE = 300.0
_KEY_PATTERN = re.compile(r"(?P<key>[\x21-\x7e]+)([ \t]+weight=(?P<weight>[\x21-\x7e]*))?")
_HOST_PATTERN = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?|[0-9a-fA-F:]+|\*")
_ORIGIN_PATTERN = re.compile(r"https?://[A-Za-z0-9._\-\[\]:]+")
# name -> (lowest, highest); the highest only keeps arithmetic and timers sane.
_INTEGERS: dict[str, tuple[int, int]] = {
    "port": (0, 65535),
    "max_queue_size": (0, 1_000_000),
    "max_body_bytes": (1024, 2**32),
    "max_connections": (1, 100_000),
}
_SECONDS = (
    "request_timeout",
    "header_seconds",
    "body_seconds",
    "write_seconds",
    "keep_alive_seconds",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How the server listens, whom it lets in and what it bears. Times are seconds unless the name
    says otherwise.

    model_name, model_aliases    names of the model: answers tell the first, requests may use each
    api_keys            accepted bearer keys; empty: no key is asked for. Each key is a tenant of
                        its own; with "KEY weight=4" it gets four times what a tenant without a
                        weight gets while both want more
    admin_api_keys      keys that may do more as soon as there is a second key: see and reset what
                        all tenants share
    insecure            allow a bind beyond loopback without a key
    allowed_hosts       Host headers accepted beside loopback names, the bind address and the
                        address of the connection itself; "*" accepts all
    cors_origins        origins whose pages may call the server; none by default
    max_batch_size      sequences computed together (the engine's max_num_seqs); None: by the size
                        of the pool
    batch_window_ms     longest wait of a request whose first block another request is computing, so
                        that those that share a prefix start together; 0 turns it off
    max_queue_size      requests that may wait beside the `max_batch_size` that run; the next one
                        gets 503
    max_queue_tokens    tokens of all requests in flight; None: 16 times what the pool holds. With
                        several keys half of the places, tokens and bytes of bodies is kept for them
                        by weight, see work/shares.py
    request_timeout     from the last byte of the request to the end of its answer; then 504 and the
                        work stops
    drain_seconds       after SIGTERM answers in progress may take so long
    max_connections     open connections; the next one gets 503 and is closed
    header_seconds, body_seconds    a request's head and body must be complete within these
    write_seconds       a client that takes nothing for so long is dropped
    keep_alive_seconds  an idle connection is closed after these
    request_history     so long the tokens and texts of requests are kept in memory, to say why a
                        prompt was read again; 0: not at all
    keep_alive          an idle model is unloaded after these; None: the first one stays, others for
                        300 seconds
    max_model_bytes     memory that weights, pools and states of all loaded models may take; None:
                        what was free
    context_overflow    of a chat that has outgrown the context: "error", or "drop_oldest" leaves
                        out its oldest turns
    normalise           what is put back as it was first given, see cache_report/normalization.py
    log_format          "auto": lines for people where they are written to a terminal, else JSON
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str = "kvboost-edge"
    model_aliases: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    admin_api_keys: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    insecure: bool = False
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_batch_size: int | None = None
    batch_window_ms: float = 20.0
    max_queue_size: int = 256
    max_queue_tokens: int | None = None
    request_timeout: float = 120.0
    drain_seconds: float = 30.0
    max_body_bytes: int = 8 * 1024 * 1024
    max_connections: int = 512
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    write_seconds: float = 30.0
    keep_alive_seconds: float = 15.0
    request_history: float = 3600.0
    keep_alive: float | None = None
    max_model_bytes: int | None = None
    context_overflow: str = "error"
    normalise: tuple[str, ...] = NORMALISERS
    log_level: str = "info"
    log_format: str = "auto"

    def __post_init__(self) -> None:
        for name, (low, high) in _INTEGERS.items():
            _check_int(name, getattr(self, name), low, high)
        if self.max_batch_size is not None:
            _check_int("max_batch_size", self.max_batch_size, 1, 4096)
        if self.max_queue_tokens is not None:
            _check_int("max_queue_tokens", self.max_queue_tokens, 1, 2**40)
        for name in _SECONDS:
            _check_number(self, name, low=0.001, high=86_400.0)
        _check_number(self, "drain_seconds", low=0.0, high=86_400.0)
        _check_number(self, "request_history", low=0.0, high=86_400.0)
        if self.keep_alive is not None:
            _check_number(self, "keep_alive", low=0.0, high=MAX_KEEP_ALIVE)
        if self.max_model_bytes is not None:
            _check_int("max_model_bytes", self.max_model_bytes, 1, 2**50)
        if self.context_overflow not in CONTEXT_OVERFLOWS:
            raise ConfigError(
                f"context_overflow={self.context_overflow!r} is not one of "
                f"{', '.join(CONTEXT_OVERFLOWS)}"
            )
        unknown = [kind for kind in self.normalise if kind not in NORMALISERS]
        if unknown:
            raise ConfigError(f"normalise={unknown[0]!r} is not one of {', '.join(NORMALISERS)}")
        _check_number(self, "batch_window_ms", low=0.0, high=10_000.0)
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(f"log_level={self.log_level!r} is not one of {', '.join(LOG_LEVELS)}")
        if self.log_format not in LOG_FORMATS:
            raise ConfigError(
                f"log_format={self.log_format!r} is not one of {', '.join(LOG_FORMATS)}"
            )
        for name in self.model_names:
            if not name or not name.isprintable():
                raise ConfigError("model_name must be printable text with at least one character")
        if len(self.tenant_weights) != len(self.all_keys):
            raise ConfigError(
                "an API key is given twice; give each key once, an admin key as such only"
            )
        for host in self.allowed_hosts:
            if not _HOST_PATTERN.fullmatch(host):
                raise ConfigError(
                    f"allowed_hosts holds {host!r}; give a host name or address without port, or "
                    "'*'"
                )
        for origin in self.cors_origins:
            if not _ORIGIN_PATTERN.fullmatch(origin):
                raise ConfigError(
                    f"cors_origins holds {origin!r}; give scheme and host, such as "
                    "https://example.org"
                )
        if not self.host:
            raise ConfigError("host must be an address or a name, such as 127.0.0.1")
        if not (is_loopback(self.host) or self.all_keys or self.insecure):
            raise ConfigError(
                f"host={self.host!r} is reachable from other machines and no API key is set; "
                "set one (--api-key-file, KVBOOST_API_KEY), bind 127.0.0.1, or say --insecure"
            )

    @property
    def model_names(self) -> tuple[str, ...]:
        """Every name that requests may use, each once."""
        return tuple(dict.fromkeys((self.model_name, *self.model_aliases)))

    def keep_alive_of(self, number: int) -> float:
        """Of the model of that number, see `keep_alive`; infinite: it stays."""
        if self.keep_alive is not None:
            return self.keep_alive
        return _KEEP_ALIVE if number else math.inf

    @property
    def all_keys(self) -> tuple[str, ...]:
        """Every accepted key, with its weight where one is given."""
        return (*self.api_keys, *self.admin_api_keys)

    @property
    def tenant_weights(self) -> dict[str, float]:
        """Of each key's tenant, its share beside the others'."""
        return {tenant_of_key(key): _weight_of_key(key) for key in self.all_keys}


def tenant_of_key(key: str) -> str:
    """The tenant that an API key, given with a weight or without, stands for: the SHA-256 of the
    key, in hex.
    """
    return hashlib.sha256(_parts_of_key(key)["key"].encode("ascii")).hexdigest()


def _weight_of_key(key: str) -> float:
    text = _parts_of_key(key)["weight"]
    if text is None:
        return 1.0
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 1 / MAX_WEIGHT <= weight <= MAX_WEIGHT:
        raise ConfigError(
            f"weight={text} of an API key must be a number in {1 / MAX_WEIGHT:g}..{MAX_WEIGHT:g}"
        )
    return weight


def _parts_of_key(key: str) -> re.Match[str]:
    found = _KEY_PATTERN.fullmatch(key) if isinstance(key, str) else None
    if found is None:  # the key stays out of the message
        raise ConfigError(
            "an API key must be printable ASCII without spaces, at least one character; behind it "
            "may stand a space and weight=NUMBER, its share beside other keys"
        )
    return found


def is_loopback(host: str) -> bool:
    """True for an address that only this machine reaches: a loopback address or "localhost"."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def collect_api_keys(
    given: Iterable[str] = (),
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    variable: str = "KVBOOST_API_KEY",
) -> tuple[str, ...]:
    """Keys of the command line, of a file (one a line, '#' begins a comment) and of two environment
    variables, `variable` (one key) and `variable` + "S" (commas between them), each once. A weight
    may stand behind each, as in `ServerSettings`. Raises ConfigError for a file that cannot be read
    or is empty.
    """
    environment = os.environ if environment is None else environment
    keys = list(given)
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"the API key file {str(file)!r} cannot be read: {type(error).__name__}"
            ) from error
        found = [
            line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")
        ]
        if not found:
            raise ConfigError(f"the API key file {str(file)!r} holds no key; write one a line")
        keys += found
    for name, separator in ((variable, None), (f"{variable}S", ",")):
        value = environment.get(name, "")
        found = [
            key.strip() for key in (value.split(separator) if separator else [value]) if key.strip()
        ]
        if value and not found:
            raise ConfigError(
                f"the environment variable {name} is set and holds no key; unset it for an open "
                "server"
            )
        keys += found
    return tuple(dict.fromkeys(keys))


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}={value!r} must be an integer")
    if not low <= value <= high:
        raise ConfigError(f"{name}={value} must be in {low}..{high}")


def _check_number(settings: ServerSettings, name: str, *, low: float, high: float) -> None:
    value = getattr(settings, name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{name}={value!r} must be a finite number")
    if not low <= value <= high:
        raise ConfigError(f"{name}={value!r} must be in {low:g}..{high:g}")
    object.__setattr__(settings, name, float(value))
