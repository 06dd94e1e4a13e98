"""The bar while a model is loaded: it counts what there is to count, in its own unit."""

import io
import re

from rich.console import Console
from rich.progress import Progress

from kvboost_edge.cli.session import _loading_bar


def test_kernels_are_counted_as_kernels_and_weights_in_megabytes(monkeypatch):
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
