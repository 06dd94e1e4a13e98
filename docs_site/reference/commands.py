"""Page of all commands, docs/commands.md."""

from __future__ import annotations

import enum
import re
import typing
from typing import Any

import typer.main

from docs_site.reference.tables import paragraph, table
from kvboost_edge.cli.app import app
from kvboost_edge.config import EngineConfig
from kvboost_edge.options import options_of
from kvboost_edge.server.serve_options import command_options
from kvboost_edge.server.settings import ServerSettings

__all__ = ["command_page", "commands"]

_HEAD = """# Commands

`kvboost-edge COMMAND --help` shows the same texts. `-m` takes a path or a hub id
([details](models.md#model-names)); without it, commands use the bundled model.
`kvboost-edge generate -o list` lists all engine options, `-s list` all sampling parameters
([options](reference/options.md)). `make help` lists the targets for development.

`kvboost-edge --install-completion` makes the Tab key complete commands and options in bash, zsh,
fish and PowerShell. `kvboost-edge --show-completion` prints the script instead.

| exit code | meaning |
| --- | --- |
| 0 | success |
| 1 | error, or a negative result of `doctor`, `cache verify` or `reuse-check` |
| 2 | wrong usage, or an option that is unknown, invalid or not supported |
| 130 | interrupted with Ctrl-C |
"""
_MORE = {
    "bench": "See [measure speed](how-to/benchmark.md).",
    "cache": "See [inspect and clean up](disk_tier.md#inspect-and-clean-up).",
    "chat": "If a conversation exceeds the context, remove its oldest turn with `/drop`. If input "
    "is piped, the exit code is 1 if a turn failed or the session could not be saved.",
    "doctor": "See [models](models.md).",
    "generate": "See [structured output](structured.md) for `--json-schema` and `--grammar`. With "
    "`--json`, the fields are those of [GenerationResult](reference/python.md). An entry of "
    "`logprobs` or `prompt_logprobs` is an object with `token` (its text), `token_id`, `logprob` "
    "and `top`, the most likely tokens as such objects without `top`.",
    "kernels": "See [start faster](how-to/startup.md).",
    "launch": "See [connecting a client](apis.md#connecting-a-client).",
    "models": "See [recommended models](models.md#recommended-models).",
    "pull": "See [pull and remove models](models.md#pull-and-remove-models).",
    "reuse-check": "See [quality gate](chunk_reuse.md#quality-gate).",
    "serve": "See [running the server](deploy/README.md). `kvboost-server` is the same command.",
    "warmup": "Without it, the first start of a model compiles its kernels in 10 to 15 s.",
    "why": "See [cache-miss reports](doctor.md).",
}


def commands() -> dict[str, Any]:
    """Return the commands by name, in the order of the help."""
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def command_page() -> str:
    """Return the page: an overview, then usage, options and examples of each command."""
    rows = [
        (f"[`{name}`](#{_anchor(name)})", _sentence(_plain(one.help)))
        for name, one in commands().items()
    ]
    parts = [_HEAD, "\n", table(("command", "purpose"), rows)]
    parts += [_command(name, one) for name, one in commands().items()]
    return "".join(parts)


def _command(name: str, one: Any) -> str:
    parts = [f"\n## {name}\n\n{paragraph(f'{_plain(one.help)} {_MORE.get(name, str())}')}"]
    arguments = [each for each in one.params if each.param_type_name == "argument"]
    options = [each for each in one.params if each.param_type_name == "option"]
    parts.append(f"\n```text\n{_usage(name, arguments, options)}\n```\n")
    if name == "serve":
        return "".join(parts) + _serve_flags()
    kinds = _kinds(one.callback)
    if arguments:
        rows = [
            (f"`{_argument_name(each)}`", _argument(each, kinds[each.name])) for each in arguments
        ]
        parts.append(f"\n{table(('argument', 'meaning'), rows)}")
    if options:
        flags = [(_flags(each), *_split_default(each, kinds[each.name])) for each in options]
        parts.append(f"\n{table(('option', 'meaning', 'default'), flags)}")
    examples, notes = _examples(one.epilog or "")
    if examples:
        parts.append("\n```sh\n" + "\n".join(examples) + "\n```\n")
    parts += [f"\n{paragraph(note)}" for note in notes]
    return "".join(parts)


def _serve_flags() -> str:
    """Return the flags of `serve` that are neither engine options nor server options."""
    listed = options_of(EngineConfig).keys() | options_of(ServerSettings).keys()
    rows = [
        (", ".join(f"`{flag}`" for flag in one.flags(name)), one.help, one.shown_default)
        for name, one in command_options().items()
        if name not in listed
    ]
    text = paragraph(
        "`serve` also takes the flags in the tables [Engine](reference/options.md#engine) and "
        "[Server](reference/options.md#server)."
    )
    return f"\n{text}\n" + table(("option", "meaning", "default"), rows)


def _usage(name: str, arguments: list[Any], options: list[Any]) -> str:
    words = ["kvboost-edge", name, *(["[OPTIONS]"] if options or name == "serve" else [])]
    for each in arguments:
        shown = _argument_name(each)
        words.append(shown if each.required else f"[{shown}]")
    return " ".join(words)


def _argument_name(each: Any) -> str:
    return str(each.metavar or each.name.upper())


def _kinds(callback: Any) -> dict[str, type]:
    """Return the type of each parameter of a command."""
    found = {}
    for name, annotation in typing.get_type_hints(callback).items():
        kinds = [one for one in typing.get_args(annotation) if one is not type(None)]
        found[name] = kinds[0] if kinds else annotation
    return found


def _flags(each: Any) -> str:
    names = [*sorted(each.opts, key=len), *each.secondary_opts]
    return ", ".join(f"`{name}`" for name in names) + (f" `{each.metavar}`" if each.metavar else "")


def _choices(kind: Any, text: str) -> str:
    """Return a sentence that lists an option's choices, unless the help text names them."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        return ""
    values = [str(one.value) for one in kind]
    is_complete = all(value in text for value in values)
    return "" if is_complete else f" One of {', '.join(f'`{value}`' for value in values)}."


def _argument(each: Any, kind: Any) -> str:
    text = _plain(each.help)
    return text + _choices(kind, text)


def _split_default(each: Any, kind: Any) -> tuple[str, str]:
    """Split a help text into the meaning of the option and its default."""
    text, _, said = _plain(each.help).partition(" Default: ")
    text += _choices(kind, text)
    return text, said.rstrip(".")


def _examples(epilog: str) -> tuple[list[str], list[str]]:
    """Split an epilog into its command lines and its other paragraphs."""
    lines = [_plain(part) for part in epilog.split("\n\n")]
    shown = [line for line in lines if line and not line.startswith("[b]")]
    calls = [line for line in shown if "kvboost-edge" in line]
    return calls, [line for line in shown if "kvboost-edge" not in line]


def _plain(text: str | None) -> str:
    return " ".join((text or "").replace("\\[", "[").split())


def _sentence(text: str) -> str:
    return re.split(r"(?<=\.) ", text)[0]


def _anchor(heading: str) -> str:
    return heading.lower().replace(" ", "-")
