"""Models by their names in what is kept of them, and packed weights that a process has open."""

import errno
import json
import shutil
import sys
from pathlib import Path

import pytest

from helpers.gguf.writer import write_gguf
from helpers.tiers.disk_cases import SPACE, chain, opened, write
from kvboost_edge import CPUPagedEngine
from kvboost_edge.cli.app import run
from kvboost_edge.tiers.disk.files import Files

OPTIONS = {"num_blocks": 32, "weights": "int8"}


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def rows(capsys, *argv):
    capsys.readouterr()
    assert run(["cache", *argv, "--json"]) == 0
    return list(json.loads(capsys.readouterr().out)["rows"])


def kinds(found):
    return sorted((row["kind"], row["model"]) for row in found)


def test_all_that_is_kept_of_a_model_has_its_name(home, tiny_model_dir, capsys):
    shutil.copytree(tiny_model_dir, home / "Qwen-tiny")
    write_gguf(tiny_model_dir, home / "Lama.gguf", kind="Q8_0")
    for name in ("Qwen-tiny", "Lama.gguf"):
        with CPUPagedEngine.from_pretrained(home / name, disk_cache_dir=home / "cache" / "blocks", **OPTIONS) as engine:
            engine.generate("Hello there, how are you today? " * 4, max_new_tokens=1)
    lama = [("blocks", "Lama.gguf"), ("tokenizer", "Lama.gguf"), ("weights", "Lama.gguf")]
    qwen = [("blocks", "Qwen-tiny"), ("weights", "Qwen-tiny")]
    assert kinds(rows(capsys, "list")) == sorted(lama + qwen)
    assert kinds(rows(capsys, "list", "qwen")) == qwen
    assert kinds(rows(capsys, "verify", "LAMA")) == lama[:1]
    assert run(["cache", "status"]) == 0
    assert "in 1 tokenizer: " in capsys.readouterr().out
    assert kinds(rows(capsys, "clear", "lama")) == lama
    assert kinds(rows(capsys, "list")) == qwen


def test_weights_that_were_packed_without_a_name_get_it_when_they_are_loaded(home, tiny_model_dir, capsys):
    first = shutil.copytree(tiny_model_dir, home / "first")
    CPUPagedEngine.from_pretrained(first, **OPTIONS).close()
    shutil.rmtree(home / "cache" / "files")
    assert kinds(rows(capsys, "list")) == [("weights", "")]
    first.rename(home / "second")
    CPUPagedEngine.from_pretrained(home / "second", **OPTIONS).close()
    assert kinds(rows(capsys, "list")) == [("weights", "second")]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows deletes no mapped file")
def test_packed_weights_that_are_open_stay(home, tiny_model_dir, capsys):
    for _ in range(2):  # packed, then mapped as they were
        with CPUPagedEngine.from_pretrained(tiny_model_dir, **OPTIONS):
            (row,) = rows(capsys, "clear")
            assert (row["in_use"], row["removed"]) == (True, False)
            assert run(["cache", "clear"]) == 0
            assert "stays: open in a process" in capsys.readouterr().out
            assert Path(row["path"]).exists()
    assert rows(capsys, "list")[0]["in_use"] is False
    assert rows(capsys, "clear")[0]["removed"] is True
    assert not Path(row["path"]).exists()


def test_where_files_cannot_be_locked_weights_are_removed_all_the_same(home, tiny_model_dir, capsys, monkeypatch):
    CPUPagedEngine.from_pretrained(tiny_model_dir, **OPTIONS).close()

    def lock(self, handle):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(Files, "lock", lock)
    assert rows(capsys, "clear")[0]["removed"] is True


def test_pruning_says_what_stays_because_it_is_open(home, capsys):
    with opened(home / "cache" / "blocks", SPACE, description={"model": "alpha"}) as tier:
        write(tier, chain(20))
        for dry in (["--dry-run"], []):
            assert run(["cache", "prune", "--max-disk-bytes", "0", *dry]) == 0
            assert "stays: open in a process" in capsys.readouterr().out


class Terminal:
    def __init__(self, answer):
        self.answer = answer

    def isatty(self):
        return True

    def readline(self, size=-1):
        return f"{self.answer}\n"


@pytest.mark.parametrize(
    ("answer", "extra", "left"), [("n", [], 1), ("y", [], 0), ("n", ["--yes"], 0), ("n", ["alph"], 0)]
)
def test_whoever_clears_everything_at_a_terminal_is_asked(
    home,
    answer,
    extra,
    left,
    capsys,
    monkeypatch,
):
    with opened(home / "cache" / "blocks", SPACE, description={"model": "alpha"}) as tier:
        write(tier, chain(2))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", Terminal(answer))
        patch.setattr(sys.stdout, "isatty", lambda: True)
        patch.setattr("builtins.input", lambda prompt="": answer)
        assert run(["cache", "clear", *extra]) == 0
    assert ("Nothing was removed." in capsys.readouterr().out) == bool(left)
    assert len(rows(capsys, "list")) == left
