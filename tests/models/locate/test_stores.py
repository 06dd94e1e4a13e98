"""Fake stores of other programs: each model is listed once, under the name that `locate_model`
takes.
"""

import pytest
from huggingface_hub import constants

from helpers.models.ollama_store import DATA, add
from kvboost_edge.models.locate import locate_model
from kvboost_edge.models.locate.stores import own_models, stored_models

COMMIT = "0" * 39 + "1"
OLDER = "0" * 39 + "2"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home directory without any models."""
    for name in ("LLAMA_CACHE", "OLLAMA_MODELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path / "own"))
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("kvboost_edge.models.locate.ollama_store._SERVICE", tmp_path / "none")
    return tmp_path


def _file(path, data=DATA):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def _names():
    return [(model.store, model.name) for model in stored_models()]


def test_no_stores_list_no_models(home):
    assert _names() == []


def test_every_store_is_listed(home):
    own = _file(own_models() / "m.gguf")
    llama = _file(home / ".cache/llama.cpp/o_r_m-Q4_K_M-00001-of-00002.gguf")
    _file(home / ".cache/llama.cpp/o_r_m-Q4_K_M-00002-of-00002.gguf")
    _file(home / ".cache/llama.cpp/o_r_m-Q4_K_M.gguf.json")
    studio = _file(home / ".lmstudio/models/owner/repo/m-Q8_0.gguf")
    _file(home / ".lmstudio/models/owner/repo/mmproj-m.gguf")
    old = _file(home / ".cache/lm-studio/models/owner/mlx/model.safetensors").parent
    _file(old / "config.json")
    blob = add(home / ".ollama/models", "registry.ollama.ai/library/qwen3/0.6b")
    found = {(model.store, model.name): model.path for model in stored_models()}
    assert found == {
        ("kvboost-edge", str(own)): own,
        ("llama.cpp", str(llama)): llama,
        ("LM Studio", str(studio)): studio,
        ("LM Studio", str(old)): old,
        ("Ollama", "ollama:qwen3:0.6b"): blob,
    }
    for (_, name), path in found.items():
        assert locate_model(name) == path


def test_folders_from_environment_variables_are_listed(home, monkeypatch):
    monkeypatch.setenv("LLAMA_CACHE", str(home / "elsewhere"))
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "ollama"))
    path = _file(home / "elsewhere/m.gguf")
    add(home / "ollama", "registry.ollama.ai/library/m/latest")
    assert _names() == [("llama.cpp", str(path)), ("Ollama", "ollama:m:latest")]


def test_the_hub_cache_is_listed(home):
    floats = home / "hub/models--owner--floats"
    _file(floats / f"snapshots/{OLDER}/config.json")
    _file(floats / f"snapshots/{COMMIT}/config.json")
    _file(floats / "refs/main", OLDER.encode())
    ggufs = home / "hub/models--owner--m-GGUF"
    blob = _file(ggufs / "blobs" / ("a" * 64))
    link = ggufs / f"snapshots/{COMMIT}/sub/m-Q4_0.gguf"
    link.parent.mkdir(parents=True)
    link.symlink_to(blob)
    _file(ggufs / f"snapshots/{COMMIT}/m-Q8_0-00001-of-00002.gguf")
    _file(ggufs / f"snapshots/{COMMIT}/m-Q8_0-00002-of-00002.gguf")
    _file(ggufs / "refs/main", b"../../../../etc")
    _file(home / "hub/models--owner--empty/refs/main", COMMIT.encode())
    _file(home / "hub/datasets--owner--d/snapshots/x/m.gguf")
    found = {model.name: model for model in stored_models()}
    assert {name: model.path for name, model in found.items()} == {
        "owner/empty": None,
        "owner/floats": floats / "snapshots" / OLDER,
        "owner/m-GGUF:m-Q8_0-00001-of-00002.gguf": ggufs
        / f"snapshots/{COMMIT}/m-Q8_0-00001-of-00002.gguf",
        "owner/m-GGUF:sub/m-Q4_0.gguf": link,
    }
    assert found["owner/empty"].problem == "no snapshot of it is in the cache"


def test_a_file_in_two_stores_is_listed_once(home):
    path = _file(home / ".cache/llama.cpp/m.gguf")
    link = home / ".lmstudio/models/o/r/m.gguf"
    link.parent.mkdir(parents=True)
    link.symlink_to(path)
    assert _names() == [("llama.cpp", str(path))]


def test_a_broken_entry_is_listed_with_its_problem(home):
    add(home / ".ollama/models", "registry.ollama.ai/library/m/latest", digest="sha256:../../x")
    (model,) = stored_models()
    assert (model.name, model.path) == ("ollama:m:latest", None)
    assert "not a SHA-256 digest" in model.problem
