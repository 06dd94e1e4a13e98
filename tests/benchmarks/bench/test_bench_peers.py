"""Tests of the benchmark against other engines: recorded memory, measured in a separate process."""

import sys
from argparse import Namespace
from pathlib import Path
from typing import ClassVar

import pytest

from benchmarks.bench.bench_peers import (
    ALL_SHAPES,
    Bench,
    Worker,
    contenders,
    start,
    worker_or_none,
)
from benchmarks.data.random_model import write_gguf
from benchmarks.peers import worker
from kvboost_edge import CPUPagedEngine
from kvboost_edge.host.memory import process_peak


def _options(only):
    return Namespace(
        only=[only],
        peers_python=Path("nothing"),
        threads=2,
        capacity=1024,
        short=True,
        cpu_features=None,
        flash_attn="on",
    )


@pytest.mark.full
def test_memory_beyond_file_pool_and_states_is_recorded(tmp_path):
    path = tmp_path / "model.gguf"
    shape = ALL_SHAPES["granite-4-tiny"]
    write_gguf(path, shape, "Q4_0")
    with CPUPagedEngine.from_pretrained(str(path), num_blocks=64, speculation="off") as engine:
        stats = engine.paged_stats()
    assert stats["state_bytes"] > 0
    (ours,) = workers = start(_options("kvboost_edge kv16"), path)
    bench = Bench(workers, shape.vocab, 1)
    bench.memory(path)
    ours.close()
    about = ours.about["about"]
    assert [about[key] for key in ("state_bytes", "pool_bytes")] == [
        stats["state_bytes"],
        stats["pool_bytes"],
    ]
    peak, beside = (row[ours.label] for row in bench.rows())
    known = path.stat().st_size + stats["pool_bytes"] + stats["state_bytes"]
    assert 1e6 * (peak - beside) == pytest.approx(known)
    assert 0 < beside < peak


def test_memory_beyond_the_file_is_recorded_only_for_our_engine_with_a_file(tmp_path):
    class Peer:
        label = "llama.cpp f16"
        about: ClassVar = {"about": {}}

        def ask(self, what):
            return {"peak_mb": 700.0}

    class Ours(Peer):
        label = "kvboost_edge kv16"

    bench = Bench([Peer(), Ours()], 1024, 1)
    bench.memory(tmp_path / "no file")
    assert [row["measure"] for row in bench.rows()] == ["peak_rss_mb"]
    (tmp_path / "model.gguf").write_bytes(bytes(1000))
    bench.workers = [Peer()]
    bench.memory(tmp_path / "model.gguf")
    assert [row["measure"] for row in bench.rows()] == ["peak_rss_mb"]


def test_megabytes_of_a_worker_are_those_of_the_host():
    assert worker.memory()["peak_mb"] == pytest.approx(process_peak() / 1e6, rel=0.01)
    assert worker.memory()["rss_mb"] <= worker.memory()["peak_mb"]


def test_the_first_of_our_contenders_is_compared_with_the_best_peer():
    labels = ("kvboost_edge kv16", "kvboost_edge kv8", "llama.cpp f16", "openvino u8")
    bench = Bench([Namespace(label=label) for label in labels], 1024, 3)
    for label, values in zip(labels, ((3, 2, 9), (1, 1, 1), (6, 5, 9), (8, 8, 8)), strict=True):
        for value in values:
            bench.note("cold_ttft_64_s", label, value)
            bench.note("decode_0_tok_s", label, value)
    seconds, speed = bench.rows()
    assert seconds["kvboost_edge kv16 / best peer"] == 3 / 6
    assert speed["kvboost_edge kv16 / best peer"] == 3 / 8


def test_an_engine_that_does_not_start_is_left_out_with_its_message(capsys):
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    assert worker_or_none("llama.cpp", command) is None
    assert capsys.readouterr().err == "skipped: llama.cpp ended with 1: no such model\n"


def test_an_engine_may_print_more_messages_than_a_pipe_holds(tmp_path):
    program = tmp_path / "engine.py"
    program.write_text(
        "import sys\n"
        "print('{}', flush=True)\n"
        "for line in sys.stdin:\n"
        "    print('x' * 1_000_000, file=sys.stderr, flush=True)\n"
        "    print('{\"seconds\": 1}', flush=True)\n"
    )
    engine = Worker("engine", [sys.executable, str(program)], None)
    assert engine.ask("ttft") == {"seconds": 1}
    engine.close()


def test_contenders_are_those_that_are_asked_for():
    assert [label for label, *_ in contenders(_options("kvboost_edge"))] == [
        "kvboost_edge kv16",
        "kvboost_edge kv8",
    ]
