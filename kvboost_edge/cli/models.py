"""`kvboost-edge models`: what is on this machine already, and whether it runs here."""

from __future__ import annotations

import json
from typing import Any

from rich.table import Table

from kvboost_edge.cli.console import open_console, spinner
from kvboost_edge.cli.inspect import installed_route
from kvboost_edge.config import EngineConfig
from kvboost_edge.errors import KVBoostError
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.locate.stores import StoredModel, stored_models
from kvboost_edge.text.gguf_tokenizer import check_vocabulary_kind

__all__ = ["model_rows", "run_models"]

_REFUSED = "refused"


def run_models(word: str, options: dict[str, Any], *, as_json: bool) -> None:
    """Print a row for each model whose name holds `word`; a model that cannot be read is a row with
    its reason.
    """
    console = open_console()
    config = EngineConfig.from_options(**options)
    with spinner(open_console(stderr=True, quiet=as_json), "looking at what is here …"):
        rows = model_rows(word, config)
    if as_json:
        print(json.dumps(rows))  # ASCII: a name may hold bytes that are no UTF-8
        return
    if not rows:
        console.print("No model is here yet. Try kvboost-edge demo, or -m owner/name-GGUF:Q4_K_M.")
        return
    table = Table(title="Models on this machine; the name is what -m takes", title_justify="left")
    for name in ("name", "in", "format"):
        table.add_column(name, overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("runs", overflow="fold")
    for row in rows:
        runs = row["runs"] if row["runs"] != _REFUSED else f"{_REFUSED}: {row['reason']}"
        size = f"{row['bytes'] / 1e6:,.0f} MB" if row["bytes"] else ""
        cells = [
            _printable(text) for text in (row["name"], row["store"], row["format"], size, runs)
        ]
        table.add_row(*cells, style="dim" if row["runs"] == _REFUSED else "")
    console.print(table)


def _printable(text: str) -> str:
    """What a file is called may move a terminal's cursor, or be no text at all."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def model_rows(word: str, config: EngineConfig) -> list[dict[str, Any]]:
    """name, store, path, format, bytes, runs ('native', 'torch' or 'refused') and reason of every
    model.
    """
    return [_row(model, config) for model in stored_models() if word.lower() in model.name.lower()]


def _row(model: StoredModel, config: EngineConfig) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": model.name,
        "store": model.store,
        "path": None if model.path is None else str(model.path),
        "format": "",
        "bytes": 0,
        "runs": _REFUSED,
        "reason": model.problem,
    }
    if model.path is None:
        return row
    try:
        checkpoint = Checkpoint.open(model.path)
        row |= {"format": checkpoint.format, "bytes": checkpoint.file_bytes}
        taken = installed_route(checkpoint, config)
        if checkpoint.is_gguf:
            check_vocabulary_kind(checkpoint.gguf_settings(), name=model.path.name)
    except (KVBoostError, OSError) as error:
        return {**row, "reason": str(error)}
    except (
        Exception
    ) as error:  # whatever else a damaged file brings about: the others are listed all the same
        return {**row, "reason": f"cannot be read: {type(error).__name__}: {error}"}
    runs = taken["runner"] if taken["runner"] != "none" else _REFUSED
    return {**row, "runs": runs, "reason": taken["runner_reason"]}
