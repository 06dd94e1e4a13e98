"""Flags of engine options, made from the options' declarations."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from kvboost_edge.cli.option_parsing import engine_options, engine_value, list_options
from kvboost_edge.config import EngineConfig
from kvboost_edge.options import Option, options_of

__all__ = ["engine_flags"]


def engine_flags(
    *flags: str, option: str = "--option -o"
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds flags of engine options to a command.

    The command's keyword parameter `engine` gets the given options, as keyword arguments for the
    engine's config. In the help, the flags stand in the place of this parameter.

    Args:
        *flags: Flags of one engine option each, such as "--ctx-size --max-model-len". Each
            has one that is also a flag of the server.
        option: Flags of the option that takes NAME=VALUE.
    """
    named = [_parameter(one) for one in flags]
    added = [*named, _pairs_parameter(option)]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for one in signature.parameters.values():
            parameters += added if one.name == "engine" else [one]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            pairs = given.pop("option")
            values = {one.name: (given.pop(one.name), one.default) for one in named}
            changed = {name: value for name, (value, default) in values.items() if value != default}
            command(engine=engine_options(pairs, changed), **given)

        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        return run

    return decorate


def _parameter(flags: str) -> inspect.Parameter:
    """Return the typer parameter for the engine option with these flags."""
    spelled = {*flags.replace("/", " ").split()}
    name, declared = next(
        (name, one)
        for name, one in options_of(EngineConfig).items()
        if spelled & {*one.flags(name)}
    )
    if declared.kind is bool:
        annotation: Any = Annotated[bool, typer.Option(flags, help=f"{declared.help}.")]
        return _keyword(name, annotation, declared.default)
    annotation = Annotated[
        Any,
        typer.Option(
            *flags.split(),
            metavar=declared.placeholder,
            parser=functools.partial(_read, declared),
            help=f"{declared.help}. Default: {declared.shown_default}.",
        ),
    ]
    return _keyword(name, annotation, None)


def _pairs_parameter(flags: str) -> inspect.Parameter:
    """Return the typer parameter for engine options of the form NAME=VALUE."""
    spelled = flags.split()
    annotation = Annotated[
        list[str] | None,
        typer.Option(
            *spelled,
            metavar="NAME=VALUE",
            is_eager=True,
            callback=list_options,
            help=(
                "Engine option, such as num_threads=2 or max_cache_bytes=4e9. Repeatable. "
                f"'{spelled[-1]} list' prints all options with their types and defaults."
            ),
        ),
    ]
    return _keyword("option", annotation, None)


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _read(declared: Option, text: str) -> Any:
    try:
        return engine_value(declared, text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
