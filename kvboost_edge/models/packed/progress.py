"""A progress bar for packing, on terminals only; the log says the same everywhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from kvboost_edge.models.packed.file import Progress

__all__ = ["packing_progress"]

_REFRESH_S = 0.1


@contextlib.contextmanager
def packing_progress(label: str = "packing weights") -> Iterator[Progress | None]:
    """A callback (bytes done, bytes in all) for `load_packed` that draws a bar on standard error; None where that is no
    terminal. The bar appears with the first call, so nothing is drawn where the packed file is there already."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    # No thread of its own: the callback draws.
    console = Console(stderr=True)
    bar = Bar(*columns, TimeRemainingColumn(), console=console, transient=True, auto_refresh=False)
    task = bar.add_task(label, total=None)
    drawn = 0.0

    def show(done: int, total: int) -> None:
        nonlocal drawn
        if not bar.live.is_started:
            bar.start()
        bar.update(task, completed=done, total=total)
        now = time.monotonic()
        if now - drawn >= _REFRESH_S or done >= total:
            drawn = now
            bar.refresh()

    try:
        yield show
    finally:
        bar.stop()
