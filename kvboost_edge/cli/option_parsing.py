"""The option `--json` of several commands, and the conversion of `NAME=VALUE` options.

The conversion returns keyword arguments. Unknown names are passed on to the engine, which rejects
them.
"""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from kvboost_edge.config import EngineConfig, GenerationMode, RecomputeStrategy
from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.errors import ConfigError
from kvboost_edge.options import Option, options_of, read_bytes

__all__ = [
    "CACHE_USE",
    "JsonOption",
    "cache_use",
    "engine_options",
    "engine_value",
    "list_options",
    "list_parameters",
    "one_model",
    "option_advice",
    "parse_value",
    "print_engine_options",
    "print_sampling_parameters",
    "read_size",
    "remote_options",
    "sampling_options",
    "token_limit",
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]

CACHE_USE = ("mode", "recompute_strategy", "recompute_overlap", "recompute_ratio")
"""Request settings that a server takes in its `kvboost` object."""

_MAX_WIDTH = 100
_WORDS = {"true": True, "false": False, "none": None}
_NO_LIMIT = ("max", "none")


def list_options(pairs: list[str] | None) -> list[str] | None:
    """Return the values of `-o`. If `list` is among them, print all engine options and exit."""
    if pairs is not None and "list" in pairs:
        print_engine_options()
    return pairs


def list_parameters(pairs: list[str] | None) -> list[str] | None:
    """Return the values of `-s`. If `list` is among them, print all parameters and exit."""
    if pairs is not None and "list" in pairs:
        print_sampling_parameters()
    return pairs


def print_engine_options() -> NoReturn:
    """Print the name, type and meaning of each engine option, and exit."""
    _print_options(EngineConfig)


def print_sampling_parameters() -> NoReturn:
    """Print the name, type and meaning of each request parameter, and exit."""
    _print_options(SamplingParams, Terms)


def option_advice(flag: str, flags: Collection[str]) -> str:
    """Return advice for an unknown flag that is the name of an option, or "" for other flags.

    Args:
        flag: The unknown flag.
        flags: Flags of the command.
    """
    name = flag.removeprefix("--").replace("-", "_")
    if flag in ("-o", "-s"):
        return f"Give it after a command; kvboost-edge generate {flag} list shows its names."
    if name == "num_threads" and "--threads" in flags:
        return ""  # the caller suggests the nearest flag
    if name in options_of(EngineConfig) and "--option" in flags:
        # In `bench`, -o is the output format, as in llama-bench.
        return f"Use {'--option' if '--output' in flags else '-o'} {name}=VALUE."
    if name in _parameters() and "--sampling" in flags:
        return f"Use -s {name}=VALUE."
    return ""


def _parameters() -> set[str]:
    """Return the names of sampling parameters and request options."""
    return {*options_of(SamplingParams), *options_of(Terms)}


def _print_options(*classes: type) -> NoReturn:
    """Print the options that these classes declare, and exit."""
    fill = textwrap.TextWrapper(
        min(shutil.get_terminal_size().columns, _MAX_WIDTH),
        initial_indent="    ",
        subsequent_indent="    ",
        break_on_hyphens=False,
    )
    declarations = [one for cls in classes for one in options_of(cls).items()]
    for name, declared in declarations:
        kind = declared.allowed or declared.metavar.lower()
        typer.echo(f"{name}: {kind}" if kind else name)
        default = f". Default: {declared.shown_default}" if declared.shown_default else ""
        typer.echo(fill.fill(f"{declared.help}{default}"))
    raise typer.Exit


def read_size(text: str) -> int:
    """Parse the value of a flag that takes a size in bytes."""
    try:
        return read_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def parse_value(text: str) -> Any:
    """Parse a text as True, False, None, an integer or a float, or return it unchanged."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def token_limit(text: str | int) -> int | None:
    """Parse a token limit. 'max' and 'none' return None, which means no limit.

    Raises typer.BadParameter for other texts that are not integers.
    """
    if str(text).lower() in _NO_LIMIT:
        return None
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a whole number nor 'max'") from None


def engine_options(
    pairs: Iterable[str] | None, named: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Convert `-o` pairs and flags to keyword arguments for the engine's config.

    Args:
        pairs: Texts of the form `NAME=VALUE`. Values of another type than the option's, and those
            of unknown options, stay text, which the engine rejects.
        named: Values of options with separate flags.

    Raises:
        ConfigError: A pair is malformed, or an option is given twice.
    """
    options: dict[str, Any] = {}
    for pair in pairs or ():
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise ConfigError(
                f"option {pair!r} must have the form NAME=VALUE, for example num_threads=2"
            )
        _check_new(name, options)
        declared = options_of(EngineConfig).get(name)
        try:
            options[name] = text if declared is None else engine_value(declared, text)
        except ConfigError:
            raise
        except ValueError:
            options[name] = text
    for name, value in (named or {}).items():
        _check_new(name, options)
        options[name] = value
    return options


def _check_new(name: str, options: Collection[str]) -> None:
    if name in options:
        raise ConfigError(f"option {name!r} is given twice; give it once")


def engine_value(declared: Option, text: str) -> Any:
    """Parse the value of an engine option.

    Raises:
        ValueError: The text is not a value of the option's type.
    """
    if declared.kind is bool:
        return _WORDS.get(text.lower(), text)
    if declared.optional and declared.kind is not str and text.lower() == "none":
        return None
    return declared.parsed(text)


def sampling_options(
    pairs: Iterable[str] | None,
    schema_file: str | None = None,
    named: Mapping[str, Any] | None = None,
    grammar_file: str | None = None,
) -> dict[str, Any]:
    """Convert `-s` pairs and flags to sampling keyword arguments.

    Args:
        pairs: Texts of the form `NAME=VALUE`; `stop` may occur several times.
        schema_file: File whose JSON schema becomes `json_schema`.
        named: Values of parameters with separate flags; None if not given.
        grammar_file: File whose text becomes `grammar`.

    Raises:
        ConfigError: A pair is malformed, a parameter is given twice, a file cannot be read, or the
            schema file contains no schema.
    """
    options: dict[str, Any] = {
        name: value for name, value in (named or {}).items() if value is not None
    }
    flags = tuple(options)
    stops: list[str] = []
    for pair in pairs or ():
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise ConfigError(
                f"sampling parameter {pair!r} must have the form NAME=VALUE, for example top_p=0.9"
            )
        if name in flags:
            flag = name.replace("_", "-")
            raise ConfigError(f"{name!r} is given twice, by --{flag} and --sampling; give it once")
        if name == "stop":
            stops.append(text)
        elif name == "max_new_tokens" and text.lower() in _NO_LIMIT:
            options[name] = None
        else:
            options[name] = parse_value(text)
    if stops:
        options["stop"] = stops
    for name, flag, file, read in (
        ("json_schema", "--json-schema", schema_file, _schema),
        ("grammar", "--grammar", grammar_file, _grammar),
    ):
        if file is None:
            continue
        if name in options:
            raise ConfigError(f"{name!r} is given twice, by {flag} and --sampling; give it once")
        options[name] = read(file)
    return options


def _schema(file: str) -> dict[str, Any]:
    try:
        schema = json.loads(Path(file).read_text(encoding="utf-8-sig"))
        # Python also parses values that JSON does not allow, such as NaN.
        json.dumps(schema, allow_nan=False, ensure_ascii=False).encode()
    except OSError as error:
        raise ConfigError(f"--json-schema {file!r} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--json-schema {file!r} is not JSON in UTF-8: {error}") from None
    if not isinstance(schema, dict):
        raise ConfigError(
            f"--json-schema {file!r} must hold an object, not {type(schema).__name__}"
        )
    return schema


def _grammar(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"--grammar {file!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--grammar {file!r} is not text in UTF-8: {error}") from None


def one_model(argument: str | None, option: str | None, default: str | None = None) -> str:
    """Return the model that is given either as an argument or as --model.

    Raises typer.BadParameter if both are given, or if neither is given and there is no default.
    """
    if argument is not None and option is not None:
        raise typer.BadParameter(
            f"the model is given twice, as {argument!r} and by --model; give it once"
        )
    found = argument or option or default
    if found is None:
        raise typer.BadParameter(
            "no model is given; give a directory, a GGUF file, a hub id or ollama:NAME:TAG"
        )
    return found


def cache_use(
    mode: GenerationMode | None,
    strategy: RecomputeStrategy | None,
    overlap: int | None,
    ratio: float | None,
) -> dict[str, Any]:
    """Return the given cache options as keyword arguments of `submit`."""
    given = zip(CACHE_USE, (mode, strategy, overlap, ratio), strict=True)
    return {name: value for name, value in given if value is not None}


def remote_options(url: str | None, options: Mapping[str, Any], api_key: str) -> None:
    """Raise ConfigError for engine options with --url, and for an API key without --url."""
    if url is not None and options:
        name = next(iter(options))
        raise ConfigError(
            f"{name} is an option of a local engine and has no effect with --url; set it on the "
            "server"
        )
    if url is None and api_key:
        raise ConfigError("--api-key applies only to a server; add --url, or leave out --api-key")
