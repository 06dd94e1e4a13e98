"""The `kvboost-edge pull` and `kvboost-edge rm` commands, which add and remove models here."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TimeRemainingColumn

from kvboost_edge.cli.console import open_console, text_column
from kvboost_edge.models.locate.managed import managed_models
from kvboost_edge.models.pull import MAX_PULL_BYTES
from kvboost_edge.models.pull.download import PullEvent, PullLimits, pull_model
from kvboost_edge.models.pull.names import checked_name

__all__ = ["run_pull", "run_rm"]


def run_pull(name: str, registries: Sequence[str], max_bytes: int | None, *, as_json: bool) -> None:
    """Download a model, show the progress, and print the name for -m."""
    limits = PullLimits(MAX_PULL_BYTES if max_bytes is None else max_bytes)
    columns = (text_column("{task.description}"), BarColumn(), DownloadColumn())
    console = open_console(stderr=True, quiet=as_json)
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def tell(event: PullEvent) -> None:
            if event.digest:
                if event.digest not in tasks:
                    tasks[event.digest] = bars.add_task(event.status, total=event.total)
                bars.update(tasks[event.digest], completed=event.completed)

        store = managed_models()
        model = pull_model(name, store, registries=registries, limits=limits, tell=tell)
    if as_json:
        print(json.dumps({"name": model.name, "bytes": model.num_bytes}))
        return
    open_console().print(
        f"Pulled {model.name} ({model.num_bytes / 1e6:,.0f} MB). Run it with: kvboost-edge chat -m "
        f"{model.name}",
        soft_wrap=True,
    )


def run_rm(names: Sequence[str]) -> None:
    """Remove models that were pulled or created."""
    store = managed_models()
    for name in names:
        store.remove(checked_name(name))
        open_console().print(f"Removed {name}.", soft_wrap=True)
