"""Tests of the benchmark of batches: both of its parts are in the file of results."""

import json

from benchmarks.bench import bench_batch


def _run(contender):
    if contender in ("sorted", "random", "unordered"):
        return {"seconds": 2.0 if contender == "sorted" else 3.0, "hit_rate": 0.5}
    lines = {"lines_streaming": 60.0, "lines_whole": 90.0}
    return {"gaps": [1.0, 2.0, 3.0], "firsts": [4.0], **lines}


def test_the_file_has_both_parts(tmp_path, monkeypatch):
    out = tmp_path / "batch.json"
    arguments = ["bench_batch.py", "--model", "none", "--rounds", "2", "--out", str(out)]
    monkeypatch.setattr("sys.argv", arguments)
    monkeypatch.setattr("benchmarks.harness.pack_beforehand", lambda model: None)
    monkeypatch.setattr(bench_batch, "_in_a_process", _run)
    bench_batch.main()
    parts = json.loads(out.read_text(encoding="utf-8"))["parts"]
    assert [row["times sorted"] for row in parts["order"]] == [1.0, 1.5, 1.5]
    assert [row["gap p50 ms"] for row in parts["stream"]] == [2.0, 2.0, 2.0]
