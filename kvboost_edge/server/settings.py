"""Settings of the server. This module needs no web framework."""

from __future__ import annotations

import dataclasses
import hashlib
import ipaddress
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from kvboost_edge.config import (
    BACKGROUND,
    MAX_SESSION_BYTES,
    MAX_SESSIONS,
    MAX_WEIGHT,
    GenerationMode,
)
from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.errors import ConfigError
from kvboost_edge.models.pull import MAX_PULL_BYTES
from kvboost_edge.models.pull.names import checked_registry
from kvboost_edge.options import check_options, option, option_of
from kvboost_edge.server.model_defaults import NO_DEFAULTS, ModelDefaults

__all__ = [
    "CONTEXT_OVERFLOWS",
    "LOG_FORMATS",
    "LOG_LEVELS",
    "MAX_KEEP_ALIVE",
    "NORMALIZERS",
    "ServerSettings",
    "collect_api_keys",
    "is_loopback",
    "tenant_of_key",
]

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
LOG_FORMATS = ("auto", "json", "text")
MAX_KEEP_ALIVE = 365 * 86_400.0
CONTEXT_OVERFLOWS = ("error", "drop_oldest")
NORMALIZERS = ("tools", "arguments", "billing", "thinking")
"""Kinds of request normalization, see cache_report/normalization.py."""

_KEEP_ALIVE = 300.0
_KEY_PATTERN = re.compile(r"(?P<key>[\x21-\x7e]+)([ \t]+weight=(?P<weight>[\x21-\x7e]*))?")
_HOST_PATTERN = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?|[0-9a-fA-F:]+|\*")
_ORIGIN_PATTERN = re.compile(r"https?://[A-Za-z0-9._\-\[\]:]+")
_COLLECTOR_PATTERN = re.compile(r"https?://[A-Za-z0-9._\-\[\]:]+(/[\x21-\x7e]*)?")
_DAY_SECONDS = 86_400.0  # maximum value of timers


def _kinds(text: str) -> tuple[str, ...]:
    """Parse a list such as "tools,billing", or "off" for none."""
    return () if text == "off" else tuple(part.strip() for part in text.split(","))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of the server, checked on construction (ConfigError).

    docs/reference/options.md lists the settings.
    """

    host: str = option(
        "127.0.0.1",
        "IP address or host name to listen on. A non-loopback address requires an API key",
        str,
        group="Server",
        metavar="ADDRESS",
    )
    port: int = option(
        8000, "TCP port to listen on. 0 picks a free port", int, group="Server", low=0, high=65535
    )
    model_name: str = option(
        "kvboost-edge", "Name of the model in responses", group="Model", flag=None
    )
    model_aliases: tuple[str, ...] = option(
        (), "Further names by which requests may select the model", group="Model", flag=None
    )
    model_defaults: Mapping[str, ModelDefaults] | None = option(
        None,
        "System message and sampling parameters of requests that give none, by model",
        group="Model",
        flag=None,
        unset="none",
    )
    api_keys: tuple[str, ...] = option(
        (),
        "API key that clients must send. Each key is a separate tenant. A key with a weight, "
        "such as 'KEY weight=4', gets that many shares of the compute. Other users of this "
        "machine can see keys on the command line. Repeatable",
        group="Security",
        flag="--api-key",
        many=True,
        metavar="KEY",
        unset="no key, and requests need none",
        secret=True,
    )
    admin_api_keys: tuple[str, ...] = option(
        (),
        "API key that may also read and reset the data of all tenants. Repeatable",
        group="Security",
        flag="--admin-api-key",
        many=True,
        metavar="KEY",
        unset="none, but a single API key has these rights",
        secret=True,
    )
    insecure: bool = option(
        False,
        "Allow listening on a non-loopback address without an API key",
        bool,
        group="Security",
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Host header to accept. * accepts all. Repeatable",
        group="Security",
        flag="--allowed-host",
        many=True,
        metavar="NAME",
        unset="loopback names, the address to listen on and the address that the client "
        "connected to",
    )
    cors_origins: tuple[str, ...] = option(
        (),
        "Web origin whose pages may call the server, such as https://example.org. Repeatable",
        group="Security",
        flag="--cors-origin",
        many=True,
        metavar="URL",
        unset="none",
    )
    max_batch_size: int | None = option(
        None,
        "Maximum number of sequences in a batch (max_num_seqs of the engine)",
        int,
        group="Limits",
        unit="sequences",
        low=1,
        high=4096,
        unset="one per 512 tokens in the pool, at most 64",
    )
    batch_window_ms: float = option(
        20.0,
        "Maximum time that a request waits for another request to compute the prompt's first "
        "block, so that both can share a prefix. 0 turns the wait off",
        float,
        group="Limits",
        unit="milliseconds",
        low=0,
        high=10_000,
    )
    max_queue_size: int = option(
        256,
        "Maximum number of waiting requests. Further requests get status 503",
        int,
        group="Limits",
        unit="requests",
        low=0,
        high=1_000_000,
    )
    max_queue_tokens: int | None = option(
        None,
        "Maximum total number of tokens of all running and waiting requests",
        int,
        group="Limits",
        unit="tokens",
        low=1,
        high=2**40,
        unset="16 times the tokens of the pool",
    )
    request_timeout: float = option(
        120.0,
        "Maximum time from the last byte of a request to the end of its response. For a stream, it "
        "limits the time in which neither its prompt advances nor a token is sent. Later the "
        "server returns status 504",
        float,
        group="Limits",
        unit="seconds",
        low=0.001,
        high=_DAY_SECONDS,
    )
    drain_seconds: float = option(
        30.0,
        "Maximum time to finish running requests after SIGTERM or Ctrl-C",
        float,
        group="Limits",
        unit="seconds",
        low=0,
        high=_DAY_SECONDS,
    )
    max_body_bytes: int = option(
        8 * 1024 * 1024,
        "Maximum size of a request body. All bodies that the server holds may together have 8 "
        "times this size",
        int,
        group="Limits",
        unit="bytes",
        low=1024,
        high=2**32,
    )
    max_connections: int = option(
        512,
        "Maximum number of open connections. Further connections get status 503. A low limit "
        "on open files lowers it",
        int,
        group="Limits",
        unit="connections",
        low=1,
        high=100_000,
    )
    header_seconds: float = option(
        10.0,
        "Maximum time for the headers of a request to arrive",
        float,
        group="Limits",
        unit="seconds",
        low=0.001,
        high=_DAY_SECONDS,
    )
    body_seconds: float = option(
        30.0,
        "Maximum time for the body of a request to arrive. An upload to /v1/files gets this time "
        "for each MiB",
        float,
        group="Limits",
        unit="seconds",
        low=0.001,
        high=_DAY_SECONDS,
    )
    write_seconds: float = option(
        30.0,
        "Maximum time to wait for a client that does not read its response",
        float,
        group="Limits",
        unit="seconds",
        low=0.001,
        high=_DAY_SECONDS,
    )
    keep_alive_seconds: float = option(
        15.0,
        "Time until the server closes an idle connection",
        float,
        group="Limits",
        unit="seconds",
        low=0.001,
        high=_DAY_SECONDS,
    )
    otel_endpoint: str | None = option(
        None,
        "URL of an OpenTelemetry collector that receives traces over OTLP/HTTP, such as "
        "http://127.0.0.1:4318 (extra [otel]). The standard OTEL_* variables set everything else",
        str,
        group="Server",
        metavar="URL",
        unset="OTEL_EXPORTER_OTLP_ENDPOINT, otherwise no traces",
    )
    request_history: float = option(
        3600.0,
        "Time that requests are kept in memory for cache-miss reports. 0 keeps none",
        float,
        group="Limits",
        unit="seconds",
        low=0,
        high=_DAY_SECONDS,
    )
    max_sessions: int = option(
        MAX_SESSIONS,
        "Maximum number of named sessions of each API key. 0 turns sessions off",
        int,
        group="Limits",
        unit="sessions",
        low=0,
        high=10_000,
    )
    max_session_bytes: int = option(
        MAX_SESSION_BYTES,
        "Maximum size of the named sessions of each API key, such as 4GB. It counts their KV "
        "and their records",
        int,
        group="Limits",
        unit="bytes",
        low=0,
        high=2**50,
    )
    keep_alive: float | None = option(
        None,
        "Time until an idle model is unloaded",
        float,
        group="Limits",
        unit="seconds",
        low=0,
        high=MAX_KEEP_ALIVE,
        unset=f"never for the first model, {_KEEP_ALIVE:g} for others",
    )
    max_model_bytes: int | None = option(
        None,
        "Deprecated, replaced by --max-memory. Maximum memory of the weights, pools and "
        "recurrent state of all loaded models, such as 8GB. If both limits are given, the "
        "smaller one applies",
        int,
        group="Limits",
        unit="bytes",
        low=1,
        high=2**50,
        unset="the memory available at start",
    )
    model_changes: bool = option(
        True,
        "Let clients pull, create, copy and delete models, and serve pulled and created models",
        bool,
        group="Model",
        flag="--no-model-changes",
        off="Do not let clients pull, create, copy or delete models",
    )
    model_registries: tuple[str, ...] = option(
        (),
        "URL of a registry with the hub's API, from which clients may pull models named with its "
        "host. Repeatable",
        group="Model",
        flag="--model-registry",
        many=True,
        metavar="URL",
        unset="none, only the hub",
    )
    max_pull_bytes: int = option(
        MAX_PULL_BYTES,
        "Maximum size of a model that clients pull, such as 10GB",
        int,
        group="Limits",
        unit="bytes",
        low=1,
        high=2**50,
    )
    mode: GenerationMode | str = option(
        GenerationMode.PREFIX_CACHE,
        "How requests that do not set kvboost.mode use the cache: baseline not at all, "
        "prefix_cache for exact prefixes, and chunk_kv_reuse also for chunks computed at other "
        "positions. Answers in chunk_kv_reuse mode are approximate",
        GenerationMode,
        group="Cache",
    )
    reasoning_budget: tuple[str, ...] = option(
        (),
        "Maximum number of tokens of the reasoning in chats that set neither a budget nor an "
        "effort. NAME=N sets it for one model. 0 ends reasoning at once, and -1 sets no limit. "
        "Models whose reasoning cannot be limited ignore it. The flag is repeatable",
        group="Server",
        many=True,
        metavar="[NAME=]N",
        unset="no limit",
    )
    reasoning_budget_message: str | None = option(
        None,
        "Text that ends a reasoning cut by its budget, for requests that set none",
        str,
        group="Server",
        high=option_of(SamplingParams, "reasoning_budget_message").high,
        metavar="TEXT",
        unset="none",
    )
    context_overflow: str = option(
        "error",
        "What to do with a chat that exceeds the context: return an error, or drop its oldest "
        "turns",
        str,
        group="Server",
        choices=CONTEXT_OVERFLOWS,
    )
    normalise: tuple[str, ...] = option(
        NORMALIZERS,
        "Changes by clients between requests that the server undoes, which lets prefixes match: a "
        f"comma-separated list of {','.join(NORMALIZERS)}, or off",
        group="Server",
        flag="--normalise --normalize",
        read=_kinds,
        metavar="KINDS",
    )
    batch_dir: str | os.PathLike[str] | None = option(
        None,
        "Directory for uploaded files, batches and their answers. The directory turns on the "
        "batch API (/v1/files, /v1/batches). Prompts and answers are stored unencrypted",
        group="Batch API",
        metavar="DIR",
        unset="none, and the batch API is off",
    )
    batch_background: str = option(
        "spare_time",
        "When lines of batches are computed: spare_time in the time that other requests leave in "
        "each step, and idle only while no other request runs",
        str,
        group="Batch API",
        choices=BACKGROUND,
    )
    batch_retention: int = option(
        30 * 86_400,
        "Maximum time that files are kept, and time that finished batches are kept",
        int,
        group="Batch API",
        unit="seconds",
        low=3600,
        high=3650 * 86_400,
    )
    max_files: int = option(
        200,
        "Maximum number of stored files of an API key. Output files of batches count, but are "
        "never refused",
        int,
        group="Batch API",
        unit="files",
        low=1,
        high=10_000,
    )
    max_file_bytes: int = option(
        1 << 30,
        "Maximum size of all stored files of an API key, including the answers of batches",
        int,
        group="Batch API",
        unit="bytes",
        low=1024,
        high=2**50,
    )
    max_batches: int = option(
        16,
        "Maximum number of unfinished batches of an API key",
        int,
        group="Batch API",
        unit="batches",
        low=1,
        high=1000,
    )
    max_batch_lines: int = option(
        50_000,
        "Maximum number of lines of a batch",
        int,
        group="Batch API",
        unit="lines",
        low=1,
        high=10_000_000,
    )
    log_level: str = option(
        "info", "Minimum severity of logged messages", str, group="Logging", choices=LOG_LEVELS
    )
    log_format: str = option(
        "auto",
        "Format of log lines. text writes key=value pairs, and auto writes plain lines to a "
        "terminal and JSON elsewhere",
        str,
        group="Logging",
        choices=LOG_FORMATS,
    )

    def __post_init__(self) -> None:
        check_options(self, ConfigError)
        self._budgets  # noqa: B018  # checks the values
        unknown = [kind for kind in self.normalise if kind not in NORMALIZERS]
        if unknown:
            raise ConfigError(
                f"normalise contains {unknown[0]!r}, which is not one of {', '.join(NORMALIZERS)}"
            )
        for name in self.model_names:
            if not name or not name.isprintable():
                raise ConfigError(
                    f"model_name={name!r} must be printable text with at least one character"
                )
        if len(self.tenant_weights) != len(self.all_keys):
            raise ConfigError(
                "an API key is given twice; give each key once, and an admin key only as an admin "
                "key"
            )
        for url in self.model_registries:
            checked_registry(url)
        for host in self.allowed_hosts:
            if not _HOST_PATTERN.fullmatch(host):
                raise ConfigError(
                    f"allowed_hosts contains {host!r}; give a host name or address without port, "
                    "or '*'"
                )
        for origin in self.cors_origins:
            if not _ORIGIN_PATTERN.fullmatch(origin):
                raise ConfigError(
                    f"cors_origins contains {origin!r}; give the scheme and host, such as "
                    "https://example.org"
                )
        if self.otel_endpoint is not None and not _COLLECTOR_PATTERN.fullmatch(self.otel_endpoint):
            raise ConfigError(
                f"otel_endpoint={self.otel_endpoint!r} is not a URL; give that of the collector, "
                "such as http://127.0.0.1:4318"
            )
        if self.batch_dir is not None and not os.fspath(self.batch_dir):
            raise ConfigError("batch_dir='' is empty; give a directory, or leave the option out")
        if not self.host:
            raise ConfigError("host='' must be an address or a host name, such as 127.0.0.1")
        if not (is_loopback(self.host) or self.all_keys or self.insecure):
            raise ConfigError(
                f"host={self.host!r} is reachable from other machines, but no API key is set; "
                "set one (--api-key-file, KVBOOST_API_KEY), bind 127.0.0.1, or use --insecure"
            )

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names that requests may use, without duplicates."""
        return tuple(dict.fromkeys((self.model_name, *self.model_aliases)))

    def reasoning_budget_of(self, model_name: str) -> int | None:
        """Return the default reasoning budget of a model in tokens, or None without a limit."""
        budgets = self._budgets
        found = budgets.get(model_name, budgets.get(""))
        return None if found is None or found < 0 else found

    @property
    def budgeted_models(self) -> tuple[str, ...]:
        """Names of the models for which `reasoning_budget` has a value of their own."""
        return tuple(name for name in self._budgets if name)

    @property
    def _budgets(self) -> dict[str, int]:
        """Values of `reasoning_budget` by model name, "" for all models.

        Raises:
            ConfigError: a value is invalid.
        """
        declared = option_of(SamplingParams, "reasoning_budget")
        found: dict[str, int] = {}
        for text in self.reasoning_budget:
            name, sign, number = text.rpartition("=")
            if (sign and not name) or not re.fullmatch(r"-?[0-9]{1,9}", number):
                raise ConfigError(
                    f"reasoning_budget={text!r} must be a number of tokens, or NAME=N for the "
                    "model of that name"
                )
            if name in found:
                raise ConfigError(
                    f"reasoning_budget={text!r} repeats the budget of {name or 'all models'}; give "
                    "it once"
                )
            found[name] = declared.checked("reasoning_budget", int(number), ConfigError)
        return found

    def defaults_of(self, model_name: str) -> ModelDefaults:
        """Return the defaults of a model.

        Args:
            model_name: first name of the model.
        """
        return (self.model_defaults or {}).get(model_name, NO_DEFAULTS)

    def keep_alive_of(self, number: int) -> float:
        """Return the seconds until an idle model is unloaded, or infinity if it stays loaded.

        Args:
            number: index of the model on the command line, from 0.
        """
        if self.keep_alive is not None:
            return self.keep_alive
        return _KEEP_ALIVE if number else math.inf

    @property
    def all_keys(self) -> tuple[str, ...]:
        """All accepted keys, including their weights."""
        return (*self.api_keys, *self.admin_api_keys)

    def is_admin(self, tenant: str | None) -> bool:
        """Return whether a tenant may read and change the data of all tenants.

        The tenant of the only key may, and so may all requests of a server without keys.
        """
        if len(self.all_keys) < 2:
            return True
        return tenant in {tenant_of_key(key) for key in self.admin_api_keys}

    @property
    def tenant_weights(self) -> dict[str, float]:
        """Weight of each tenant, one tenant per key."""
        return {tenant_of_key(key): _weight_of_key(key) for key in self.all_keys}


def tenant_of_key(key: str) -> str:
    """Return the tenant of an API key: the SHA-256 of the key without its weight, in hex."""
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
    if found is None:  # the message must not contain the key
        raise ConfigError(
            "an API key must be printable ASCII without spaces, optionally followed by a space "
            "and weight=NUMBER"
        )
    return found


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address or "localhost", which only this machine can
    reach.
    """
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
    """Return the API keys from the command line, a file and the environment, without duplicates.

    A weight may follow each key, see `ServerSettings`.

    Args:
        given: keys from the command line.
        file: file with one key per line; lines that start with "#" are comments.
        environment: environment variables; None for those of the process.
        variable: name of the variable with one key. The variable with an added "S" holds several
            keys, separated by commas.

    Raises:
        ConfigError: the file cannot be read, or a file or variable contains no key.
    """
    environment = os.environ if environment is None else environment
    keys = list(given)
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ConfigError(f"the API key file {str(file)!r} cannot be read: {reason}") from error
        found = [
            line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")
        ]
        if not found:
            raise ConfigError(f"the API key file {str(file)!r} holds no key; write one per line")
        keys += found
    for name, separator in ((variable, None), (f"{variable}S", ",")):
        value = environment.get(name, "")
        found = [
            key.strip() for key in (value.split(separator) if separator else [value]) if key.strip()
        ]
        if value and not found:
            raise ConfigError(
                f"the environment variable {name} is set but holds no key; set a key, or unset it"
            )
        keys += found
    return tuple(dict.fromkeys(keys))
