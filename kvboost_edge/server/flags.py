"""The flags of `kvboost-edge serve`, `kvboost-server` and `python -m kvboost_edge.server`: one
table for all three.

Needs no web framework, so `--help` and wrong usage are answered at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from kvboost_edge.config import CHOICES, EngineConfig, RecomputeStrategy
from kvboost_edge.errors import ConfigError
from kvboost_edge.server.settings import (
    CONTEXT_OVERFLOWS,
    LOG_FORMATS,
    LOG_LEVELS,
    NORMALISERS,
    ServerSettings,
    collect_api_keys,
)
from kvboost_edge.tiers.disk.survey import default_directory

__all__ = ["DEMO_MODEL", "NamedModel", "ServeOptions", "parse_flags"]

DEMO_MODEL = "kvboost-edge/demo"
# Names of the forebears for what is called otherwise here.
_BACKENDS = {"default": "auto", "cpu-paged": "cpu"}

_EXAMPLES = """Examples

{prog}
{prog} --model ./my-model --port 8080
{prog} --model chat=./my-model.gguf --model coder,gpt-4o=./another --keep-alive 600
KVBOOST_API_KEYS='key-one,key-two weight=4' {prog} --host 0.0.0.0 --allowed-host llm.example.org

Environment: KVBOOST_API_KEY (one key), KVBOOST_API_KEYS (several, commas between them),
KVBOOST_ADMIN_API_KEY and KVBOOST_ADMIN_API_KEYS likewise; KVBOOST_EDGE_REDIS_URL (--redis-url),
KVBOOST_EDGE_REDIS_PASSWORD, KVBOOST_EDGE_REDIS_SECRET (the same on all machines). With more than
one key /metrics, /v1/stats, /v1/blocks and /cache/reset need an admin key: they concern all
tenants. Keys share the machine evenly; one with a weight behind it, as in 'key-two weight=4',
counts as so many others. That goes for every place where keys are given."""


class _Flag(NamedTuple):
    """A flag that fills a field of the same name; `kind` reads its text. Where it is None unless
    given, `text` says what that means. metavar: what the help calls its value; else the choices, or
    what `kind` reads.
    """

    name: str
    kind: Callable[[str], Any]
    text: str
    choices: tuple[str, ...] | None = None
    metavar: str = ""


class NamedModel(NamedTuple):
    """A model as the command line names it: its names, and a directory, a GGUF file or a hub id."""

    names: tuple[str, ...]
    model: str


@dataclasses.dataclass(frozen=True, slots=True)
class ServeOptions:
    """What a command line asks for. `model` is the first one, whose names are in the settings;
    `others` are loaded when they are asked for. The first computes `warm` texts, and each of
    `warm_documents` alone, before the first request is taken. `workers` engines of it, each in a
    process of its own, of the Ray cluster at an address where one is given; one engine without that
    needs no Ray.
    """

    model: str
    engine: dict[str, Any] = dataclasses.field(repr=False)  # redis_url may hold a password
    settings: ServerSettings
    warm: tuple[str, ...]
    warm_documents: tuple[str, ...] = ()
    others: tuple[NamedModel, ...] = ()
    workers: int = 1
    ray_address: str | None = None

    @property
    def is_replicated(self) -> bool:
        """Whether engines run in processes of their own."""
        return self.workers > 1 or self.ray_address is not None


def _number(text: str) -> float:
    return float(text)


def _bytes(text: str) -> int | float:
    """An integer, or a float such as 4e9."""
    try:
        return int(text)
    except ValueError:
        return float(text)


def _whole_bytes(text: str) -> int:
    return int(_bytes(text))


def _kv_bits(text: str) -> int | tuple[int, ...]:
    """ "8", or "8,4" for keys and values."""
    parts = tuple(int(part) for part in text.split(","))
    return parts[0] if len(parts) == 1 else parts


def _kinds(text: str) -> tuple[str, ...]:
    """ "tools,billing", or "off" for none."""
    return () if text == "off" else tuple(part.strip() for part in text.split(","))


_SERVER_FLAGS = (
    _Flag(
        "host",
        str,
        "address to listen on; beyond loopback an API key is required",
        metavar="ADDRESS",
    ),
    _Flag("port", int, "port to listen on; 0 takes a free one"),
    _Flag(
        "max_batch_size",
        int,
        "requests computed together; default: one for 512 tokens of the pool, at most 64",
    ),
    _Flag(
        "batch_window_ms",
        _number,
        "longest wait for company of a request whose prefix is being computed",
    ),
    _Flag("max_queue_size", int, "requests that may wait; the next gets 503"),
    _Flag("max_queue_tokens", int, "tokens of all requests in flight; default: 16 pools"),
    _Flag("request_timeout", _number, "seconds until a request gets 504 and its work stops"),
    _Flag("drain_seconds", _number, "seconds that answers in progress get after SIGTERM"),
    _Flag("max_body_bytes", int, "largest body of a request"),
    _Flag("max_connections", int, "open connections; the next gets 503"),
    _Flag("header_seconds", _number, "seconds for the head of a request to arrive"),
    _Flag("body_seconds", _number, "seconds for the body of a request to arrive"),
    _Flag("write_seconds", _number, "seconds a client may take nothing of its answer"),
    _Flag("keep_alive_seconds", _number, "seconds until an idle connection is closed"),
    _Flag(
        "request_history",
        _number,
        "seconds that requests are kept in memory, to say why a prompt was read again",
    ),
    _Flag(
        "keep_alive",
        _number,
        "seconds until an idle model is unloaded; default: the first stays, others 300",
    ),
    _Flag(
        "max_model_bytes",
        _whole_bytes,
        "memory of all loaded models, such as 8e9; default: what is free at start",
    ),
    _Flag(
        "normalise",
        _kinds,
        f"what is put back as it was first given, some of {','.join(NORMALISERS)}, or off",
        metavar="KINDS",
    ),
    _Flag(
        "context_overflow",
        str,
        "of a chat that does not fit: error, or drop_oldest turns",
        choices=CONTEXT_OVERFLOWS,
    ),
    _Flag("log_level", str, "least severe message to log", choices=LOG_LEVELS),
    _Flag(
        "log_format",
        str,
        "auto: plain lines in a terminal, else JSON lines; text: key=value",
        choices=LOG_FORMATS,
    ),
)
_ENGINE_FLAGS = (
    _Flag("device", str, "cpu, cuda, cuda:1, mps; default: what the backend runs on"),
    _Flag("dtype", str, "of what is computed", CHOICES["dtype"]),
    _Flag(
        "backend",
        str,
        "keeps keys and values; 'default' and 'cpu-paged' mean auto and cpu",
        CHOICES["backend"],
    ),
    _Flag("runner", str, "computes the model", CHOICES["runner"]),
    _Flag("weights", str, "format of the native runner", CHOICES["weights"]),
    _Flag(
        "rope_range",
        str,
        "long: context of longrope models beyond their original length",
        CHOICES["rope_range"],
    ),
    _Flag(
        "max_cache_bytes",
        _bytes,
        "size of the pool, such as 4e9; default: auto, at most 1/4 of free memory",
    ),
    _Flag(
        "max_state_bytes",
        _bytes,
        "room for states of models that keep some, such as Qwen3.5; default: 1/4 of that",
    ),
    _Flag("block_size", int, "tokens of a block"),
    _Flag(
        "num_blocks",
        int,
        "size of the pool in blocks; default: auto, as many as max_cache_bytes holds",
    ),
    _Flag("kv_cache_bits", _kv_bits, "of keys and values: 16, 8, 4, or apart: 8,4"),
    _Flag("max_batch_tokens", int, "tokens computed in one step"),
    _Flag(
        "max_pinned_blocks",
        int,
        "blocks that may be pinned; default, and at most: half of the pool",
    ),
    _Flag(
        "num_threads",
        int,
        "threads that compute; default: auto, the CPUs that this process may use",
    ),
    _Flag("recompute_strategy", str, "repair of reuse elsewhere", tuple(RecomputeStrategy)),
    _Flag("recompute_overlap", int, "tokens computed behind each seam of it"),
    _Flag(
        "recompute_ratio", _number, "share of the other tokens that cacheblend and query compute"
    ),
    _Flag(
        "chunk_size",
        int,
        "tokens of a chunk that warmed documents are cut into; default: documents are not cut",
    ),
    _Flag("chunk_boundary_window", int, "tokens that such a cut may move to the end of a sentence"),
    _Flag("overlap_k", int, "tokens before a chunk that are computed with it"),
    _Flag("sink_tokens", int, "first tokens of its document that are computed with it"),
    _Flag(
        "primer_tokens",
        int,
        "tokens that documents are computed behind: of the others, or of neutral text",
    ),
    _Flag(
        "reuse_gate",
        str,
        "auto: a model is tested before reuse at other positions",
        CHOICES["reuse_gate"],
    ),
    _Flag(
        "speculation", str, "tokens guessed ahead from what was said before", CHOICES["speculation"]
    ),
    _Flag(
        "max_draft_tokens",
        int,
        "most of them in a step; default: 31, fewer where states leave no room",
    ),
    _Flag("revision", str, "of a hub model; default: its main branch"),
    _Flag(
        "disk_cache_dir",
        str,
        "keeps blocks of keys and values below it; 'off': nowhere; default: the user's cache",
    ),
    _Flag(
        "redis_url",
        str,
        "shares them through a Redis server; with a password better in KVBOOST_EDGE_REDIS_URL",
    ),
    _Flag(
        "max_disk_bytes",
        _bytes,
        "most it may take, such as 8e9; default: 16 GiB, or a fifth of what is free",
    ),
)
_METAVARS: dict[Callable[[str], Any], str] = {
    str: "TEXT",
    _bytes: "BYTES",
    _whole_bytes: "BYTES",
    _kv_bits: "BITS",
}
_MOST_WORKERS = 1000
_REDIS_VARIABLE = "KVBOOST_EDGE_REDIS_URL"


def parse_flags(argv: Sequence[str], prog: str) -> ServeOptions:
    """Read a command line. Wrong usage and `--help` end the process as argparse does (SystemExit 2
    and 0); values out of range raise ConfigError.
    """
    given = vars(_parser(prog).parse_args(argv))
    workers = given["workers"]
    if not 1 <= workers <= _MOST_WORKERS:
        raise ConfigError(f"workers={workers} must be in 1..{_MOST_WORKERS}")
    first, *others = _models(given["model"] or [DEMO_MODEL], given["model_name"])
    if others and (workers > 1 or given["ray_address"]):
        raise ConfigError(
            f"workers={workers}: replicas serve one model; give --model once, or start a server "
            "for each"
        )
    settings = {
        flag.name: given[flag.name] for flag in _SERVER_FLAGS if given[flag.name] is not None
    }
    settings |= {"model_name": first.names[0], "model_aliases": first.names[1:]}
    engine = {
        name: given[name]
        for name in (*(f.name for f in _ENGINE_FLAGS), "pack_cache", "redis_trust")
        if given[name] is not None
    }
    if "backend" in engine:
        engine["backend"] = _BACKENDS.get(engine["backend"], engine["backend"])
    chosen = ServerSettings(
        **settings,
        api_keys=collect_api_keys(given["api_key"], given["api_key_file"]),
        admin_api_keys=collect_api_keys(
            given["admin_api_key"], given["admin_api_key_file"], variable="KVBOOST_ADMIN_API_KEY"
        ),
        insecure=given["insecure"],
        allowed_hosts=tuple(given["allowed_host"]),
        cors_origins=tuple(given["cors_origin"]),
    )
    if engine.get("pack_cache", True):  # else nothing is kept in the cache directory
        engine.setdefault("disk_cache_dir", str(default_directory()))
    if os.environ.get(_REDIS_VARIABLE):
        engine.setdefault("redis_url", os.environ[_REDIS_VARIABLE])
    if chosen.max_batch_size is not None:
        engine["max_num_seqs"] = chosen.max_batch_size
    warm, documents = (
        tuple(_warm_text(text) for text in given[name]) for name in ("warm", "warm_document")
    )
    return ServeOptions(
        first.model,
        engine,
        chosen,
        warm,
        documents,
        tuple(others),
        workers=workers,
        ray_address=given["ray_address"],
    )


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in a line: all flags in front of it would hide it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\nTry '{self.prog} --help'.\n")


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=prog,
        usage="%(prog)s [--model MODEL] [--host ADDRESS] [--port N] [FLAG …]",
        description="Serve a model over HTTP with OpenAI's endpoints and a web page.",
        epilog=_EXAMPLES.format(prog=prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-m",
        "--model",
        action="append",
        metavar="[NAMES=]MODEL",
        help=(
            "directory, GGUF file or hub id; default: bundled; repeatable: others are loaded "
            "when they are asked for; names that clients may use, commas between them, may stand "
            "before it"
        ),
    )
    parser.add_argument(
        "--warm",
        action="append",
        default=[],
        metavar="TEXT",
        help="cached at start by the first model; @FILE reads it",
    )
    parser.add_argument(
        "--warm-document",
        action="append",
        default=[],
        metavar="TEXT",
        help=(
            "cached at start for mode chunk_kv_reuse, which finds it wherever it stands in a "
            "prompt; @FILE reads it"
        ),
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="engines, each in a process of its own (1); extra [ray]",
    )
    parser.add_argument(
        "--ray-address", metavar="TEXT", help="of a running Ray cluster for them, or 'auto'"
    )
    safety = parser.add_argument_group("who may come in")
    safety.add_argument(
        "--api-key", action="append", default=[], metavar="KEY", help="repeatable; shows in `ps`"
    )
    safety.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="one key a line, or KEY weight=4"
    )
    safety.add_argument(
        "--admin-api-key", action="append", default=[], metavar="KEY", help="may see and reset all"
    )
    safety.add_argument("--admin-api-key-file", type=Path, metavar="FILE", help="one key a line")
    safety.add_argument(
        "--insecure", action="store_true", help="listen beyond loopback without a key"
    )
    safety.add_argument(
        "--allowed-host", action="append", default=[], metavar="NAME", help="Host header to accept"
    )
    safety.add_argument(
        "--cors-origin", action="append", default=[], metavar="URL", help="pages that may call"
    )
    serving = parser.add_argument_group("serving")
    serving.add_argument(
        "--model-name",
        action="append",
        default=[],
        metavar="NAME",
        help=(
            "names of the only model that clients may use, commas between them; repeatable; by "
            "default its own"
        ),
    )
    for flag in _SERVER_FLAGS:
        # A value that is none of them is wrong usage; one of the engine's is the engine's to
        # refuse.
        _add(serving, flag, ServerSettings).choices = flag.choices
    engine = parser.add_argument_group("the engine")
    for flag in _ENGINE_FLAGS:
        _add(engine, flag, EngineConfig)
    engine.add_argument(
        "--no-pack-cache",
        dest="pack_cache",
        action="store_false",
        default=None,
        help=(
            "keep nothing in the cache directory: weights are converted into memory at every start"
        ),
    )
    engine.add_argument(
        "--redis-trust",
        action="store_true",
        default=None,
        help=(
            "believe whoever writes to the Redis server: no KVBOOST_EDGE_REDIS_SECRET is asked for"
        ),
    )
    return parser


def _add(group: Any, flag: _Flag, fields: type[ServerSettings | EngineConfig]) -> argparse.Action:
    """A flag with its default, which is that of the field."""
    default = next(field.default for field in dataclasses.fields(fields) if field.name == flag.name)
    told = "" if default is None else f" ({_told(default)})"
    listed = "" if flag.choices is None else f"{{{','.join(flag.choices)}}}"
    metavar = flag.metavar or listed or _METAVARS.get(flag.kind, "N")
    name = f"--{flag.name.replace('_', '-')}"
    action: argparse.Action = group.add_argument(
        name, type=flag.kind, metavar=metavar, help=flag.text + told
    )
    return action


def _told(default: object) -> str:
    """As it would be given."""
    if isinstance(default, tuple):
        return ",".join(default)
    return f"{default:g}" if isinstance(default, float) else str(default)


def _models(given: Sequence[str], model_names: Sequence[str]) -> list[NamedModel]:
    """The models of a command line, each with its names. ConfigError for names that cannot tell
    them apart.
    """
    if len(given) > 1 and model_names:
        raise ConfigError(
            "--model-name names the only model; of several give each its names, as --model "
            "NAME=MODEL"
        )
    found = []
    known: set[str] = set()
    for text in given:
        before, sign, behind = text.partition("=")
        named = bool(sign) and not Path(text).exists()
        model = os.path.expanduser(behind) if named else text  # the shell does not, behind a name
        lists = [before, *model_names] if named else model_names
        names = tuple(dict.fromkeys(name.strip() for one in lists for name in one.split(","))) or (
            _served_name(model),
        )
        if not all(name and name.isprintable() for name in names):
            raise ConfigError("model_name must be printable text with at least one character")
        if twice := known & {*names}:
            raise ConfigError(
                f"two models have the name {min(twice)!r}; give each its own, as --model NAME=MODEL"
            )
        if model.startswith((".", "/")) and len(given) > 1 and not Path(model).exists():
            raise ConfigError(f"the model {model!r} does not exist")
        known |= {*names}
        found.append(NamedModel(names, model))
    return found


def _served_name(model: str) -> str:
    """A local path's last part, so that no path of this machine is shown; a hub id as it is."""
    path = Path(model)
    return path.resolve().name if model != DEMO_MODEL and path.exists() else model


def _warm_text(text: str) -> str:
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the warm text {text!r} cannot be read: {type(error).__name__}"
        ) from error
