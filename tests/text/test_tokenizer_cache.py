"""Tests of cached tokenizers: they equal the built ones. A damaged or foreign entry, or one of
another model, is rebuilt.
"""

import logging
import os

import pytest

from helpers.gguf.writer import write_gguf
from kvboost_edge.engine.build import load_tokenizer
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.text import tokenizer_cache
from kvboost_edge.text.codec import FastCodec
from kvboost_edge.text.gguf_tokenizer import gguf_tokenizer
from kvboost_edge.text.tokenizer_cache import kept_tokenizer

KEY = "ab" * 32
TEXTS = ("Hello world! 1234", "", " a\n\nb  ", "naïve 你好 🚀", "<|end|>x")


@pytest.fixture(scope="module")
def metadata(tiny_model_dir, tmp_path_factory):
    path = write_gguf(tiny_model_dir, tmp_path_factory.mktemp("gguf") / "m.gguf")
    return {
        **(Checkpoint.open(path).gguf_metadata() or {}),
        "tokenizer.chat_template": "{{ eos_token }}ü",
    }


@pytest.fixture
def built(metadata):
    """Function that builds the tokenizer, and a list with one entry per call."""
    calls = []

    def build():
        calls.append(1)
        return gguf_tokenizer(metadata, name="m.gguf")

    return build, calls


def test_the_second_start_uses_the_cached_tokenizer(built, tmp_path):
    build, calls = built
    first = kept_tokenizer(KEY, build, name="m.gguf", cache_dir=tmp_path)
    second = kept_tokenizer(KEY, build, name="n.gguf", cache_dir=tmp_path)
    assert len(calls) == 1
    assert second.name == "n.gguf"
    for text in TEXTS:
        assert second.encode(text) == first.encode(text)
        ids = first.encode(text)
        assert second.decode(ids, False) == first.decode(ids, False)
    same = (
        "special_tokens",
        "chat_template",
        "vocab_size",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    )
    assert {name: getattr(first, name) for name in same} == {
        name: getattr(second, name) for name in same
    }
    assert second.codec.stream_kind is first.codec.stream_kind
    assert isinstance(first.codec, FastCodec)
    assert isinstance(second.codec, FastCodec)
    assert second.codec.to_json() == first.codec.to_json()


@pytest.mark.parametrize(
    "how", ["byte", "cut", "empty", "version", "library", "model", "writable", "directory"]
)
def test_invalid_cache_entries_are_rebuilt(
    how,
    built,
    tmp_path,
    monkeypatch,
    caplog,
):
    build, calls = built
    expected = kept_tokenizer(KEY, build, name="m.gguf", cache_dir=tmp_path).encode(TEXTS[0])
    (path,) = (tmp_path / "packed").glob("*.kvtok")
    data = path.read_bytes()
    os.chmod(path, 0o600)
    if how == "byte":
        path.write_bytes(data[:-100] + bytes([data[-100] ^ 1]) + data[-99:])
    elif how == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "version":
        monkeypatch.setattr(tokenizer_cache, "_VERSION", 99)
    elif how == "library":
        monkeypatch.setattr("tokenizers.__version__", "0")
    elif how == "writable":
        os.chmod(path, 0o666)
    elif how == "directory":
        path.unlink()
        path.mkdir()
    key = KEY[:40] + "0" * 24 if how == "model" else KEY
    with caplog.at_level(logging.WARNING, logger="kvboost_edge"):
        assert (
            kept_tokenizer(key, build, name="m.gguf", cache_dir=tmp_path).encode(TEXTS[0])
            == expected
        )
    assert len(calls) == 2
    assert bool(caplog.records) == (how not in ("library", "model"))
    if how != "directory":
        kept_tokenizer(key, build, name="m.gguf", cache_dir=tmp_path)
        assert len(calls) == 2
        assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_an_unwritable_cache_only_costs_time(built, tmp_path, caplog):
    build, calls = built
    (tmp_path / "packed").touch()
    for _ in range(2):
        assert kept_tokenizer(KEY, build, name="m.gguf", cache_dir=tmp_path).encode("a")
    assert len(calls) == 2
    assert "cannot be cached" in caplog.text


def test_the_engine_caches_the_tokenizer(tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path / "cache"))
    path = write_gguf(tiny_model_dir, tmp_path / "m.gguf")
    first = load_tokenizer(Checkpoint.open(path))

    def refuse(*_, **__):
        raise AssertionError("the tokenizer was built again")

    monkeypatch.setattr("kvboost_edge.engine.build.gguf_tokenizer", refuse)
    second = load_tokenizer(Checkpoint.open(path))
    assert [second.encode(text) for text in TEXTS] == [first.encode(text) for text in TEXTS]
