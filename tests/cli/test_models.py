"""Tests of `kvboost-edge models` on prepared stores: supported models, the reasons for others, and
a row for a broken file.
"""

import json
import random
import shutil
import sys
from pathlib import Path

import gguf
import pytest
from huggingface_hub import constants

from helpers.gguf.writer import write_gguf
from helpers.json_files import change_json, read_json
from kvboost_edge.cli import models
from kvboost_edge.models.checkpoint import Checkpoint


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Cache folder of llama.cpp, the only store that is not empty."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "none"))
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "llama"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "llama").mkdir()
    return tmp_path / "llama"


@pytest.fixture
def rows_of(answered):
    """Function `rows_of(*argv)` that returns the rows of the table by file name."""
    return lambda *argv: {Path(row["name"]).name: row for row in answered("models", *argv)}


def test_models_lists_supported_and_unsupported_files(folder, tiny_model_dir, rows_of, monkeypatch):
    write_gguf(tiny_model_dir, folder / "good.gguf", kind="Q8_0")
    write_gguf(tiny_model_dir, folder / "split.gguf", kind="Q8_0", split=9)
    write_gguf(tiny_model_dir, folder / "half.gguf", kind="Q8_0", split=9)
    next(folder.glob("half-00002-of-*.gguf")).unlink()
    data = (folder / "good.gguf").read_bytes()
    (folder / "cut.gguf").write_bytes(data[:3000])
    (folder / "empty.gguf").touch()
    length = b"\4" + bytes(7)
    (folder / "words.gguf").write_bytes(data.replace(length + b"gpt2", length + b"bert", 1))
    shutil.copytree(tiny_model_dir, folder / "floats")
    shutil.copytree(tiny_model_dir, folder / "strange")
    change_json(folder / "strange/config.json", model_type="t5", is_encoder_decoder=True)
    writer = gguf.GGUFWriter(folder / "vision.gguf", "clip")
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()

    def too_dear(_):
        raise AssertionError("weights were read")

    for name in ("fingerprint", "summary"):
        monkeypatch.setattr(Checkpoint, name, too_dear)
    rows = rows_of()
    native = {name for name, row in rows.items() if row["runs"] == "native"}
    assert native == {"good.gguf", "floats", next(folder.glob("split-00001*")).name}
    assert rows["good.gguf"]["format"] == "GGUF Q8_0"
    assert rows["good.gguf"]["bytes"] == len(data)
    assert rows["good.gguf"]["store"] == "llama.cpp"
    assert rows["floats"]["format"].startswith("safetensors ")
    reasons = {name: row["reason"] for name, row in rows.items() if row["runs"] == "refused"}
    for name, words in {
        "cut.gguf": "truncated",
        "empty.gguf": "too few for a GGUF file",
        "vision.gguf": "'clip'",
        "words.gguf": "tokenizer.ggml.model is 'bert'",
        "half-00001": "missing in its directory: half-00002",
        "strange": "",
    }.items():
        (reason,) = (reason for other, reason in reasons.items() if other.startswith(name))
        assert words in reason
        assert reason


def test_recommended_models_equal_the_documentation(answered, printed, monkeypatch):
    monkeypatch.setattr(models, "total_bytes", lambda: 7_700_000_000)
    rows = answered("models", "--suggest")
    shown = [
        f"| {row['memory_gb']} GB | `{row['name']}` | {row['file_bytes'] / 1e9:.1f} GB | "
        f"{row['licence']} | `ollama:{row['ollama']}` |"
        for row in rows
    ]
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    table = page.partition("## Recommended models")[2].partition("`make real-model`")[0]
    assert [line for line in table.splitlines() if line.startswith("|")][2:] == shown
    assert [row["memory_gb"] for row in rows if row["fits"]] == [2, 2, 4, 4, 8]
    assert all(row["file_bytes"] < row["memory_gb"] * 1e9 * 0.6 for row in rows)
    assert "This machine has 7.7 GB" in printed("models", "--suggest").out
    assert "No recommended model has 'zzz'" in printed("models", "zzz", "--suggest").out
    small = answered("models", "qwen3-0.6b", "--suggest")
    assert [row["ollama"] for row in small] == ["qwen3:0.6b"]


def test_unusual_files_are_listed(folder, tiny_model_dir, rows_of, printed, monkeypatch):
    """The files have names that are not text or move the cursor, circular links, excessive sizes,
    or raise unexpected errors.
    """
    write_gguf(tiny_model_dir, folder / "good.gguf", kind="Q8_0")
    (folder / "round.gguf").symlink_to(folder / "round.gguf")
    change_json(shutil.copytree(tiny_model_dir, folder / "wide") / "config.json", head_dim=1 << 31)
    odd = ["\x1b[2Jclear.gguf", "two\nlines.gguf"]
    if sys.platform == "linux":
        odd.append("bytes\udcff.gguf")
    for name in odd:
        shutil.copy(folder / "good.gguf", folder / name)
    rows = rows_of()
    assert {name for name, row in rows.items() if row["runs"] == "native"} == {"good.gguf", *odd}
    assert "missing" in rows["round.gguf"]["reason"]
    assert f"head_dim={1 << 31}" in rows["wide"]["reason"]

    def surprise(checkpoint, _):
        if checkpoint.path.name == "good.gguf":
            raise KeyError("surprise")
        return {"runner": "native", "runner_reason": ""}

    monkeypatch.setattr(models, "installed_route", surprise)
    assert rows_of()["good.gguf"]["reason"] == "cannot be read: KeyError: 'surprise'"
    out = printed("models").out
    assert "\x1b[2J" not in out
    assert "surprise" in out
    assert len(out.encode()) > 100


@pytest.mark.parametrize("seed", range(6))
def test_damaged_files_are_reported_by_the_readers(folder, tiny_model_dir, rows_of, seed):
    """Bits are flipped, files are truncated and values are wrong. Each reader reports its own
    error, never an unexpected one.
    """
    rng = random.Random(seed)
    write_gguf(tiny_model_dir, folder / "good.gguf", kind="Q8_0")
    data = (folder / "good.gguf").read_bytes()
    config = read_json(tiny_model_dir / "config.json")
    names = [
        *config,
        "rope_scaling",
        "quantization_config",
        "layer_types",
        "head_dim",
        "text_config",
    ]
    values = (
        None,
        -1,
        0,
        2**31,
        10**400,
        1e308,
        float("nan"),
        "x",
        [],
        [[]],
        {},
        {"rope_type": "yarn"},
        True,
    )
    for number in range(40):
        damaged = bytearray(data[: rng.choice((len(data), rng.randrange(len(data))))])
        for _ in range(rng.choice((1, 1, 4))):
            damaged[rng.randrange(min(len(damaged), 60_000))] ^= 1 << rng.randrange(8)
        (folder / f"{number}.gguf").write_bytes(damaged)
        (folder / str(number)).mkdir()
        for path in tiny_model_dir.iterdir():
            (folder / str(number) / path.name).hardlink_to(path)
        (folder / str(number) / "config.json").unlink()
        wrong = {name: rng.choice(values) for name in rng.sample(names, 2)}
        (folder / str(number) / "config.json").write_text(json.dumps({**config, **wrong}))
    rows = rows_of()
    assert len(rows) == 81
    assert rows["good.gguf"]["runs"] == "native"
    assert not [row for row in rows.values() if row["reason"].startswith("cannot be read: ")]


def test_the_table_is_filtered_by_a_word(folder, tiny_model_dir, rows_of, printed):
    assert "No models found" in printed("models").out
    assert "No model has 'zzz' in its name; " in printed("models", "zzz").out
    write_gguf(tiny_model_dir, folder / "good[bold].gguf", kind="Q8_0")
    (folder / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    out = "".join(printed("models").out.replace("│", "").split())
    assert "good[bold].gguf" in out
    assert "native" in out
    assert "refused:" in out
    assert list(rows_of("GOOD")) == ["good[bold].gguf"]
