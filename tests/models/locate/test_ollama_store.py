"""Ollama's store is read in place, and no manifest can refer to files outside of it."""

import pytest

from helpers.models.ollama_store import add
from helpers.raising import assert_raises
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.locate import locate_model
from kvboost_edge.models.locate.ollama_store import ollama_names


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    (tmp_path / "blobs").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("qwen3:0.6b", "registry.ollama.ai/library/qwen3/0.6b"),
        ("qwen3", "registry.ollama.ai/library/qwen3/latest"),
        ("someone/model:q4", "registry.ollama.ai/someone/model/q4"),
        ("hf.co/owner/repo-GGUF:Q4_K_M", "hf.co/owner/repo-GGUF/Q4_K_M"),
    ],
)
def test_an_ollama_name_finds_its_manifest(name, path, store):
    blob = add(store, path)
    assert locate_model(f"ollama:{name}") == blob
    full = name if ":" in name else f"{name}:latest"
    assert list(ollama_names()) == [f"ollama:{full}"]
    assert locate_model(blob) == locate_model(str(blob)) == blob


@pytest.mark.parametrize(
    "name",
    ["", "../x", "a/../../x", "a:../../x", "/etc/passwd", "a:b:c", "a/b/c/d", "a:", ".x", "a b"],
)
def test_invalid_ollama_names_touch_no_file(name, store):
    with pytest.raises(ModelFormatError, match="is not a valid Ollama name such as ollama:qwen3"):
        locate_model(f"ollama:{name}")


@pytest.mark.parametrize(
    "digest",
    [
        "sha256:../../secret",
        f"sha256:{'A' * 64}",
        f"sha256:{'0' * 63}/",
        f"md5:{'0' * 64}",
        None,
        5,
        f"sha256:{'0' * 65}",
    ],
)
def test_an_invalid_digest_is_refused(digest, store):
    add(store, "registry.ollama.ai/library/m/latest", digest=digest)
    with pytest.raises(ModelFormatError, match="which is not a SHA-256 digest"):
        locate_model("ollama:m")


def test_missing_models_are_named(store):
    assert_raises(ModelFormatError, r"no model m in .*ollama pull m", locate_model, "ollama:m")
    add(store, "registry.ollama.ai/library/m/latest", mediaType="application/other")
    assert_raises(ModelFormatError, "lists 0 model files", locate_model, "ollama:m")
    add(store, "registry.ollama.ai/library/m/latest").unlink()
    assert_raises(
        ModelFormatError, r"blobs/sha256-\w+, listed in .* is missing", locate_model, "ollama:m"
    )


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '{"layers": 5}', '{"layers": [5, null]}', "[" * 100_000, "\udcff"]
)
def test_a_damaged_manifest_is_refused(text, store):
    add(store, "registry.ollama.ai/library/m/latest")
    manifest = store / "manifests/registry.ollama.ai/library/m/latest"
    manifest.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(
        ModelFormatError, match=r"latest (is not a valid Ollama manifest|lists 0 model files)"
    ):
        locate_model("ollama:m")
