"""Options of the server's command, and its help text.

The module imports neither a web framework nor typer, which keeps `--help` fast.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvboost_edge.config import EngineConfig
from kvboost_edge.errors import ConfigError
from kvboost_edge.options import Option, options_of
from kvboost_edge.server.model_defaults import ModelDefaults, read_model_defaults
from kvboost_edge.server.settings import ServerSettings, collect_api_keys

__all__ = [
    "DEMO_MODEL",
    "NamedModel",
    "ServeOptions",
    "command_options",
    "help_text",
    "options_from",
    "served_name",
]

DEMO_MODEL = "kvboost-edge/demo"
_HELP = "Serve models over an HTTP API compatible with OpenAI's, with metrics and a web page."
_MAX_WIDTH = 100
_INDENT = 30

_EXAMPLES = """Examples

{prog}
{prog} --model ./my-model --port 8080
{prog} --model chat=./my-model.gguf --model coder,gpt-4o=./another --keep-alive 600
KVBOOST_API_KEYS='key-one,key-two weight=4' {prog} --host 0.0.0.0 --allowed-host llm.example.org

Environment variables

KVBOOST_API_KEY              One API key
KVBOOST_API_KEYS             API keys, separated by commas
KVBOOST_ADMIN_API_KEY        One admin API key
KVBOOST_ADMIN_API_KEYS       Admin API keys, separated by commas
KVBOOST_EDGE_REDIS_URL       Value of --redis-url
KVBOOST_EDGE_REDIS_PASSWORD  Password of the Redis server
KVBOOST_EDGE_REDIS_SECRET    Secret that signs blocks, the same on all machines
KVBOOST_EDGE_CACHE           Directory of packed weights, KV blocks, pulled models and kernels
KVBOOST_EDGE_KERNELS         Directory of kernel libraries, or 'none' to compile kernels

All API keys get the same share of the compute, unless a weight follows a key, as in
'key-two weight=4'. With more than one key, /metrics, /v1/stats, /v1/blocks, /cache/reset,
/api/pull, /api/create, /api/copy and /api/delete need an admin key, because they affect all
tenants."""


class NamedModel(NamedTuple):
    """A model on the command line, with its names and its directory, GGUF file or hub id."""

    names: tuple[str, ...]
    model: str


@dataclasses.dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options given on the command line.

    Attributes:
        model: the first model; `settings` holds its names.
        engine: options of the engine.
        settings: settings of the server.
        warm: prompts that the first model caches before the first request.
        warm_systems: system messages that the first model caches before the first request, as its
            chat template writes them.
        warm_documents: documents that the first model caches one by one before the first request.
        others: models that are loaded on demand.
        workers: number of engines, each in a separate process.
        ray_address: address of the Ray cluster for the engines. Without an address, a single
            worker needs no Ray.
    """

    model: str
    engine: dict[str, Any] = dataclasses.field(repr=False)  # redis_url may hold a password
    settings: ServerSettings
    warm: tuple[str, ...]
    warm_systems: tuple[str, ...] = ()
    warm_documents: tuple[str, ...] = ()
    others: tuple[NamedModel, ...] = ()
    workers: int = 1
    ray_address: str | None = None

    @property
    def is_replicated(self) -> bool:
        """True if the engines run in separate processes."""
        return self.workers > 1 or self.ray_address is not None


_COMMAND = {  # flags of the command that are not settings
    "model": Option(
        help="Model directory, GGUF file or hub id. A prefix NAMES= gives the model "
        "comma-separated names for clients. Repeatable; the first model is loaded at "
        "start, and further ones on demand",
        group="Model",
        flag="--model -m",
        many=True,
        metavar="[NAMES=]MODEL",
        unset="the bundled demo model",
    ),
    "model_name": Option(
        help="Comma-separated names of the model for clients. Only allowed with a single model",
        group="Model",
        many=True,
        metavar="NAME",
        unset="the hub id, or the last part of the path",
    ),
    "model_defaults_file": Option(
        help="TOML file with a system message and sampling parameters for requests that give "
        "none, in a table for each model",
        group="Model",
        flag="--model-defaults",
        metavar="FILE",
        unset="none",
    ),
    "warm": Option(
        help="Prompt that the first model caches at start as it is, without the chat template, "
        "for requests to /v1/completions. @FILE reads the text from a file. Repeatable",
        group="Cache",
        many=True,
        metavar="TEXT",
    ),
    "warm_system": Option(
        help="System message that the first model caches at start, for chats without tools that "
        "begin with it. @FILE reads the text from a file. Repeatable",
        group="Cache",
        many=True,
        metavar="TEXT",
    ),
    "warm_document": Option(
        help="Text to cache at start for chunk_kv_reuse mode, which can reuse it anywhere in a "
        "prompt. @FILE reads the text from a file. Repeatable",
        group="Cache",
        many=True,
        metavar="TEXT",
    ),
    "workers": Option(
        help="Number of engines, each in a separate process. More than 1 requires the extra [ray]",
        kind=int,
        group="Engine",
        low=1,
        high=1000,
        default=1,
    ),
    "ray_address": Option(
        help="Address of a running Ray cluster for the engines, or auto to find one",
        group="Engine",
        unset="none",
    ),
    "api_key_file": Option(
        help="File with API keys, one per line, each optionally followed by a weight",
        group="Security",
        metavar="FILE",
        unset="none",
    ),
    "admin_api_key_file": Option(
        help="File with admin API keys, one per line",
        group="Security",
        metavar="FILE",
        unset="none",
    ),
}
_GROUPS = (
    *("Model", "Server", "Limits", "Security", "Logging", "Engine", "Cache"),
    *("Non-prefix KV reuse", "Speculative decoding", "Batch API"),
)
_REDIS_VARIABLE = "KVBOOST_EDGE_REDIS_URL"


@functools.cache
def command_options() -> dict[str, Option]:
    """Return the options that have a flag, by name."""
    # The command's own options come first and take precedence. For example, --model-name is
    # repeatable, while the setting is a single name.
    declared = {**_COMMAND, **options_of(ServerSettings), **options_of(EngineConfig), **_COMMAND}
    declared["disk_cache_dir"] = dataclasses.replace(
        declared["disk_cache_dir"], unset="the user cache directory"
    )
    return {name: one for name, one in declared.items() if one.flag is not None}


def help_text(prog: str) -> str:
    """Return the help text of the command, with flags by group."""
    width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
    lines = [f"Usage: {prog} [OPTIONS]", "", *textwrap.wrap(_HELP, width)]
    fill = textwrap.TextWrapper(width, initial_indent=" " * _INDENT, break_on_hyphens=False)
    fill.subsequent_indent = fill.initial_indent
    for group in _GROUPS:
        lines += ["", f"{group}:"]
        for name, declared in command_options().items():
            if declared.group == group:
                value, text = _described(name, declared)
                flags = f"  {', '.join(sorted(declared.flags(name), key=len))} {value}".rstrip()
                rows = fill.wrap(text)
                if len(flags) < _INDENT - 1:
                    rows[0] = flags.ljust(_INDENT) + rows[0].lstrip()
                    flags = ""
                lines += [flags, *rows] if flags else rows
    lines += ["", "  -h, --help".ljust(_INDENT) + "Show this message and exit.", ""]
    return "\n".join(lines) + "\n" + _EXAMPLES.format(prog=prog)


def _described(name: str, declared: Option) -> tuple[str, str]:
    """Return the placeholder of a flag's value ("" for a switch), and the flag's help text."""
    if declared.kind is bool:
        return "", declared.off or declared.help
    default = declared.shown_default
    return declared.placeholder, declared.help + (f". Default: {default}" if default else "")


def options_from(flags: Mapping[str, Any]) -> ServeOptions:
    """Convert the flags of a command line to options.

    Raises:
        ConfigError: a value is out of range.
    """
    declared = command_options()
    given: dict[str, Any] = {
        name: not declared[name].default if declared[name].kind is bool else value
        for name, value in flags.items()
        if value is not None and value is not False and value != []
    }
    workers = _COMMAND["workers"].checked("workers", given.get("workers", 1), ConfigError)
    first, *others = _models(given.get("model", [DEMO_MODEL]), given.get("model_name", []))
    if others and (workers > 1 or given.get("ray_address")):
        raise ConfigError(
            f"{1 + len(others)} models are given, but replicas (--workers, --ray-address) serve "
            "only one; give --model once, or start a server for each model"
        )
    named: dict[str, Any] = {"model_name": first.names[0], "model_aliases": first.names[1:]}
    if (file := given.get("model_defaults_file")) is not None:
        named["model_defaults"] = _model_defaults(Path(file), [first, *others])
    settings: dict[str, Any] = {
        name: tuple(given[name]) if one.many else given[name]
        for name, one in options_of(ServerSettings).items()
        if name in given
    }
    for name, variable in (
        ("api_key", "KVBOOST_API_KEY"),
        ("admin_api_key", "KVBOOST_ADMIN_API_KEY"),
    ):
        file = given.get(f"{name}_file")
        settings[f"{name}s"] = collect_api_keys(
            given.get(f"{name}s", ()), None if file is None else Path(file), variable=variable
        )
    chosen = ServerSettings(**settings | named)
    chosen = _with_first_names(chosen, (first, *others))
    engine = {name: given[name] for name in options_of(EngineConfig) if name in given}
    # With --no-pack-cache, nothing is stored in the cache directory.
    if engine.get("pack_cache", True):
        # Slow import, not needed for --help.
        from kvboost_edge.tiers.disk.survey import default_directory

        engine.setdefault("disk_cache_dir", str(default_directory()))
    if os.environ.get(_REDIS_VARIABLE):
        engine.setdefault("redis_url", os.environ[_REDIS_VARIABLE])
    if chosen.max_batch_size is not None:
        engine["max_num_seqs"] = chosen.max_batch_size
    return ServeOptions(
        first.model,
        engine,
        chosen,
        tuple(map(_warm_text, given.get("warm", ()))),
        tuple(map(_warm_text, given.get("warm_system", ()))),
        tuple(map(_warm_text, given.get("warm_document", ()))),
        tuple(others),
        workers=workers,
        ray_address=given.get("ray_address"),
    )


def _with_first_names(settings: ServerSettings, models: Sequence[NamedModel]) -> ServerSettings:
    """Return the settings with each model's first name in its reasoning budget.

    Raises:
        ConfigError: a budget names an unknown model.
    """
    first = {name: one.names[0] for one in models for name in one.names}
    if unknown := [name for name in settings.budgeted_models if name not in first]:
        raise ConfigError(
            f"reasoning_budget names the model {unknown[0]!r}, which is not one of "
            f"{', '.join(sorted(first))}"
        )
    budgets = (text.rpartition("=") for text in settings.reasoning_budget)
    named = tuple(f"{first[name]}={number}" if name else number for name, _, number in budgets)
    return dataclasses.replace(settings, reasoning_budget=named)


def _model_defaults(path: Path, models: Sequence[NamedModel]) -> dict[str, ModelDefaults]:
    """Read the defaults of models, by each model's first name.

    Raises:
        ConfigError: the file is invalid, or names a model that is not served or twice the same.
    """
    first_names = {name: model.names[0] for model in models for name in model.names}
    found: dict[str, ModelDefaults] = {}
    for name, defaults in read_model_defaults(path).items():
        if name not in first_names:
            served = ", ".join(map(repr, first_names))
            raise ConfigError(
                f"--model-defaults {str(path)!r} has a table for {name!r}, which is not served; "
                f"use one of {served}"
            )
        if first_names[name] in found:
            raise ConfigError(
                f"--model-defaults {str(path)!r} has two tables for the model "
                f"{first_names[name]!r}; join them"
            )
        found[first_names[name]] = defaults
    return found


def _models(given: Sequence[str], model_names: Sequence[str]) -> list[NamedModel]:
    """Return the models of a command line, each with its names.

    Raises:
        ConfigError: two models have the same name, or a name is invalid.
    """
    if len(given) > 1 and model_names:
        raise ConfigError(
            f"--model-name is given with {len(given)} models; name each model as --model NAME=MODEL"
        )
    found = []
    known: set[str] = set()
    for text in given:
        before, sign, behind = text.partition("=")
        named = bool(sign) and not Path(text).exists()
        # The shell does not expand "~" after "NAME=".
        model = os.path.expanduser(behind) if named else text
        lists = [before, *model_names] if named else model_names
        names = tuple(dict.fromkeys(name.strip() for one in lists for name in one.split(","))) or (
            served_name(model),
        )
        if not all(name and name.isprintable() for name in names):
            raise ConfigError(
                f"model_name={names!r} must be printable text with at least one character"
            )
        if twice := known & {*names}:
            raise ConfigError(
                f"two models have the name {min(twice)!r}; give each a different one, as --model "
                "NAME=MODEL"
            )
        if model.startswith((".", "/")) and len(given) > 1 and not Path(model).exists():
            raise ConfigError(f"the model path {model!r} does not exist; check --model")
        known |= {*names}
        found.append(NamedModel(names, model))
    return found


def served_name(model: str) -> str:
    """Return the default name of a model: its hub id, or the last part of a local path.

    A link is served under its own name.
    """
    # Clients must not see the paths of this machine.
    is_local = model != DEMO_MODEL and Path(model).exists()
    return os.path.basename(os.path.abspath(model)) if is_local else model


def _warm_text(text: str) -> str:
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"the warm text {text!r} cannot be read: {reason}") from error
