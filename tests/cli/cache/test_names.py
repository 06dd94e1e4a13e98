"""Tests of model names in cached data, and of packed weights that a process has open."""

import errno
import shutil
import sys
from pathlib import Path

import pytest

from helpers.gguf.writer import write_gguf
from helpers.tiers.disk_cases import SPACE, chain, opened, write
from kvboost_edge import CPUPagedEngine
from kvboost_edge.cli.app import run
from kvboost_edge.tiers.disk.system_calls import Files

OPTIONS = {"num_blocks": 32, "weights": "int8"}


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


@pytest.fixture
def rows(answered):
    """Function `rows(*argv)` that returns the rows of `cache`."""
    return lambda *argv: answered("cache", *argv)["rows"]


def kinds(found):
    return sorted((row["kind"], row["model"]) for row in found)


def test_all_entries_of_a_model_have_its_name(home, tiny_model_dir, rows, printed):
    shutil.copytree(tiny_model_dir, home / "Qwen-tiny")
    write_gguf(tiny_model_dir, home / "Lama.gguf", kind="Q8_0")
    for name in ("Qwen-tiny", "Lama.gguf"):
        with CPUPagedEngine.from_pretrained(
            home / name, disk_cache_dir=home / "cache" / "blocks", **OPTIONS
        ) as engine:
            engine.generate("Hello there, how are you today? " * 4, max_new_tokens=1)
    lama = [("blocks", "Lama.gguf"), ("tokenizer", "Lama.gguf"), ("weights", "Lama.gguf")]
    qwen = [("blocks", "Qwen-tiny"), ("weights", "Qwen-tiny")]
    assert kinds(rows("list")) == sorted(lama + qwen)
    assert kinds(rows("list", "qwen")) == qwen
    assert kinds(rows("verify", "LAMA")) == lama[:1]
    assert "in 1 tokenizer: " in printed("cache", "status").out
    assert kinds(rows("clear", "lama")) == lama
    assert kinds(rows("list")) == qwen


def test_unnamed_packed_weights_are_named_at_load(home, tiny_model_dir, rows):
    first = shutil.copytree(tiny_model_dir, home / "first")
    CPUPagedEngine.from_pretrained(first, **OPTIONS).close()
    shutil.rmtree(home / "cache" / "files")
    assert kinds(rows("list")) == [("weights", "")]
    first.rename(home / "second")
    CPUPagedEngine.from_pretrained(home / "second", **OPTIONS).close()
    assert kinds(rows("list")) == [("weights", "second")]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows deletes no mapped file")
def test_open_packed_weights_are_kept(home, tiny_model_dir, rows, printed):
    for _ in range(2):  # packed first, then mapped
        with CPUPagedEngine.from_pretrained(tiny_model_dir, **OPTIONS):
            (row,) = rows("clear", "--yes")
            assert (row["in_use"], row["removed"]) == (True, False)
            assert "not removed: open in a process" in printed("cache", "clear", "--yes").out
            assert Path(row["path"]).exists()
    assert rows("list")[0]["in_use"] is False
    assert rows("clear", "--yes")[0]["removed"] is True
    assert not Path(row["path"]).exists()


def test_weights_are_removed_if_files_cannot_be_locked(home, tiny_model_dir, rows, monkeypatch):
    CPUPagedEngine.from_pretrained(tiny_model_dir, **OPTIONS).close()

    def lock(self, handle):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(Files, "lock", lock)
    assert rows("clear", "--yes")[0]["removed"] is True


def test_prune_reports_entries_kept_because_they_are_open(home, printed):
    with opened(home / "cache" / "blocks", SPACE, description={"model": "alpha"}) as tier:
        write(tier, chain(20))
        for dry in (["--dry-run"], []):
            assert (
                "not removed: open in a process"
                in printed("cache", "prune", "--max-disk-bytes", "0", *dry).out
            )


class Terminal:
    def __init__(self, answer):
        self.answer = answer

    def isatty(self):
        return True

    def readline(self, size=-1):
        return f"{self.answer}\n"


@pytest.mark.parametrize(
    ("answer", "extra", "left"),
    [("n", [], 1), ("y", [], 0), ("n", ["--yes"], 0), ("n", ["alph"], 0)],
)
def test_clear_asks_for_confirmation_in_a_terminal(
    home, answer, extra, left, rows, capsys, monkeypatch
):
    with opened(home / "cache" / "blocks", SPACE, description={"model": "alpha"}) as tier:
        write(tier, chain(2))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", Terminal(answer))
        patch.setattr(sys.stdout, "isatty", lambda: True)
        patch.setattr("builtins.input", lambda prompt="": answer)
        assert run(["cache", "clear", *extra]) == 0
    assert ("Nothing was removed." in capsys.readouterr().out) == bool(left)
    assert len(rows("list")) == left
