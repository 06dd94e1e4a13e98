"""The `kvboost-edge cache` actions, which show, verify and remove cached files."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress
from rich.table import Table

from kvboost_edge.cli.cache.cached_files import (
    BLOCKS,
    SESSION,
    TOKENIZER,
    WEIGHTS,
    CacheEntry,
    delete_entry,
    find_entries,
    packed_directory,
    printable,
)
from kvboost_edge.cli.console import counted, open_console, text_column
from kvboost_edge.config import disk_cache_root
from kvboost_edge.errors import ConfigError, KVBoostError
from kvboost_edge.tiers.disk.capacity import default_cap
from kvboost_edge.tiers.disk.survey import default_directory, verify_space
from kvboost_edge.tiers.disk.system_calls import Files

__all__ = ["run_cache"]

_DAY_S = 86_400.0
_FINGERPRINT = re.compile(r"^([0-9a-f]{8})[0-9a-f]{8,}[ -]")
_NAME_WIDTH = 19  # width of a short fingerprint and a format such as "int4-asym"
_OTHERS_WIDTH = 61  # width of a row without its name
_KINDS = {
    BLOCKS: ("KV cache", "KV caches"),
    WEIGHTS: ("file of packed weights", "files of packed weights"),
    TOKENIZER: ("tokenizer", "tokenizers"),
    SESSION: ("named session", "named sessions"),
}


def run_cache(
    action: str,
    word: str,
    *,
    disk_cache_dir: str | None,
    max_disk_bytes: int | None,
    older_than: float | None,
    dry_run: bool,
    sure: bool,
    as_json: bool,
) -> None:
    """Run one of the actions status, list, verify, prune and clear.

    The action clear asks for confirmation on the terminal if it would remove everything, unless
    `sure`.

    Args:
        action: The action.
        word: Text that the names of the selected entries contain; "" for all entries.
        disk_cache_dir: Directory of the disk tier; None for the default.
        max_disk_bytes: Maximum total size of the blocks after prune; None for the default.
        older_than: Days without use after which prune removes an entry.
        dry_run: True to remove nothing.
        sure: True to skip the confirmation.
        as_json: True to print JSON.

    Raises:
        ConfigError: The action does not support an option, or there is no terminal for the
            confirmation.
        KVBoostError: Damaged blocks were found, or an entry could not be removed.
    """
    _check(action, max_disk_bytes, older_than, dry_run)
    root = disk_cache_root(disk_cache_dir) if disk_cache_dir else default_directory()
    files = Files()
    console = open_console(quiet=as_json)
    try:
        entries = [one for one in find_entries(root, files) if one.matches(word)]
        if action == "verify":
            answer = _verify(entries, files, open_console(stderr=True, quiet=as_json))
        elif action in ("prune", "clear"):
            going = (
                _pruned(entries, root, files, max_disk_bytes, older_than)
                if action == "prune"
                else entries
            )
            asks = action == "clear" and going and not (word or dry_run or sure)
            if asks and not _agreed(going, as_json):
                console.print("Nothing was removed.")
                return
            answer = _remove(going, files, dry_run)
        else:
            answer = {"rows": [one.row() for one in entries]}
    except OSError as error:
        raise ConfigError(
            f"disk_cache_dir {str(root)!r} cannot be read or changed: {error}"
        ) from error
    answer |= {"disk_cache_dir": str(root), "packed_dir": str(packed_directory())}
    answer["bytes"] = sum(row["bytes"] for row in answer["rows"])
    if as_json:
        print(json.dumps(answer))  # ASCII, because a path may contain bytes that are not valid text
    elif action == "status":
        _print_status(entries, root, console)
    else:
        if action == "list" and entries:
            _print_status(entries, root, console)
        _print_rows(answer["rows"], action, word, console, dry_run=dry_run)
    if any(row.get("damaged") for row in answer["rows"]):
        raise KVBoostError(
            "damaged blocks were found and are not used; remove them with `kvboost-edge cache "
            "clear`"
        )
    if any("error" in row for row in answer["rows"]):
        raise KVBoostError(
            "some entries could not be removed: "
            + next(row["error"] for row in answer["rows"] if "error" in row)
        )


def _check(
    action: str, max_disk_bytes: int | None, older_than: float | None, dry_run: bool
) -> None:
    given = {"--max-disk-bytes": max_disk_bytes, "--older-than": older_than}
    for name, value in given.items():
        if value is not None and action != "prune":
            raise ConfigError(f"{name} applies to cache prune only, not to cache {action}")
        if value is not None and value < 0:
            raise ConfigError(f"{name}={value} must be at least 0")
    if dry_run and action not in ("prune", "clear"):
        raise ConfigError(
            f"--dry-run applies to cache prune and cache clear only, not to cache {action}"
        )


def _pruned(
    entries: Sequence[CacheEntry],
    root: Path,
    files: Files,
    max_disk_bytes: int | None,
    older_than: float | None,
) -> list[CacheEntry]:
    """Return the entries to remove: old entries, ended sessions, and the oldest blocks beyond the
    size limit.

    Includes entries that a process has open. The caller reports them as kept.
    """
    cap = default_cap(root, files) if max_disk_bytes is None else max_disk_bytes
    excess = sum(one.nbytes for one in entries if one.space is not None) - cap
    going = []
    for one in entries:
        old = older_than is not None and time.time() - one.changed > older_than * _DAY_S
        if old or one.has_expired or (one.space is not None and excess > 0):
            going.append(one)
            excess -= one.nbytes if one.space is not None and not one.in_use else 0
    return going


def _remove(going: Sequence[CacheEntry], files: Files, dry_run: bool) -> dict[str, Any]:
    """Delete the entries that no process has open, and return a row for each entry."""
    rows = []
    for one in going:
        row = one.row()
        try:
            if not dry_run:
                row["in_use"] = not delete_entry(one, files)
        except OSError as error:
            row["error"] = str(error)
        rows.append({**row, "removed": not dry_run and not row["in_use"] and "error" not in row})
    return {"rows": rows, "dry_run": dry_run}


def _verify(entries: Sequence[CacheEntry], files: Files, console: Console) -> dict[str, Any]:
    spaces = [one for one in entries if one.space is not None]
    columns = (text_column("checking"), BarColumn(), DownloadColumn())
    rows = []
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=sum(one.nbytes for one in spaces))
        advance: Callable[[int], None] = lambda nbytes: bar.advance(task, nbytes)  # noqa: E731
        for one in spaces:
            assert one.space is not None
            verdict = verify_space(one.space, files, advance)
            rows.append({**one.row(), "blocks": verdict.sound, "damaged": verdict.damaged})
    return {"rows": rows}


def _agreed(going: Sequence[CacheEntry], as_json: bool) -> bool:
    """Ask for confirmation on the terminal. Raises ConfigError without a terminal."""
    size = sum(one.nbytes for one in going) / 1e6
    if as_json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(
            f"cache clear would remove up to {size:,.1f} MB, but there is no terminal to confirm "
            "it; add --yes, name a model, or check with --dry-run first"
        )
    return typer.confirm(f"Remove everything that no process has open (up to {size:,.1f} MB)?")


def _print_status(entries: Sequence[CacheEntry], root: Path, console: Console) -> None:
    for kind, (one_of, many) in _KINDS.items():
        of_kind = [one for one in entries if one.kind == kind]
        used = sum(one.in_use for one in of_kind)
        open_now = f", {used} open in a process" if used else ""
        total = sum(one.nbytes for one in of_kind)
        place = root if kind in (BLOCKS, SESSION) else packed_directory()
        number = counted(len(of_kind), one_of, many)
        console.print(
            f"{total / 1e6:,.1f} MB in {number}{open_now}: {printable(str(place))}", soft_wrap=True
        )


def _print_rows(
    rows: Sequence[dict[str, Any]], action: str, word: str, console: Console, *, dry_run: bool
) -> None:
    if not rows:
        empty = "Nothing to remove" if action in ("prune", "clear") else "Nothing is cached"
        console.print(f"{empty} under a name with {word!r}." if word else f"{empty}.")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("what", "model"):
        table.add_column(name, overflow="fold")
    width = max(_NAME_WIDTH, console.width - _OTHERS_WIDTH)
    table.add_column("fingerprint, format", no_wrap=True, max_width=width, overflow="ellipsis")
    for name in ("size", "days"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state")
    for row in sorted(rows, key=lambda row: -row["bytes"]) if action == "list" else rows:
        size = f"{row['bytes'] / 1e6:,.1f} MB"
        days = f"{row['days']:.1f}"
        table.add_row(
            row["kind"],
            row["model"] or "unknown",
            _FINGERPRINT.sub(r"\1 ", row["name"]),
            size,
            days,
            _said(row, action, dry_run),
        )
    console.print(table)


def _said(row: dict[str, Any], action: str, dry_run: bool) -> str:
    if action == "verify":
        damaged = f", {row['damaged']:,} damaged" if row["damaged"] else ""
        return f"{counted(row['blocks'], 'block', 'blocks')} intact{damaged}"
    if "error" in row:
        return "not removed: an error"
    if row["in_use"]:
        return "open in a process" if action == "list" else "not removed: open in a process"
    if action in ("prune", "clear"):
        return "would be removed" if dry_run else "removed"
    return "not open"
