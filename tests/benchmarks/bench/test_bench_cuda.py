"""Tests of the CUDA benchmark: with fibers its contenders compute equal results; without a GPU it
reports that.
"""

import types

import pytest
import torch

from benchmarks.bench import bench_cuda
from helpers.cuda.standin import needs_kernels, standing_in


@needs_kernels
@pytest.mark.parametrize("num_queries", [1, 32])
def test_contenders_agree(num_queries):
    case = bench_cuda.Case(6, 2, 64, num_seqs=2, depth=32, num_queries=num_queries)
    with standing_in() as (kernels, _):
        found = bench_cuda.contenders(case, kernels, "cpu")
        assert {"ours", "sdpa"} <= set(found)
        assert found["ours"]().shape == found["sdpa"]().shape == (2, num_queries, 6, 64)


def test_nothing_is_timed_where_results_differ():
    wrong = types.SimpleNamespace(paged_attention=lambda q, *a, **k: (torch.zeros_like(q), None))
    with pytest.raises(SystemExit, match="nothing is timed"):
        bench_cuda.contenders(bench_cuda.Case(6, 2, 64, num_seqs=1, depth=16), wrong, "cpu")


def test_without_a_gpu_the_reason_is_reported(monkeypatch):
    monkeypatch.setattr("sys.argv", ["bench_cuda.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA device"):
        bench_cuda.main()
