"""Fingerprints are equal for equal models, differ for any relevant byte, and are cached by the
file's stamp.
"""

import hashlib
import os
import shutil
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvboost_edge.errors import ConfigError, ModelFormatError
from kvboost_edge.host import file_digest
from kvboost_edge.host.file_memo import FileStamp, cache_directory, recall, remember
from kvboost_edge.models import fingerprint
from kvboost_edge.models.fingerprint import fingerprint_of_directory, fingerprint_of_module
from kvboost_edge.models.locate.stores import stored_models


@pytest.fixture
def model(tiny_model_dir, tmp_path):
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def hashed(monkeypatch):
    """Files whose content was hashed."""
    calls = []
    real = fingerprint.digest_in_parts

    def counted(file, stop, *, part_bytes, num_threads):
        calls.append(Path(file.name))
        return real(file, stop, part_bytes=part_bytes, num_threads=num_threads)

    monkeypatch.setattr(fingerprint, "digest_in_parts", counted)
    return calls


def test_fingerprints_depend_on_bytes_only(model, tmp_path, cache):
    first = fingerprint_of_directory(model, cache_dir=cache)
    assert len(first) == 64
    copy = shutil.copytree(model, tmp_path / "copy")
    assert fingerprint_of_directory(copy, cache_dir=cache) == first
    seen = {first}
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        other = Path(shutil.copytree(model, tmp_path / name))
        raw = bytearray((other / name).read_bytes())
        raw[-2] ^= 1
        (other / name).write_bytes(raw)
        seen.add(fingerprint_of_directory(other, cache_dir=cache))
    assert len(seen) == 4


def test_other_files_do_not_affect_the_fingerprint(model, cache):
    first = fingerprint_of_directory(model, cache_dir=cache)
    (model / "README.md").write_text("words")
    assert fingerprint_of_directory(model, cache_dir=cache) == first


def test_the_digest_is_sha256_of_the_part_digests(model, monkeypatch, cache):
    monkeypatch.setattr(fingerprint, "_PART_BYTES", 1000)
    monkeypatch.setattr(file_digest, "_READ_BYTES", 300)
    raw = (model / "model.safetensors").read_bytes()
    parts = [hashlib.sha256(raw[i : i + 1000]).digest() for i in range(0, len(raw), 1000)]
    found = fingerprint._file_digest(model / "model.safetensors", cache)
    assert found == hashlib.sha256(b"".join(parts)).hexdigest()


def test_digests_are_cached_by_file_stamp(model, hashed, cache):
    first = fingerprint_of_directory(model, cache_dir=cache)
    assert hashed
    hashed.clear()
    assert fingerprint_of_directory(model, cache_dir=cache) == first
    assert not hashed
    weights = model / "model.safetensors"
    before = weights.stat()
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    os.utime(
        weights, ns=(before.st_atime_ns, before.st_mtime_ns)
    )  # same size, time and inode, other bytes
    assert fingerprint_of_directory(model, cache_dir=cache) != first


def test_the_cache_directory_is_configurable_and_private(model, tmp_path, monkeypatch):
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path / "named"))
    assert cache_directory() == tmp_path / "named"
    fingerprint_of_directory(model)
    entries = list((tmp_path / "named" / "files").iterdir())
    assert len(entries) == 1
    assert stat.S_IMODE((tmp_path / "named").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "named" / "files").stat().st_mode) == 0o700
    assert stat.S_IMODE(entries[0].stat().st_mode) == 0o600


@pytest.fixture
def no_home(monkeypatch):
    """A user without HOME and without an entry in the password database."""
    pwd = pytest.importorskip("pwd")

    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "KVBOOST_EDGE_CACHE", "LLAMA_CACHE", "OLLAMA_MODELS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("platform", "directory"),
    [("linux", "/.cache/kvboost-edge"), ("darwin", "/Library/Caches/kvboost-edge")],
)
def test_the_cache_directory_of_a_user_without_a_home(no_home, platform, directory, monkeypatch):
    monkeypatch.setattr("sys.platform", platform)
    assert cache_directory() == Path(directory)
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", "~/cache")
    with pytest.raises(ConfigError, match=r"KVBOOST_EDGE_CACHE='~/cache' .* absolute path"):
        cache_directory()


def test_stores_are_listed_for_a_user_without_a_home(no_home, tmp_path, monkeypatch):
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("kvboost_edge.models.locate.ollama_store._SERVICE", tmp_path / "none")
    assert list(stored_models()) == []


def test_fingerprints_work_without_a_writable_cache(model, tmp_path, cache, hashed):
    first = fingerprint_of_directory(model, cache_dir=cache)
    blocked = tmp_path / "a-file"
    blocked.write_text("in the way")
    hashed.clear()
    assert fingerprint_of_directory(model, cache_dir=blocked) == first
    assert fingerprint_of_directory(model, cache_dir=blocked) == first
    assert len(hashed) == 2


def test_damaged_cache_entries_are_ignored(model, cache, hashed):
    first = fingerprint_of_directory(model, cache_dir=cache)
    (entry,) = (cache / "files").iterdir()
    good = entry.read_text()
    for bad in (
        "",
        "[]",
        good[:-5],
        good.replace('"size": ', '"size": 1'),
        '{"stamp": null, "facts": {"digest": "0"}}',
    ):
        entry.write_text(bad)
        assert fingerprint_of_directory(model, cache_dir=cache) == first
    (cache / "files").chmod(0o777)  # other users may have written there
    entry.write_text(good)
    hashed.clear()
    assert fingerprint_of_directory(model, cache_dir=cache) == first
    assert hashed


def test_facts_of_a_file_are_merged(model, cache):
    stamp = FileStamp.of(model / "model.safetensors")
    remember(stamp, {"digest": "d"}, cache)
    remember(stamp, {"finite": True}, cache)
    assert recall(stamp, cache) == {"digest": "d", "finite": True}
    assert not list((cache / "files").glob(".new-*"))


def test_missing_weights_raise(model, cache):
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelFormatError, match=r"model\.safetensors"):
        fingerprint_of_directory(model, cache_dir=cache)


def test_shards_and_tensor_names_affect_the_fingerprint(model, cache):
    """Swapping the data of two tensors makes another model with the same set of bytes."""
    first = fingerprint_of_directory(model, cache_dir=cache)
    state = load_file(model / "model.safetensors")
    a = "model.layers.0.self_attn.q_proj.weight"
    b = "model.layers.1.self_attn.q_proj.weight"
    state[a], state[b] = state[b].clone(), state[a].clone()
    save_file(state, model / "model.safetensors", metadata={"format": "pt"})
    assert fingerprint_of_directory(model, cache_dir=cache) != first


def test_a_module_fingerprint_covers_every_parameter():
    from helpers.models.tiny_models import build_tiny_model

    tokenizer = object()
    model = build_tiny_model("llama")
    first = fingerprint_of_module(model, tokenizer)
    assert fingerprint_of_module(build_tiny_model("llama"), tokenizer) == first
    assert fingerprint_of_module(build_tiny_model("llama", seed=1), tokenizer) != first
    with torch.no_grad():
        list(model.parameters())[-1].view(-1)[0] += 1e-3
    assert fingerprint_of_module(model, tokenizer) != first
    assert fingerprint_of_module(build_tiny_model("llama").bfloat16(), tokenizer) != first
    assert fingerprint_of_module(build_tiny_model("llama", rms_norm_eps=1e-3), tokenizer) != first
