"""Checkpoints: each part of a model is read once, and a file replaced meanwhile is not mistaken for
the first one.
"""

import hashlib
import os
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest

from helpers.gguf.writer import write_gguf
from helpers.models.tiny_models import save_tiny_model
from kvboost_edge import CPUPagedEngine
from kvboost_edge.cli.app import run
from kvboost_edge.engine.build import load_tokenizer
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.config import spec
from kvboost_edge.models.gguf import file as gguf_file
from kvboost_edge.models.gguf import source
from kvboost_edge.models.packed import pack_plan as plan


@pytest.fixture
def model_dir(tmp_path):
    return save_tiny_model("llama", tmp_path / "model")


@pytest.fixture
def gguf(model_dir, tmp_path):
    return write_gguf(model_dir, tmp_path / "m.gguf", kind="Q8_0")


@pytest.fixture
def reads(monkeypatch):
    """Counts of parsed headers ("header") and of decoded string arrays, by key."""
    counts = Counter()
    parse = gguf_file._read
    decode = gguf_file._decoded

    def counted_parse(*given):
        counts["header"] += 1
        return parse(*given)

    def counted_decode(path, key, *given):
        counts[key] += 1
        return decode(path, key, *given)

    monkeypatch.setattr(gguf_file, "_read", counted_parse)
    monkeypatch.setattr(gguf_file, "_decoded", counted_decode)
    return counts


@pytest.fixture
def calls(monkeypatch):
    """Modules that described the model, planned its packed weights and opened its tensors."""
    found = {"describe_model": [], "pack_plan": [], "GgufSource": []}

    def watched(name, original):
        def call(*given, **options):
            found[name].append(sys._getframe(1).f_globals["__name__"].rpartition(".")[2])
            return original(*given, **options)

        return call

    modules = [module for key, module in sys.modules.items() if key.startswith("kvboost_edge.")]
    for name, original in (
        ("describe_model", spec.describe_model),
        ("pack_plan", plan.pack_plan),
        ("GgufSource", source.GgufSource),
    ):
        for module in modules:
            if getattr(module, name, None) is original:
                monkeypatch.setattr(module, name, watched(name, original))
    return found


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "Q8_0"),
        ("gemma4", "Q8_0"),
        ("ernie4_5", "Q8_0"),
        ("lfm2", "Q8_0"),
        ("llama", "F16"),
    ],
)
def test_an_engine_reads_a_checkpoint_once(family, kind, tmp_path, monkeypatch, calls):
    """The first start packs the weights, the second one finds them packed. For float weights the
    size of the plan decides the format, and that plan is then used.
    """
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path / "cache"))
    path = save_tiny_model(family, tmp_path / "model")
    path = write_gguf(path, tmp_path / "m.gguf", kind=kind)
    for _ in range(2):
        for found in calls.values():
            found.clear()
        with CPUPagedEngine.from_pretrained(path, num_blocks=16) as engine:
            assert engine.runner_info.name == "native"
        assert calls == {name: ["checkpoint"] for name in calls}


def test_an_engine_parses_a_header_once(gguf, reads, tmp_path, monkeypatch):
    """The first start packs the weights, the second one finds them packed."""
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path / "cache"))
    for _ in range(2):
        reads.clear()
        with CPUPagedEngine.from_pretrained(gguf, num_blocks=16) as engine:
            assert engine.runner_info.name == "native"
        assert reads == {"header": 1, "tokenizer.ggml.tokens": 1}


@pytest.mark.parametrize("command", ["inspect", "doctor"])
def test_a_command_parses_a_header_once(command, gguf, reads):
    assert run([command, str(gguf), "--json"]) == 0
    assert reads == {"header": 1, "tokenizer.ggml.tokens": 1}


def test_an_open_checkpoint_is_reused(model_dir, gguf):
    for path in (model_dir, gguf):
        checkpoint = Checkpoint.open(str(path))
        assert checkpoint.path == path
        assert Checkpoint.open(checkpoint) is checkpoint
        assert checkpoint.config is checkpoint.config


def test_directory_and_gguf_agree(model_dir, gguf):
    directory = Checkpoint.open(model_dir)
    file = Checkpoint.open(gguf)
    assert (directory.is_gguf, file.is_gguf) == (False, True)
    assert (directory.is_quantized, file.is_quantized) == (False, True)
    assert directory.summary().num_params == file.summary().num_params
    assert directory.packed_bytes("int8") == file.packed_bytes("int8")
    assert directory.generation() == file.generation()
    tokenizers = [load_tokenizer(directory), load_tokenizer(file)]
    assert tokenizers[0].encode("one two") == tokenizers[1].encode("one two")


def test_a_files_fingerprint_depends_only_on_its_bytes(gguf, tmp_path):
    """The value must never change, so that packed files and shared blocks of earlier versions stay
    valid.
    """
    whole = hashlib.sha256(
        hashlib.sha256(gguf.read_bytes()).digest()
    ).hexdigest()  # one part, then all parts
    expected = hashlib.sha256(b"kvboost-edge gguf 1" + whole.encode()).hexdigest()
    moved = Path(shutil.copy(gguf, tmp_path / "other.gguf"))
    for path in (gguf, moved):
        assert Checkpoint.open(path).fingerprint(cache_dir=tmp_path / "cache") == expected


def test_a_file_replaced_after_reading_its_header_is_refused(gguf, tmp_path):
    """The offsets in the header belong to the first file."""
    checkpoint = Checkpoint.open(gguf)
    assert checkpoint.changed_files() == []
    os.replace(shutil.copy(gguf, tmp_path / "new"), gguf)
    assert checkpoint.changed_files() == [str(gguf)]
    with pytest.raises(ModelFormatError, match=r"m\.gguf changed since its header was read"):
        checkpoint.open_source()
    with pytest.raises(ModelFormatError, match=r"m\.gguf changed since its header was read"):
        checkpoint.summary()
    with pytest.raises(ModelFormatError, match=r"m\.gguf changed while it was being read"):
        checkpoint.fingerprint(cache_dir=tmp_path / "cache")


def test_a_directory_changed_after_its_fingerprint_is_detected(model_dir, tmp_path):
    checkpoint = Checkpoint.open(model_dir)
    first = checkpoint.fingerprint(cache_dir=tmp_path / "cache")
    assert checkpoint.changed_files() == []
    path = model_dir / "config.json"
    path.write_text(path.read_text() + " ")
    assert checkpoint.changed_files() == [str(path)]
    assert (
        checkpoint.fingerprint(cache_dir=tmp_path / "cache") == first
    )  # of the bytes that were read
    assert Checkpoint.open(model_dir).fingerprint(cache_dir=tmp_path / "cache") != first


def test_the_declared_name_comes_from_the_files(model_dir, gguf, tmp_path):
    assert Checkpoint.open(gguf).declared_name == ""
    named = write_gguf(model_dir, tmp_path / "n.gguf", general={"general.name": "My Reranker"})
    assert Checkpoint.open(named).declared_name == "My Reranker"
