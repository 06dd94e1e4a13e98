"""Tests of `eval`: perplexity against a direct computation, and the distance between two weight
formats of one model.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from helpers.engine.retrieval_solver import solve
from helpers.models.tiny_checkpoints import BOS_ID
from helpers.models.tiny_models import save_tiny_model
from kvboost_edge import shareable
from kvboost_edge.cli.evaluate import parse_against
from kvboost_edge.engine.engine import CPUPagedEngine
from kvboost_edge.engine.perplexity import score_text
from kvboost_edge.engine.retrieval import TASKS
from kvboost_edge.errors import ConfigError, RequestError

TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps. " * 5
SMALL = ("-o", "num_blocks=64", "-o", "num_threads=1")


def log_softmax(logits):
    wide = logits.astype(np.float64)
    return (
        wide
        - wide.max(-1, keepdims=True)
        - np.log(np.exp(wide - wide.max(-1, keepdims=True)).sum(-1, keepdims=True))
    )


def expected_perplexity(engine, ids, window, num_leading):
    """Return the perplexity from whole windows, with each token taken from the first window that
    contains it. Each window begins with the leading tokens.
    """
    lead, text = ids[:num_leading], ids[num_leading:]
    room = window - num_leading
    total = 0.0
    first = 0
    count = scored = 0 if lead else 1
    while scored < len(text):
        piece = lead + text[first : first + room]
        logs = log_softmax(engine.logits(piece))
        for at in range(num_leading + scored - first, len(piece)):
            total -= logs[at - 1, piece[at]]
        scored = min(first + room, len(text))
        first = scored - room // 2
    return math.exp(total / (len(text) - count))


@pytest.mark.parametrize("num_leading", [0, 1, 2])
@pytest.mark.parametrize("window", [4, 5, 6, 64, 100, 511])
@pytest.mark.some(4)
def test_perplexity_is_computed_over_windows(tiny_engine, window, num_leading):
    window += num_leading if window < 7 else 0
    ids = tiny_engine.tokenizer.encode(TEXT)
    seen = []
    score = score_text(
        tiny_engine,
        ids,
        window=window,
        num_leading=num_leading,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert score.perplexity == pytest.approx(
        expected_perplexity(tiny_engine, ids, window, num_leading), rel=1e-6
    )
    scored = len(ids) - max(1, num_leading)
    assert (score.tokens, score.scored_tokens, score.difference) == (len(ids), scored, None)
    assert seen[-1] == (scored, scored)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_eval_begins_each_window_with_the_leading_special_tokens(
    tiny_model_dir, tmp_path, answered
):
    file = tmp_path / "text.txt"
    file.write_text(TEXT[:150], encoding="utf-8")
    (score,) = answered("eval", file, "-m", tiny_model_dir, "--window", "64", *SMALL)["scores"]
    with CPUPagedEngine.from_pretrained(tiny_model_dir, num_blocks=64, num_threads=1) as engine:
        assert engine.tokenizer.leading_ids == (BOS_ID,)
        ids = engine.tokenizer.encode(TEXT[:150])
        expected = expected_perplexity(engine, ids, 64, 1)
    assert score["perplexity"] == pytest.approx(expected, rel=1e-6)


def test_eval_compares_with_another_configuration(tiny_model_dir):
    options = {"num_blocks": 64, "num_threads": 1}
    with (
        CPUPagedEngine.from_pretrained(tiny_model_dir, weights="f32", **options) as one,
        CPUPagedEngine.from_pretrained(tiny_model_dir, weights="int8", **options) as other,
    ):
        ids = one.tokenizer.encode(TEXT)[:60]
        same = score_text(one, ids, window=64, against=one).difference
        assert same is not None
        assert (same.mean_kl, same.max_kl, same.top1_agreement) == (0.0, 0.0, 1.0)
        score = score_text(one, ids, window=64, against=other)
        p = log_softmax(one.logits(ids))[:-1]
        q = log_softmax(other.logits(ids))[:-1]
        kl = (np.exp(p) * (p - q)).sum(-1)
        assert score.difference is not None
        assert score.difference.mean_kl == pytest.approx(kl.mean(), rel=1e-6)
        assert score.difference.max_kl == pytest.approx(kl.max(), rel=1e-6)
        assert score.difference.top1_agreement == pytest.approx(
            (p.argmax(-1) == q.argmax(-1)).mean()
        )
        assert score.difference.perplexity == pytest.approx(
            score_text(other, ids, window=64).perplexity
        )
        assert score.difference.mean_kl > 0


@pytest.mark.parametrize(
    ("ids", "window", "num_leading", "error", "message"),
    [
        ([1], 16, 0, RequestError, "1 tokens"),
        ([1, 2], 16, 2, RequestError, "2 tokens; give at least 3"),
        ([1, 2], 3, 0, ConfigError, "window=3 is too small; give at least 4 tokens"),
        ([1, 2, 3], 5, 2, ConfigError, "window=5 is too small; give at least 6 tokens"),
        ([1, 2], 513, 0, ConfigError, "window=513 exceeds the model's context; .* at most 512"),
    ],
)
def test_invalid_texts_and_windows_are_refused(
    tiny_engine, ids, window, num_leading, error, message
):
    with pytest.raises(error, match=message):
        score_text(tiny_engine, ids, window=window, num_leading=num_leading)


def test_a_window_that_is_too_small_is_refused_before_loading(refused):
    assert "--window 2 is too small; give at least 4 tokens" in refused(
        "eval", "no-such-file", "-m", "no-such-model", "--window", "2"
    )


def test_against_takes_several_options_and_pairs():
    assert parse_against("weights=int8,kv_cache_bits=8,4") == {
        "weights": "int8",
        "kv_cache_bits": (8, 4),
    }
    assert parse_against("kv_cache_bits=8,num_threads=2") == {"kv_cache_bits": 8, "num_threads": 2}
    for text in ("", "  ", "int8"):
        with pytest.raises(ConfigError):
            parse_against(text)


def test_eval_prints_a_table_and_json(tiny_model_dir, tmp_path, printed, answered):
    file = tmp_path / "text.txt"
    file.write_text(TEXT[:150], encoding="utf-8")
    argv = ["eval", file, "-m", tiny_model_dir, "--window", "64", *SMALL]
    against = ["--against", "kv_cache_bits=8,4", "--against", "weights=int4-asym"]
    shown = printed(*argv, *against).out
    for text in (
        "int8 weights",
        "kv_cache_bits=8,4",
        "weights=int4-asym",
        "150 tokens",
        "mean KL",
        "%",
    ):
        assert text in shown
    scores = answered(*argv, *against)["scores"]
    assert [score["against"] for score in scores] == ["kv_cache_bits=8,4", "weights=int4-asym"]
    assert scores[0]["perplexity"] == scores[1]["perplexity"]
    assert 0 < scores[0]["difference"]["mean_kl"] <= scores[0]["difference"]["max_kl"]
    assert answered(*argv)["scores"][0]["difference"] is None


@pytest.fixture(scope="module")
def long_model(tmp_path_factory):
    """Directory of a tiny model with a context of 1,024 tokens."""
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=1024)


def test_eval_scores_retrieval_of_both_sides(long_model, printed, answered, monkeypatch):
    def generate(self, ids, max_new_tokens, temperature):
        is_exact = self.config.prefill == "exact"
        answer = solve(self.tokenizer.decode(ids)) if is_exact else ""
        return SimpleNamespace(output_text=answer)

    monkeypatch.setattr(shareable, "FIRST_POSITION", 512)
    monkeypatch.setattr(CPUPagedEngine, "generate", generate)
    argv = ["eval", "--retrieval", "2", "-m", long_model, "--window", "900", *SMALL]
    argv += ["-o", "runner=native", "--prefill", "sparse"]
    found = answered(*argv)
    assert found["window"] == 900
    rows = [(row["against"], row["task"], row["score"]) for row in found["retrieval"]]
    assert rows == [
        (against, task, score)
        for against, score in ((None, 1.0), ("prefill=sparse", 0.0))
        for task in TASKS
    ]
    assert all(700 < row["tokens"] < 900 for row in found["retrieval"])
    lines = printed(*argv).out.splitlines()
    for name in (*TASKS, "mean"):
        (line,) = (line for line in lines if f" {name} " in line)
        assert line.index("100.0%") < line.index(" 0.0%")


def test_eval_scores_retrieval_of_both_sides_with_one_window(long_model, answered, monkeypatch):
    lengths = []

    def generate(self, ids, max_new_tokens, temperature):
        lengths.append(len(ids))
        return SimpleNamespace(output_text="")

    monkeypatch.setattr(CPUPagedEngine, "generate", generate)
    argv = ["eval", "--retrieval", "1", "-m", long_model, *SMALL]
    found = answered(*argv, "--against", "max_model_len=800")
    assert found["window"] == 800
    assert lengths[: len(TASKS)] == lengths[len(TASKS) :]
    assert max(lengths) < 800


@pytest.mark.parametrize(
    ("window", "extra", "named"),
    [
        (255, [], "--window 255 is too small for --retrieval; give at least 256 tokens"),
        (300, [], "a window of 300 tokens is too small for a question of the task"),
        (1025, [], "exceeds the context length; give a --window of at most 1024"),
        (
            900,
            ["--against", "max_model_len=800"],
            "exceeds the context of --against max_model_len=800; give a --window of at most 800",
        ),
    ],
)
def test_retrieval_refuses_windows_before_any_answer(
    window, extra, named, long_model, refused, monkeypatch
):
    monkeypatch.setattr(CPUPagedEngine, "generate", None)  # a call would fail
    argv = ["eval", "--retrieval", "1", "-m", long_model, *SMALL, "--window", window]
    assert named in refused(*argv, *extra)


def test_retrieval_refuses_a_window_that_is_too_small_before_loading(refused):
    argv = ["eval", "--retrieval", "1", "-m", "no-such-model", "--window", "40"]
    assert "--window 40 is too small" in refused(*argv)


def test_eval_measures_sparse_prefill_only_where_it_applies(
    long_model, tmp_path, answered, refused, monkeypatch
):
    monkeypatch.setattr(shareable, "FIRST_POSITION", 512)
    file = tmp_path / "text.txt"
    file.write_text("".join(f"{number} is a number. " for number in range(50)), encoding="utf-8")
    argv = ["eval", file, "-m", long_model, *SMALL, "-o", "runner=native", "--prefill", "sparse"]
    (score,) = answered(*argv, "--window", "1000")["scores"]
    assert score["difference"]["mean_kl"] > 0
    for window in ([], ["--window", "656"]):
        assert "the longest prompt has" in refused(*argv, *window)
    argv[1:2] = ["--retrieval", "1"]
    assert "the longest prompt has 602 tokens" in refused(*argv, "--window", "650")


@pytest.mark.parametrize("extra", [[], ["FILE", "--retrieval", "3"]], ids=str)
def test_eval_takes_a_file_or_questions(extra, tiny_model_dir, refused):
    assert "either FILE or --retrieval" in refused("eval", *extra, "-m", tiny_model_dir)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        (["--against", "weights=int3"], "int3"),
        (["--against", "weights=int3"], "'int4-asym'"),
        (["--against", ""], "--against is empty"),
        (["--against", "no_such=1"], "no_such"),
        (["--arithmetic", "exact"], "arithmetic=exact changes no option"),
        (["-o", "prefill=sparse", "--prefill", "sparse"], "give another value"),
        (["--prefill", "on-request"], "prefill='on-request' is exact"),
        (["--window", "513"], "window=513 exceeds the model's context; give at most 512 tokens"),
    ],
)
def test_invalid_eval_options_are_one_line(extra, named, tiny_model_dir, tmp_path, refused):
    file = tmp_path / "text.txt"
    file.write_bytes(b"some text")
    assert named in refused("eval", file, "-m", tiny_model_dir, *SMALL, *extra)


@pytest.mark.parametrize(
    ("content", "named"),
    [(None, "cannot be read"), (b"\xff\xfe text", "not UTF-8"), (b"", "1 tokens")],
)
def test_eval_errors_are_one_line(content, named, tiny_model_dir, tmp_path, refused):
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    assert named in refused("eval", file, "-m", tiny_model_dir, *SMALL, code=1)
