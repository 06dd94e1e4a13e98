"""Tests of the benchmark's cases: selection, names, and counted tokens."""

import pytest

from kvboost_edge.cli.bench.cases import Case, CaseResult, cases_of, mean_and_deviation
from kvboost_edge.errors import ConfigError

LLAMA_BENCH = {"warm": 0, "is_restarted": False, "shared": 0}


def names(*given, **options):
    return [case.name for case in cases_of(*given, **options)]


def test_cases_equal_llama_benchs():
    assert names([512], [128], [0, 512], **LLAMA_BENCH) == [
        "pp512",
        "tg128",
        "pp512 @ d512",
        "tg128 @ d512",
    ]
    assert names([0], [16, 32], [0], **LLAMA_BENCH) == ["tg16", "tg32"]
    with pytest.raises(ConfigError, match="nothing to measure"):
        names([0], [0], [0], warm=64, is_restarted=True, shared=8)


def test_rows_of_the_cache_follow_depths_above_zero():
    assert names([512], [0], [0, 64, 128], warm=16, is_restarted=True, shared=8) == [
        "pp512",
        "pp512 @ d64",
        "warm @ d64",
        "pp512 @ d128",
        "warm @ d128",
        "restart @ d64",
        "restart @ d128",
    ]
    assert names([0], [8], [64], warm=16, is_restarted=False, shared=4) == [
        "tg8 @ d64",
        "warm @ d64",
        "shared x4 @ d64",
    ]


@pytest.mark.parametrize(
    ("case", "counted", "generated"),
    [
        (Case("pp", 512, 0, 0), 512, 1),
        (Case("pp", 512, 0, 8192), 512, 1),
        (Case("tg", 0, 128, 8192), 128, 129),  # the first token belongs to the prompt
        (Case("warm", 64, 0, 8192), 64, 1),
        (Case("shared", 64, 128, 8192, 8), 1024, 128),
    ],
)
def test_only_new_tokens_are_counted(case, counted, generated):
    assert case.counted_tokens == counted
    assert case.max_new_tokens == generated
    assert CaseResult(case, (2.0, 4.0), 0.0).rates == (counted / 2, counted / 4)


def test_the_sample_standard_deviation_is_reported():
    assert mean_and_deviation([2.0, 4.0, 9.0]) == (5.0, pytest.approx(13**0.5))
    assert mean_and_deviation([3.0]) == (3.0, 0.0)
