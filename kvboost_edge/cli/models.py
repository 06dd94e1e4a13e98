"""The `kvboost-edge models` command, which lists the models on this machine."""

from __future__ import annotations

import json
from typing import Any

from rich.table import Table

from kvboost_edge.cli.console import open_console, spinner
from kvboost_edge.cli.inspect import installed_route
from kvboost_edge.config import EngineConfig
from kvboost_edge.errors import KVBoostError
from kvboost_edge.host.memory import total_bytes
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.locate.ollama_store import OLLAMA
from kvboost_edge.models.locate.stores import StoredModel, stored_models
from kvboost_edge.models.locate.suggestions import SUGGESTIONS
from kvboost_edge.text.gguf_tokenizer import check_vocabulary_kind

__all__ = ["model_rows", "run_models", "run_suggest"]

_REFUSED = "refused"
_GB = 0.95e9  # a machine with 8 GB reports slightly less


def run_models(word: str, options: dict[str, Any], *, as_json: bool) -> None:
    """Print a row for each model whose name contains `word`, including unreadable models."""
    console = open_console()
    config = EngineConfig.from_options(**options)
    with spinner(open_console(stderr=True, quiet=as_json), "looking for models …"):
        rows = model_rows(word, config)
    if as_json:
        print(json.dumps(rows))  # ASCII, because a name may contain bytes that are not UTF-8
        return
    if not rows and word:
        console.print(f"No model has {word!r} in its name; leave out the word to see all models.")
        return
    if not rows:
        console.print(
            "No models found. Try `kvboost-edge demo`, or a model from `kvboost-edge models "
            "--suggest`."
        )
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


def run_suggest(word: str, *, as_json: bool) -> None:
    """Print recommended models whose name contains `word`. Dims those that exceed the memory."""
    memory = total_bytes()
    wanted = [one for one in SUGGESTIONS if word.lower() in one.name.lower()]
    rows = [{**one._asdict(), "fits": one.memory_gb * _GB <= memory} for one in wanted]
    if as_json:
        print(json.dumps(rows))
        return
    console = open_console()
    if not wanted:
        console.print(f"No recommended model has {word!r} in its name; leave out the word.")
        return
    width = max(len(one.name) for one in SUGGESTIONS)
    heading = f"memory   {'name (-m)':<{width}}     size   licence      with Ollama"
    console.print(heading, style="bold", soft_wrap=True)
    # Print lines instead of a table, because names must stay whole to be copied.
    for one, row in zip(wanted, rows, strict=True):
        console.print(
            f"{one.memory_gb:3} GB   {one.name:<{width}}   {one.file_bytes / 1e9:4.1f} GB   "
            f"{one.licence:<10}   {OLLAMA}{one.ollama}",
            style="" if row["fits"] else "dim",
            soft_wrap=True,
        )
    console.print(
        f"This machine has {memory / 1e9:.1f} GB. Sizes are approximate. Names in the first column "
        "are downloaded from the hub; `ollama:` names are read from Ollama's own folder.",
        style="dim",
    )


def _printable(text: str) -> str:
    """Escape unprintable characters, because a file name may move the cursor or be invalid text."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def model_rows(word: str, config: EngineConfig) -> list[dict[str, Any]]:
    """Return a JSON object for each model whose name contains `word`.

    The keys are name, store, path, format, bytes, runs ('native', 'torch' or 'refused') and reason.
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
    except Exception as error:  # a damaged file must not hide the other models
        return {**row, "reason": f"cannot be read: {type(error).__name__}: {error}"}
    runs = taken["runner"] if taken["runner"] != "none" else _REFUSED
    return {**row, "runs": runs, "reason": taken["runner_reason"]}
