"""The `kvboost-edge ps` command, which lists the loaded models of a server."""

from __future__ import annotations

import datetime
import json
from typing import Any

from rich.table import Table

from kvboost_edge.cli.console import open_console
from kvboost_edge.cli.servers.remote import ServerClient

__all__ = ["run_ps"]

_NEVER_YEAR = 9999


def run_ps(url: str, api_key: str, *, as_json: bool) -> None:
    """Print the loaded models of a server, and when each will be unloaded."""
    with ServerClient(url, api_key=api_key) as server:
        rows = server.loaded_models()
    if as_json:
        print(json.dumps(rows))
        return
    console = open_console()
    if not rows:
        console.print("No model is loaded. A request for a model loads it.")
        return
    table = Table()
    for name in ("name", "architecture", "format"):
        table.add_column(name, overflow="fold")
    for name in ("weights", "context", "unloaded"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        details = row.get("details") or {}
        table.add_row(
            str(row.get("name", "")),
            str(details.get("family", "")),
            str(details.get("quantization_level", "")),
            f"{row.get('size', 0) / 1e6:,.0f} MB",
            f"{row.get('context_length', 0):,}",
            _until(row),
        )
    console.print(table)


def _until(row: dict[str, Any]) -> str:
    """Return when a model will be unloaded, in words."""
    try:
        at = datetime.datetime.fromisoformat(str(row.get("expires_at")))
        seconds = (at - datetime.datetime.now(datetime.UTC)).total_seconds()
    except (ValueError, TypeError):
        return ""
    if at.year >= _NEVER_YEAR:
        return "never"
    return f"in {seconds:.0f} s" if seconds < 120 else f"in {seconds / 60:.0f} min"
