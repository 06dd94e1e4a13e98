"""Tests of the progress bar of model loading, which counts each phase in its own unit."""

import io
import re

from rich.console import Console
from rich.progress import Progress

from helpers.clocks import give_clock
from kvboost_edge.cli import session
from kvboost_edge.cli.session import (
    _loading_bar,
    _loading_shown,
    _LoadingLines,
    loaded_engine,
    memory_line,
)
from kvboost_edge.models.locate.model import READ_BYTES_PER_SECOND


def test_loading_progress_counts_kernels_and_megabytes(monkeypatch):
    console = Console(file=io.StringIO(), force_terminal=True)
    bars = []
    heard = []

    class Seen(Progress):
        def __init__(self, *columns, **options):
            super().__init__(*columns, auto_refresh=False, **options)
            bars.append(self)

    monkeypatch.setattr("kvboost_edge.cli.session.Progress", Seen)
    monkeypatch.setattr("kvboost_edge.kernels.aot.on_compiling", heard.append)

    def shown():
        paper = Console(file=io.StringIO(), width=120)
        paper.print(bars[0].get_renderable())
        return " ".join(re.sub("[━╸╺]", "", paper.file.getvalue()).split())

    with _loading_bar(console, "m") as packed:
        compiled = heard[0]
        assert compiled is not None
        assert shown() == "loading m"
        compiled(2, 7)
        assert shown() == "compiling kernels for this machine, once 2 of 7"
        compiled(7, 7)
        assert shown() == "loading m"
        packed(300_000_000, 1_200_000_000)
        assert shown() == "packing the weights of m 300 of 1,200 MB"
        packed(1_200_000_000, 1_200_000_000)
        assert shown() == "loading m"
    assert heard[-1] is None


def test_without_a_terminal_each_loading_phase_is_one_line(monkeypatch, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(bytes(3_000_000))
    now = [100.0]
    give_clock(monkeypatch, lambda: now[0], session)
    heard = []
    monkeypatch.setattr("kvboost_edge.kernels.aot.on_compiling", heard.append)
    monkeypatch.setattr("kvboost_edge.kernels.aot.default_num_threads", lambda: 2)
    file = io.StringIO()
    with _loading_shown(Console(file=file, width=40), "m", tmp_path) as packed:
        for done in range(8):
            heard[0](done, 7)
        for now[0], done in (
            (103.0, 100),
            (103.05, 110),
            (104.0, 200),
            (106.0, 400),
            (112.0, 1200),
        ):
            packed(done * 10**6, 1200 * 10**6)
    assert heard[-1] is None
    assert file.getvalue().splitlines() == [
        "loading m, 3 MB, a few seconds",
        "compiling 7 kernels for this machine, once, about 14 s",
        "packing the weights of m, 1,200 MB, once, about 11 s",
    ]


def test_the_loading_time_of_a_large_model_is_estimated():
    file = io.StringIO()
    lines = _LoadingLines(Console(file=file, width=40), "m")
    lines.loading(int(4.9 * READ_BYTES_PER_SECOND))
    lines.loading(12 * READ_BYTES_PER_SECOND)
    few, about = file.getvalue().splitlines()
    assert few.endswith(" MB, a few seconds")
    assert about.endswith(" MB, about 12 s")


def test_the_pool_size_is_shown_as_a_maximum():
    stats = {"pool_bytes": 4_500_000_000, "process_rss_bytes": 700_000_000}
    assert memory_line(stats) == "KV cache up to 4.5 GB, filled as needed; 0.7 GB resident"
    assert memory_line({**stats, "pool_bytes": 0}) == "0.7 GB resident"
    notes = Console(file=io.StringIO(), width=200)
    with loaded_engine("kvboost-edge/demo", {"max_cache_bytes": "64M"}, notes):
        said = notes.file.getvalue()
    assert re.search(
        r" threads, KV cache up to 64 MB, filled as needed; \d\.\d GB resident, ", said
    )
