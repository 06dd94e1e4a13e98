"""Tests of `--mode chunk_kv_reuse` and its options, on an engine with computed documents."""

import sys
from contextlib import contextmanager

import pytest

from helpers.engine.fake_runner import fake_engine
from kvboost_edge.cli import generate

HEAD = "A head of thirty-two characters. "
ONE = "First " * 9 + "document. "
TWO = "Second " * 7 + "document! "


@pytest.fixture(autouse=True)
def engine(monkeypatch, typed):
    with fake_engine() as engine:
        engine.generate(HEAD + ONE + TWO, max_new_tokens=1)

        @contextmanager
        def loaded(*args):
            yield engine

        monkeypatch.setattr(generate, "loaded_engine", loaded)
        typed(HEAD + TWO + ONE)
        yield engine


GENERATE = ("generate", "-", "-n", "2")
REUSING = (*GENERATE, "--mode", "chunk_kv_reuse")


def test_the_summary_labels_approximate_answers(printed):
    said = " ".join(printed(*REUSING).err.split())
    assert "prompt tokens, 32 from the cache · approximate: " in said
    assert " tokens reused at other positions, " in said
    assert " recomputed · first token " in said


def test_the_options_reach_the_engine(answered):
    bare = answered(*REUSING, "--recompute-strategy", "none")
    assert (bare["mode"], bare["approximate"], bare["recomputed_tokens"] < 16) == (
        "chunk_kv_reuse",
        True,
        True,
    )
    sys.stdin.seek(0)
    wide = answered(*REUSING, "--recompute-overlap", "32")
    assert bare["reused_span_tokens"] > wide["reused_span_tokens"] > 0
    sys.stdin.seek(0)
    blend = [
        "--recompute-strategy",
        "cacheblend",
        "--recompute-overlap",
        "0",
        "--recompute-ratio",
        "0.9",
    ]
    assert bare["reused_span_tokens"] > answered(*REUSING, *blend)["reused_span_tokens"]


def test_answers_are_exact_by_default(answered):
    exact = answered(*GENERATE)
    assert (exact["mode"], exact["approximate"], exact["reused_span_tokens"]) == (
        "prefix_cache",
        False,
        0,
    )


@pytest.mark.parametrize(
    ("argv", "code", "named"),
    [
        (["--mode", "chunks"], 2, "chunk_kv_reuse"),
        (["--recompute-ratio", "0.1"], 1, "recompute_ratio"),
        (["--mode", "chunk_kv_reuse", "--recompute-ratio", "2"], 2, "recompute_ratio=2"),
        (["--mode", "chunk_kv_reuse", "--recompute-overlap", "-1"], 2, "recompute_overlap=-1"),
        (["--mode", "chunk_kv_reuse", "--recompute-strategy", "all"], 2, "cacheblend"),
        (["--mode", "chunk_kv_reuse", "-s", "prompt_logprobs=1"], 1, "prompt_logprobs"),
    ],
)
def test_invalid_options_are_refused_by_name(argv, code, named, printed):
    assert named in printed("generate", "x", *argv, code=code).err
