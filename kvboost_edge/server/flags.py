"""Command line of `kvboost-edge serve`, `kvboost-server` and `python -m kvboost_edge.server`."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, cast

import typer
import typer.main
from typer.core import TyperCommand

from kvboost_edge.config import EngineConfig
from kvboost_edge.options import Option, nearest, options_of
from kvboost_edge.server.serve_options import (
    ServeOptions,
    command_options,
    help_text,
    options_from,
)

__all__ = ["USAGE_ERROR", "parse_flags", "serve_command", "suggest_flag"]

USAGE_ERROR = cast(type[Exception], typer.BadParameter.__bases__[0])
"""UsageError of click, or of the copy that newer versions of typer have."""

_EXTRA_ARGUMENT = "Got unexpected extra argument"


class _ServeCommand(TyperCommand):
    """A command whose help shows the flags by group."""

    def get_help(self, ctx: Any) -> str:
        return help_text(ctx.command_path)


def serve_command(run: Callable[[ServeOptions], Any]) -> TyperCommand:
    """Return the server's command, which calls `run` with the parsed options."""

    def serve(**given: Any) -> Any:
        return run(options_from(given))

    parameters = [_parameter(name, one) for name, one in command_options().items()]
    serve.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    serve.__annotations__ = {one.name: one.annotation for one in parameters}
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(cls=_ServeCommand, context_settings={"help_option_names": ["-h", "--help"]})(serve)
    return cast(TyperCommand, typer.main.get_command(app))


@functools.cache
def _options_command() -> TyperCommand:
    """Return the command that only parses; building it takes longer than parsing."""
    return serve_command(lambda options: options)


def parse_flags(argv: Sequence[str], prog: str) -> ServeOptions:
    """Parse a command line.

    Raises:
        SystemExit: the usage is wrong (exit code 2), or `--help` was given (0).
        ConfigError: a value is out of range.
    """
    try:
        found = _options_command().main(args=list(argv), prog_name=prog, standalone_mode=False)
    except USAGE_ERROR as error:
        suggest_flag(error)
        message = error.format_message()  # type: ignore[attr-defined]
        print(f"{prog}: error: {message}\nTry '{prog} --help'.", file=sys.stderr)
        raise SystemExit(2) from error
    if not isinstance(found, ServeOptions):  # an exit code, as after --help
        raise SystemExit(found)
    return found


def suggest_flag(error: Any, advice: Callable[[str, Collection[str]], str] | None = None) -> None:
    """Add a suggestion to the message of a usage error about an unknown flag or extra argument.

    Args:
        error: the usage error, which is modified.
        advice: function that gets the unknown flag and the command's flags, and returns a
            suggestion. If it returns "", the most similar flag is suggested.
    """
    if error.ctx is None:
        return
    parameters = error.ctx.command.params
    if error.message.startswith(_EXTRA_ARGUMENT) and any("-m" in one.opts for one in parameters):
        takes_text = any(one.param_type_name == "argument" for one in parameters)
        quotes = ", and put text that contains spaces in quotes" if takes_text else ""
        error.message += f". Give the model with -m{quotes}."
    if not hasattr(error, "possibilities"):
        return
    known = [flag for one in parameters for flag in (*one.opts, *one.secondary_opts)]
    hint = advice(error.option_name, known) if advice else ""
    if not hint:
        likely = nearest(error.option_name, [flag for flag in known if flag.startswith("--")])
        hint = f"Did you mean {likely}?" if likely else ""
    error.message = f"No such option: {error.option_name}" + (f". {hint}" if hint else "")
    error.possibilities = None


def _parameter(name: str, declared: Option) -> inspect.Parameter:
    """Return the typer parameter for an option."""
    default = None
    if declared.kind is bool:
        default = False
        annotation: Any = Annotated[bool, typer.Option(*declared.flags(name))]
    elif declared.many:
        annotation = Annotated[list[str] | None, typer.Option(*declared.flags(name))]
    else:
        reader = functools.partial(_read, declared, name in options_of(EngineConfig))
        annotation = Annotated[Any, typer.Option(*declared.flags(name), parser=reader)]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _read(declared: Option, of_engine: bool, text: str) -> Any:
    """Parse the value of a flag. Raises BadParameter for a wrong type or choice."""
    # EngineConfig checks the choices of engine options.
    if declared.choices and not of_engine and text not in declared.choices:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(declared.choices)}")
    try:
        return declared.parsed(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
