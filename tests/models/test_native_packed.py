"""Packed files: written once, checked, rebuilt when anything about them is wrong; never shared by two models."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.kernels import reference_linear as reference
from kvboost_edge.models import packed_file
from kvboost_edge.models.config_file import read_config
from kvboost_edge.models.families import describe_model
from kvboost_edge.models.fingerprint import model_fingerprint
from kvboost_edge.models.packed_file import PackedWeights, load_packed
from kvboost_edge.models.quantize import check_tensors, pack_plan
from kvboost_edge.models.weight_source import SafetensorsSource
from tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("packed"))


def _load(model_dir: Path, cache: Path, weights: str = "int8") -> PackedWeights:
    plan = pack_plan(describe_model(read_config(model_dir)), weights)
    return load_packed(
        model_dir, plan, fingerprint=model_fingerprint(model_dir, cache_dir=cache), weights=weights, cache_dir=cache
    )


def _only_file(cache: Path) -> Path:
    (path,) = (cache / "packed").iterdir()
    return path


def _content(packed: PackedWeights) -> bytes:
    data = packed.array("layer1.down").tobytes() + packed.array("layer1.down.scales").tobytes()
    packed.close()
    return data


def test_packed_once_and_mapped_afterwards(model_dir: Path, tmp_path: Path) -> None:
    first = _content(_load(model_dir, tmp_path))
    stamp = _only_file(tmp_path).stat().st_mtime_ns
    assert _content(_load(model_dir, tmp_path)) == first
    assert _only_file(tmp_path).stat().st_mtime_ns == stamp
    assert _only_file(tmp_path).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("weights", ["f32", "bf16", "int8", "int4"])
def test_sections_hold_the_weights(model_dir: Path, tmp_path: Path, weights: str) -> None:
    packed = _load(model_dir, tmp_path, weights)
    with SafetensorsSource(model_dir) as source:
        gate, up = (source.rows(f"model.layers.2.mlp.{name}_proj.weight") for name in ("gate", "up"))
        norm = source.rows("model.norm.weight")
    expected = np.concatenate([gate, up])
    codes = packed.array("layer2.gate_up").copy()
    assert packed.address("layer2.gate_up") % 64 == 0
    if weights in ("f32", "bf16"):
        back = reference.unpack_floats(codes.view(np.float32 if weights == "f32" else np.uint16), 192, 64)
    else:
        scales = packed.array("layer2.gate_up.scales").copy().view(np.float16)
        back = reference.unpack_codes(codes, 192, 64, int(weights[3:])).astype(np.float32)
        back *= reference.unpack_scales(scales, 192, 64).repeat(32, axis=1)
    limit = {"f32": 0.0, "bf16": 3e-3, "int8": 1e-2, "int4": 0.12}[weights]
    assert np.linalg.norm(back - expected) <= limit * np.linalg.norm(expected)
    np.testing.assert_array_equal(packed.array("norm").view(np.float32)[:64], norm)
    packed.close()


@pytest.mark.parametrize("damage", ["flip", "truncate", "extend", "header", "version", "empty"])
def test_a_damaged_file_is_written_again(
    model_dir: Path, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = _content(_load(model_dir, tmp_path))
    path = _only_file(tmp_path)
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    elif damage == "header":
        data[40] ^= 1
    elif damage == "version":
        data[8] += 1
    elif damage == "empty":
        data = bytearray()
    else:
        data = data[:-1] if damage == "truncate" else data + b"\0"
    path.write_bytes(bytes(data))
    assert _content(_load(model_dir, tmp_path)) == good
    assert "packed again" in caplog.text
    caplog.clear()
    assert _content(_load(model_dir, tmp_path)) == good
    assert not caplog.records


def test_any_flipped_byte_is_found(model_dir: Path, tmp_path: Path) -> None:
    good = _content(_load(model_dir, tmp_path))
    path = _only_file(tmp_path)
    data = path.read_bytes()
    rng = np.random.default_rng(0)
    for at in rng.integers(0, len(data), 60):
        broken = bytearray(data)
        broken[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(bytes(broken))
        assert _content(_load(model_dir, tmp_path)) == good
        assert path.read_bytes() == data


def test_two_models_of_one_shape_do_not_share_a_file(tmp_path: Path) -> None:
    dirs = [save_tiny_model("llama", tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    contents = [_content(_load(directory, tmp_path / "cache")) for directory in dirs]
    assert contents[0] != contents[1]
    assert len(list((tmp_path / "cache" / "packed").iterdir())) == 2


def test_a_failure_while_packing_leaves_nothing(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> object:
        raise OSError("disk full")

    monkeypatch.setattr(packed_file, "pack_entry", fail)
    with pytest.raises(OSError, match="disk full"):
        _load(model_dir, tmp_path)
    assert list((tmp_path / "packed").iterdir()) == []


def test_without_a_cache_directory_it_still_runs(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    good = _content(_load(model_dir, tmp_path / "good"))

    def refuse(*_: object, **__: object) -> object:
        raise OSError("read-only")

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    assert _content(_load(model_dir, tmp_path / "bad")) == good
    assert "every start" in caplog.text


def test_tensors_are_checked_against_the_plan(model_dir: Path, tmp_path: Path) -> None:
    config = read_config(model_dir)
    with SafetensorsSource(model_dir) as source:
        check_tensors(pack_plan(describe_model(config), "int8"), source)
        for change, message in (
            ({"intermediate_size": 64}, "gate_proj.*shape"),
            ({"num_hidden_layers": 2}, "not known"),
            ({"num_hidden_layers": 4}, "lack tensor"),
            ({"attention_bias": True}, "lack tensor.*bias"),
        ):
            with pytest.raises(ModelFormatError, match=message):
                check_tensors(pack_plan(describe_model({**config, **change}), "int8"), source)


def test_source_reads_rows_and_releases_pages(model_dir: Path) -> None:
    with SafetensorsSource(model_dir) as source:
        name = "lm_head.weight"
        whole = source.rows(name)
        np.testing.assert_array_equal(source.rows(name, 5, 9), whole[5:9])
        source.release(name)
        np.testing.assert_array_equal(source.rows(name), whole)
        assert source.shape(name) == (300, 64)
    with pytest.raises(ModelFormatError):
        SafetensorsSource(Path(os.devnull).parent)
