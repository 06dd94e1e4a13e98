"""Tests that the comparison with llama.cpp reports differences. They do not run llama.cpp."""

import argparse
from pathlib import Path

import numpy as np
import pytest

from benchmarks.quality import gguf_crosscheck

EXACT = np.arange(1.0, 13.0, dtype=np.float32).reshape(3, 4)


@pytest.mark.parametrize(
    ("name", "kind", "ours", "theirs", "agrees"),
    [
        ("llama", "F32", 0.0, 5e-5, True),
        ("llama", "F32", 0.0, 5e-4, False),
        ("gemma2", "F32", 0.0, 5e-4, True),
        ("llama", "F32", 0.0, np.nan, False),
        ("llama", "Q8_0", 0.02, 0.02, True),
        ("llama", "Q8_0", 0.04, 0.02, False),
        ("llama", "Q8_0", 0.02, 0.6, False),
        ("llama", "Q8_0", np.nan, 0.02, False),
    ],
)
def test_the_tolerance_decides_agreement(name, kind, ours, theirs, agrees, monkeypatch):
    by_weights = {"f32": EXACT, "auto": EXACT * np.float32(1 + ours)}
    monkeypatch.setattr(gguf_crosscheck, "native_logits", lambda path, weights: by_weights[weights])
    assert (
        gguf_crosscheck.compare(name, kind, Path("m.gguf"), EXACT * np.float32(1 + theirs))[1]
        is agrees
    )


def test_a_file_that_llama_cpp_refuses_disagrees(tmp_path, monkeypatch):
    def ask(_, __, jobs):
        return {
            f"error/models/{label}": np.array("unknown model architecture")
            for label in jobs["models"]
        }

    monkeypatch.setattr(gguf_crosscheck, "ask", ask)
    monkeypatch.setattr(gguf_crosscheck, "FAMILIES", {"llama": {}})
    rows = gguf_crosscheck.compare_models(argparse.Namespace(families=["llama"]), tmp_path)
    assert [(label, agrees) for label, _, _, agrees in rows] == [
        ("llama F32", False),
        ("llama Q8_0", False),
    ]
    assert "unknown model architecture" in rows[0][2]


def test_heads_that_differ_or_are_refused_disagree(tmp_path, monkeypatch):
    def ask(_, __, jobs):
        assert [len(given[0]) for _, given in jobs["heads"].values()] == [60, 60]
        return {
            "heads/glm4_moe": np.ones((60, 300), np.float32),
            "error/heads/qwen3_5_text": np.array("no MTP block"),
        }

    monkeypatch.setattr(gguf_crosscheck, "ask", ask)
    heads = {name: gguf_crosscheck.HEADS[name] for name in ("qwen3_5_text", "glm4_moe")}
    monkeypatch.setattr(gguf_crosscheck, "HEADS", heads)
    rows = gguf_crosscheck.compare_heads(argparse.Namespace(), tmp_path)
    assert [(label, agrees) for label, _, _, agrees in rows] == [
        ("MTP head of qwen3_5_text", False),
        ("MTP head of glm4_moe", False),
    ]
    assert rows[0][2] == "no MTP block"


def test_other_words_disagree(tmp_path, monkeypatch):
    def ask(_, __, jobs):
        empty = np.frombuffer(
            b"[" + b",".join([b"[]"] * len(gguf_crosscheck.TEXTS)) + b"]", np.uint8
        )
        return dict.fromkeys((f"vocabularies/{name}" for name in jobs["vocabularies"]), empty)

    monkeypatch.setattr(gguf_crosscheck, "ask", ask)
    monkeypatch.setattr(gguf_crosscheck, "PRE_TOKENIZERS", ["gpt-2"])
    monkeypatch.setattr(gguf_crosscheck, "GEMMA4_TEXTS", gguf_crosscheck.TEXTS)
    rows = gguf_crosscheck.compare_words(argparse.Namespace(), tmp_path)
    assert [(label, agrees) for label, _, _, agrees in rows] == [
        ("words of gpt-2", False),
        ("words of gemma4", False),
    ]
