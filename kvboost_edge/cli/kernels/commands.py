"""The `kvboost-edge kernels` command and its options."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

from kvboost_edge.cli.option_parsing import JsonOption

__all__ = ["add_kernels"]


class KernelsAction(enum.StrEnum):
    """Actions of `kvboost-edge kernels`."""

    STATUS = "status"
    BUILD = "build"


def kernels(
    action: Annotated[
        KernelsAction,
        typer.Argument(
            metavar="ACTION",
            help=(
                "What to do: status (show which kernel library this machine uses) or build "
                "(compile the kernels and write a library)."
            ),
        ),
    ],
    target: Annotated[
        list[str] | None,
        typer.Option(
            "--target",
            metavar="NAME",
            help=(
                "For build: class of processors to build for, or 'all' for every class of this "
                "machine's architecture. Repeatable. Default: this machine's class."
            ),
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help=(
                "For build: directory of the libraries. Set KVBOOST_EDGE_KERNELS to it where they "
                "are used. Default: a directory in the user cache directory, which needs no "
                "setting."
            ),
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            metavar="N",
            min=1,
            help="For build: number of compiling processes. Default: one per usable CPU.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Build libraries of compiled kernels, or show the one in use.

    A library works on every machine of its class. With it, nothing is compiled at startup, and
    Numba is not imported.
    """
    from kvboost_edge.cli.kernels.run import run_build, run_status

    if action is KernelsAction.STATUS:
        unused = {"--target": target, "--out": out, "--jobs": jobs}
        for flag in (flag for flag, value in unused.items() if value):
            raise typer.BadParameter("it has no effect with status; leave it out", param_hint=flag)
        run_status(as_json=as_json)
    else:
        run_build(target or [], out, jobs, as_json=as_json)


def add_kernels(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command(
        epilog=(
            "[b]Examples[/b]\n\nkvboost-edge kernels status\n\nkvboost-edge kernels build\n\n"
            "kvboost-edge kernels build --target all --out ./kernels"
        )
    )(kernels)
