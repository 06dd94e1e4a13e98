"""Display names of models, derived from their location."""

from pathlib import Path

import pytest

from kvboost_edge.models.locate import BUNDLED_MODEL, locate_model, model_name


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/home/someone/models/tiny.gguf", "tiny.gguf"),
        ("/home/someone/my-model", "my-model"),
        ("/home/someone/my-model/", "my-model"),
        ("/c/hub/models--Qwen--Qwen2-0.5B/snapshots/0123", "Qwen/Qwen2-0.5B"),
        ("/c/hub/models--o--n-GGUF/snapshots/0123/n.Q4_K_M.gguf", "o/n-GGUF:n.Q4_K_M.gguf"),
    ],
)
def test_display_names_are_the_last_path_part_or_the_hub_id(path, name):
    assert model_name(Path(path)) == name


def test_display_names_of_the_bundled_model_and_the_current_directory(tmp_path, monkeypatch):
    assert model_name(locate_model(BUNDLED_MODEL)) == BUNDLED_MODEL
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert model_name(Path()) == "here"


def test_ollama_files_are_named_by_their_manifest(tmp_path, monkeypatch):
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    monkeypatch.setattr(
        "kvboost_edge.models.locate.display_names.ollama_names",
        lambda: iter(["ollama:none:1", "ollama:q:7b"]),
    )
    blob = tmp_path / "blobs" / f"sha256-{'ab' * 32}"

    def found(name):
        return blob if name == "q:7b" else tmp_path

    monkeypatch.setattr("kvboost_edge.models.locate.display_names.ollama_model", found)
    assert model_name(blob) == "ollama:q:7b"
    assert model_name(blob.with_name("sha256-0123456789abcdef")) == "sha256-0123456789ab"
