"""The `kvboost-edge cache` command and its options."""

from __future__ import annotations

import enum
from typing import Annotated, Any

import typer

from kvboost_edge.cli.option_parsing import JsonOption, read_size

__all__ = ["add_cache"]


class CacheAction(enum.StrEnum):
    """Actions of `kvboost-edge cache`."""

    STATUS = "status"
    LIST = "list"
    VERIFY = "verify"
    PRUNE = "prune"
    CLEAR = "clear"


def cache(
    action: Annotated[
        CacheAction,
        typer.Argument(
            metavar="ACTION",
            help=(
                "What to do: status (show totals), list (show every entry), verify (read and "
                "check all blocks), prune (remove expired sessions, and entries beyond the "
                "limits) or clear (remove everything)."
            ),
        ),
    ],
    word: Annotated[
        str,
        typer.Argument(
            metavar="WORD",
            help="Text to search for in the entries' model names, fingerprints and session names. "
            "Default: all entries.",
        ),
    ] = "",
    disk_cache_dir: Annotated[
        str | None,
        typer.Option(
            "--disk-cache-dir",
            metavar="DIR",
            help="Directory of the disk tier. Default: the user cache directory.",
        ),
    ] = None,
    max_disk_bytes: Annotated[
        Any,
        typer.Option(
            "--max-disk-bytes",
            metavar="BYTES",
            parser=read_size,
            help="For prune: maximum total size of the blocks in bytes, such as 4GB. The least "
            "recently used blocks are removed first. Default: 16 GiB, or 20% of the free "
            "disk space if that is smaller.",
        ),
    ] = None,
    older_than: Annotated[
        float | None,
        typer.Option(
            "--older-than",
            metavar="DAYS",
            help="For prune: also remove entries that have not been used for this many days. "
            "Default: no limit.",
        ),
    ] = None,
    sure: Annotated[
        bool,
        typer.Option(
            "--yes",
            "-y",
            help="For clear: remove everything without asking. Required if standard input is "
            "not a terminal.",
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="For prune and clear: show what would be removed without removing it."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show, verify or remove KV blocks, packed weights, tokenizers and named sessions on disk.

    Does not remove files that a process has open.
    """
    from kvboost_edge.cli.cache.actions import run_cache

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
    """Add the command to `app`."""
    app.command(
        epilog=(
            "[b]Examples[/b]\n\nkvboost-edge cache status\n\nkvboost-edge cache verify\n\n"
            "kvboost-edge cache prune --max-disk-bytes 4GB --dry-run\n\nkvboost-edge cache "
            "clear qwen"
        )
    )(cache)
