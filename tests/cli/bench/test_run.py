"""Tests of the `bench` command on a tiny model: its rows, rejected arguments, and Ctrl-C."""

import io
import json
import re
import tempfile
import threading

import pytest
from rich.console import Console

from helpers.models.mtp_heads import save_with_head
from kvboost_edge.cli.bench import run
from kvboost_edge.cli.bench.cases import Case, Sample
from kvboost_edge.cli.bench.measure import CaseTimer

SMALL = ("--option", "num_blocks=64", "--option", "max_num_seqs=8", "-t", "1")
SHORT = ("-p", "32", "-n", "8", "-r", "2")


@pytest.fixture
def bench(tiny_model_dir, printed):
    """Function `bench(*argv, code=0)` that runs the command on the tiny model and returns its
    output.
    """
    return lambda *argv, code=0: printed("bench", "-m", tiny_model_dir, *SMALL, *argv, code=code)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Directory of temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_every_case_is_measured(bench, folder):
    found = json.loads(bench(*SHORT, "-d", "0,64", "--shared", "3", "-o", "json").out)
    assert [row["test"] for row in found] == [
        "pp32",
        "tg8",
        "pp32 @ d64",
        "tg8 @ d64",
        "warm @ d64",
        "shared x3 @ d64",
        "restart @ d64",
    ]
    for row in found:
        assert len(row["samples_ns"]) == 2
        assert row["avg_ts"] > 0
        assert (row["n_threads"], row["backends"]) == (1, "native")
    assert not list(folder.iterdir())


def test_the_table_is_printed_without_options(bench):
    shown = bench(*SHORT).out
    assert re.search(r"\| +pp32 \| +[\d.]+ ± [\d.]+ \| +[\d.]+ \|\n", shown)
    assert "warm" not in shown
    assert "restart" not in shown


def test_speculation_is_off_by_default(bench, monkeypatch):
    seen = []
    measured = CaseTimer.sample

    def sample(self, case):
        seen.append(self._engine.config.speculation)
        return measured(self, case)

    monkeypatch.setattr(CaseTimer, "sample", sample)
    bench("-p", "16", "-n", "0", "-r", "1")
    bench("-p", "16", "-n", "0", "-r", "1", "--option", "speculation=on")
    assert {*seen[:2]} == {"off"}
    assert {*seen[2:]} == {"on"}


def test_kinds_of_speculation_are_compared(bench, tiny_model_dir, refused):
    argv = ("-p", "0", "-n", "8", "-r", "1", "-o", "json", "--draft-model", tiny_model_dir)
    found = json.loads(bench(*argv, "--speculation", "off,lookup,draft").out)
    assert [row["test"] for row in found] == ["tg8 (off)", "tg8 (lookup)", "tg8 (draft)"]
    assert [row["speculation"] for row in found] == ["off", "lookup", "draft"]
    for more, said in (
        (("--speculation", "most"), "--speculation 'most' is not one of off, lookup, draft, mtp"),
        (("--speculation", "mtp"), "--speculation mtp needs a multi-token prediction head"),
        (("--speculation", "off", "--option", "mtp=off"), "the option mtp are both given"),
        (("--speculation", "draft"), "needs a draft model"),
        (("--speculation", "off", "--draft-model", "x"), "draft_model has no effect without"),
        (
            ("--speculation", "off,mtp", "--option", "draft_weights=int8"),
            "draft_weights has no effect on --speculation off,mtp; leave it out",
        ),
        (
            ("--speculation", "off,lookup", "--option", "draft_vocabulary=64"),
            "draft_vocabulary has no effect on --speculation off,lookup; leave it out",
        ),
        (
            ("--option", "draft_vocabulary=64"),
            "draft_vocabulary has no effect without --speculation mtp or --draft-model",
        ),
        (("--speculation", "off", "--option", "speculation=on"), "are both given"),
    ):
        assert said in refused("bench", "-m", tiny_model_dir, "-n", "8", *more)


def test_the_short_vocabulary_is_that_of_the_given_option(tmp_path, printed, monkeypatch):
    path = save_with_head("glm4_moe", tmp_path / "model")
    seen = []
    measured = CaseTimer.sample

    def sample(self, case):
        seen.append(self._engine.paged_stats()["draft_vocabulary"])
        return measured(self, case)

    monkeypatch.setattr(CaseTimer, "sample", sample)
    asked = ("-p", "0", "-n", "4", "-r", "1", "--no-warmup", "--speculation", "off,mtp")
    printed("bench", "-m", path, *SMALL, *asked, "--option", "draft_vocabulary=64")
    assert seen == [0, 64]


def test_blocks_are_read_from_the_given_directory(bench, tmp_path, monkeypatch):
    seen = []
    measured = CaseTimer.restored

    def restored(self, case):
        seen.append(str(self._engine.config.disk_cache_dir))
        found = measured(self, case)
        assert found.num_cached == 64
        return found

    monkeypatch.setattr(CaseTimer, "restored", restored)
    given = tmp_path / "disk"
    given.mkdir()
    bench("-p", "0", "-n", "0", "-r", "2", "-d", "64", "--option", f"disk_cache_dir={given}")
    assert len(seen) == 2
    assert all(one.startswith(str(given)) for one in seen)
    assert not list(given.iterdir())


def test_a_case_that_was_not_stored_is_skipped_by_name(bench, folder, monkeypatch):
    monkeypatch.setattr(CaseTimer, "store", lambda *given: None)
    shown = bench("-p", "0", "-n", "0", "-r", "1", "-d", "64")
    assert "restart @ d64 is left out: only 0 of 64 tokens were found on disk" in shown.err
    assert "restart" not in shown.out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-p", "many"], "--n-prompt 'many' is not a number of tokens"),
        (["-d", "0,-5"], "--n-depth '-5' is not a number"),
        (["-n", "1-8"], "--n-gen '1-8' is not a number"),
        (["-p", "0", "-n", "0"], "nothing to measure"),
        (["-o", "xml"], "--output 'xml' is not one of md, csv, json, jsonl"),
        (["-o", "weights=int4"], "engine options need --option here: --option weights=int4"),
        (["-r", "0"], "--repetitions 0 must be in 1..1000"),
        (["--shared", "2000"], "--shared 2000 must be in 0..1024"),
        (["--warm", "-1"], "--warm -1 must be at least 0"),
        (["--option", "redis_url=redis://x"], "redis_url has no effect"),
        (["--option", "max_disk_bytes=1GB"], "max_disk_bytes has no effect without rows"),
        (["-d", "64", "--option", "disk_cache_dir=off"], "add --no-restart"),
        (["-d", "64", "--option", "disk_cache_dir=/no/such"], "is not a directory"),
        (["--option", "no_such=1"], "no_such"),
    ],
)
def test_invalid_options_are_refused_before_loading(argv, message, refused, monkeypatch):
    def looked_for(*given, **options):
        raise AssertionError("a model was searched for")

    monkeypatch.setattr("kvboost_edge.cli.session.locate_model", looked_for)
    assert message in refused("bench", *argv)


@pytest.mark.parametrize(
    ("argv", "message", "code"),
    [
        (["-p", "4096"], "pp4096 does not fit: ", 1),
        (["-d", "100"], "the depth 100 is not a multiple of 16", 2),
        (["--max-memory", "1MB"], "max_memory", 1),
    ],
)
def test_cases_that_do_not_fit_are_refused_before_measuring(
    argv, message, code, tiny_model_dir, printed
):
    shown = printed("bench", "-m", tiny_model_dir, "-t", "1", *argv, code=code)
    assert message in shown.err
    assert not shown.out


def test_ctrl_c_prints_the_finished_rows(bench, folder, monkeypatch):
    def restored(self, case):
        raise KeyboardInterrupt

    monkeypatch.setattr(CaseTimer, "restored", restored)
    shown = bench(*SHORT, "-d", "64", "--shared", "0", code=130)
    assert shown.out.count(" @ d64 ") == 3
    assert "Traceback" not in shown.err
    assert not list(folder.iterdir())


def test_one_progress_bar_counts_all_repetitions(tiny_model_dir, folder, monkeypatch, printed):
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    monkeypatch.setattr(run, "open_console", lambda **options: console)
    totals = []
    bar = run._bar

    def seen(notes, total):
        totals.append(total)
        return bar(notes, total)

    monkeypatch.setattr(run, "_bar", seen)
    shown = printed("bench", "-m", tiny_model_dir, *SMALL, *SHORT, "-d", "64", "-o", "jsonl")
    rows = [json.loads(line)["test"] for line in shown.out.splitlines()]
    assert len(rows) == 5
    assert totals == [10]
    assert "restart @ d64" in console.file.getvalue()


def test_the_progress_bar_is_drawn_between_repetitions_and_by_no_thread():
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    before = threading.active_count()
    with run._bar(console, 3) as bar:
        bar.name(Case("pp", 512, 0, 0))
        for count in (1, 2):
            bar.counted(Sample(1.0, 0))
            assert f"{count}/3" in console.file.getvalue()
        assert "pp512" in console.file.getvalue()
        assert threading.active_count() == before
