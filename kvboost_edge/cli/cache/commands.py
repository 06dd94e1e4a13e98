"""`kvboost-edge cache` and its options."""

from __future__ import annotations

import enum
from typing import Annotated, Any

import typer

from kvboost_edge.cli.options import read_size

__all__ = ["add_cache"]

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


class CacheAction(enum.StrEnum):
    """What `kvboost-edge cache` does."""

    STATUS = "status"
    LIST = "list"
    VERIFY = "verify"
    PRUNE = "prune"
    CLEAR = "clear"


def cache(
    action: Annotated[
        CacheAction,
        typer.Argument(
            help=(
                "status: sums; list: each; verify: read all blocks; prune: what is too much; "
                "clear: all."
            )
        ),
    ],
    word: Annotated[
        str, typer.Argument(help="Only what has this in its model's name or fingerprint.")
    ] = "",
    disk_cache_dir: Annotated[
        str | None,
        typer.Option(
            "--disk-cache-dir", metavar="DIR", help="Where the disk tier lies, if not as usual."
        ),
    ] = None,
    max_disk_bytes: Annotated[
        Any,
        typer.Option(
            "--max-disk-bytes",
            metavar="BYTES",
            parser=read_size,
            help="prune: blocks beyond this, such as 4GB, go, those used longest ago first.",
        ),
    ] = None,
    older_than: Annotated[
        float | None,
        typer.Option(
            "--older-than", metavar="DAYS", help="prune: so does what was not used for so long."
        ),
    ] = None,
    sure: Annotated[
        bool,
        typer.Option(
            "--yes",
            "-y",
            help="clear: do not ask before everything is removed; required without a terminal.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="prune, clear: only say what would go.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Keys and values on disk and packed weights: sizes, ages, soundness, removal. What a process
    has open stays.
    """
    from kvboost_edge.cli.cache.run import run_cache

    run_cache(
        action.value,
        word,
        disk_cache_dir=disk_cache_dir,
        max_disk_bytes=max_disk_bytes,
        older_than=older_than,
        dry_run=dry_run,
        sure=sure,
        as_json=as_json,
    )


def add_cache(app: typer.Typer) -> None:
    """Make it a command of `app`."""
    app.command(
        epilog=(
            "[b]Examples[/b]\n\nkvboost-edge cache status\n\nkvboost-edge cache verify\n\n"
            "kvboost-edge cache prune --max-disk-bytes 4GB --dry-run\n\nkvboost-edge cache "
            "clear qwen"
        )
    )(cache)
