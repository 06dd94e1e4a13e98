"""Tests of the benchmark of linear layers: rows of repeated passes."""

from benchmarks.bench.bench_linear import _row


def test_a_row_has_medians_and_the_shortest_pass():
    runs = [[4.0, 1.0, 1.0, 2.0], [2.0, 1.5, 0.4, 0.1], [8.0, 5.0, 2.0, 1.0]]
    assert _row("prefill 8", runs, 8) == {
        "pass": "prefill 8",
        "ms": 4.0,
        "linear_ms": 1.5,
        "attention_ms": 1.0,
        "other_ms": 1.0,
        "best_ms": 2.0,
        "tok_s": 2000.0,
    }
