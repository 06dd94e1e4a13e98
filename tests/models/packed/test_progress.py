"""The progress bar: on terminals only, and only when something is packed."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from kvboost_edge.models.packed.progress import packing_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_nothing_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with packing_progress() as progress:
        assert progress is None


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with packing_progress("packing int8") as progress:
        assert progress is not None
        assert screen.getvalue() == ""
        for done in (0, 500_000, 1_000_000):
            progress(done, 1_000_000)
    assert "packing int8" in screen.getvalue()
    assert "1.0/1.0 MB" in screen.getvalue()


def test_the_bar_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    threads = threading.active_count()

    def fail() -> None:
        with packing_progress() as progress:
            assert progress is not None
            progress(1, 2)
            assert threading.active_count() == threads
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    assert threading.active_count() == threads
