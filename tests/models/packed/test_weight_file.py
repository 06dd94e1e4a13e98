"""Packed files are written once, checked, rebuilt after any mismatch, and never shared by two
models.
"""

import dataclasses
import itertools
import logging
import os
import re
import shutil

import numpy as np
import pytest

from helpers.distance import distance
from helpers.models.packed_files import content, load, only_file
from helpers.models.specs import spec_of
from helpers.models.tiny_models import save_tiny_model
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.host import atomic_files
from kvboost_edge.kernels.linear.weights import PackedRows
from kvboost_edge.kernels.reference import linear as reference
from kvboost_edge.kernels.reference.weights import fit_rows, unpack_rows
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.config.spec import describe_model
from kvboost_edge.models.packed import weight_file as packed_file
from kvboost_edge.models.packed.pack_plan import WEIGHT_FORMATS, check_tensors, pack_plan
from kvboost_edge.models.packed.weight_file import load_packed
from kvboost_edge.models.weights.safetensors_source import SafetensorsSource


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_tiny_model("llama", tmp_path_factory.mktemp("packed"))


def _overwrite(path, data):
    path.chmod(0o600)  # packed files are read-only
    path.write_bytes(data)


def test_packed_once_and_mapped_afterwards(model_dir, tmp_path):
    first = content(load(model_dir, tmp_path))
    stamp = only_file(tmp_path).stat().st_mtime_ns
    assert content(load(model_dir, tmp_path)) == first
    assert only_file(tmp_path).stat().st_mtime_ns == stamp
    assert only_file(tmp_path).stat().st_mode & 0o777 == 0o400


@pytest.mark.parametrize("weights", ["f32", "bf16", "int8", "int4"])
def test_sections_contain_the_weights(model_dir, tmp_path, weights):
    packed = load(model_dir, tmp_path, weights)
    with SafetensorsSource(model_dir) as source:
        gate, up = (
            source.rows(f"model.layers.2.mlp.{name}_proj.weight") for name in ("gate", "up")
        )
        norm = source.rows("model.norm.weight")
    expected = np.concatenate([gate, up])
    codes = packed.array("layer2.gate_up").copy()
    assert packed.address("layer2.gate_up") % 64 == 0
    if weights in ("f32", "bf16"):
        back = reference.unpack_floats(
            codes.view(np.float32 if weights == "f32" else np.uint16), 192, 64
        )
    else:
        scales = packed.array("layer2.gate_up.scales").copy().view(np.float16)
        back = reference.unpack_codes(codes, 192, 64, int(weights[3:])).astype(np.float32)
        back *= reference.unpack_scales(scales, 192, 64).repeat(32, axis=1)
    limit = {"f32": 0.0, "bf16": 3e-3, "int8": 1e-2, "int4": 0.12}[weights]
    assert distance(back, expected) <= limit
    np.testing.assert_array_equal(packed.array("norm").view(np.float32)[:64], norm)
    packed.close()


@pytest.mark.parametrize("weights", ["int4", "int4-asym"])
def test_four_bit_weights_equal_the_reference_fit(model_dir, tmp_path, weights):
    """The layers' matrices equal the fit. The embedding and the head have 8 bits."""
    packed = load(model_dir, tmp_path, weights)

    def stored(name, rows, kind):
        parts = [packed.array(f"{name}{part}").copy() for part in ("", ".scales")]
        minima = (
            packed.array(f"{name}.minima").copy() if kind == "int4-asym" else np.empty(0, np.uint8)
        )
        assert (packed.address(f"{name}.minima") != 0) == (kind == "int4-asym")
        return unpack_rows(PackedRows(*parts, minima), rows, 64, kind)

    with SafetensorsSource(model_dir) as source:
        for name, tensors, own in (
            (
                "layer1.gate_up",
                ("model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"),
                weights,
            ),
            ("layer2.out", ("model.layers.2.self_attn.o_proj",), weights),
            ("embed", ("model.embed_tokens",), "int8"),
            ("head", ("lm_head",), "int8"),
        ):
            rows = np.concatenate([source.rows(f"{tensor}.weight") for tensor in tensors])
            codes, scales, minima = (part.astype(np.float32) for part in fit_rows(rows, own))
            expected = codes * scales[:, :, None] - minima[:, :, None]
            np.testing.assert_array_equal(
                stored(name, len(rows), own), expected.reshape(rows.shape)
            )
    packed.close()


def test_two_formats_of_one_model_do_not_share_a_file(model_dir, tmp_path):
    fingerprint = Checkpoint.open(model_dir).fingerprint(cache_dir=tmp_path)
    spec = spec_of(model_dir)
    layouts = {
        name: packed_file._layout(pack_plan(spec, name), fingerprint, name)
        for name in WEIGHT_FORMATS
    }
    for number, weights in enumerate(WEIGHT_FORMATS, 1):
        before = set((tmp_path / "packed").iterdir()) if number > 1 else set()
        load(model_dir, tmp_path, weights).close()
        files = set((tmp_path / "packed").iterdir())
        assert len(files) == number
        (path,) = files - before
        assert path.name.endswith(f"-{weights}.kvpack")
        for other, layout in layouts.items():
            found = packed_file._open_checked(path, layout, tmp_path)
            assert (found is not None) == (other == weights)
            if found is not None:
                found.close()


@pytest.mark.parametrize("damage", ["flip", "truncate", "extend", "header", "version", "empty"])
def test_a_damaged_file_is_repacked(model_dir, tmp_path, damage, caplog):
    good = content(load(model_dir, tmp_path))
    path = only_file(tmp_path)
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
    _overwrite(path, bytes(data))
    assert content(load(model_dir, tmp_path)) == good
    assert "packed again" in caplog.text
    caplog.clear()
    assert content(load(model_dir, tmp_path)) == good
    assert not caplog.records


def test_mutated_files_are_refused(model_dir, tmp_path):
    """In 1,000 mutations, each file is refused, so that the weights are packed again, or its bytes
    are unchanged.
    """
    good = content(load(model_dir, tmp_path))
    path = only_file(tmp_path)
    data = path.read_bytes()
    plan = pack_plan(spec_of(model_dir), "int8")
    layout = packed_file._layout(
        plan, Checkpoint.open(model_dir).fingerprint(cache_dir=tmp_path), "int8"
    )
    rng = np.random.default_rng(5)
    head = len(layout.header)
    mutated = tmp_path / "mutated.kvpack"
    refused = 0
    for round_ in range(1000):
        broken = bytearray(data)
        at = int(rng.integers(head if round_ % 2 else len(data)))  # half of them are in the header
        length = int(rng.integers(1, 40))
        change = round_ % 5
        if change == 0:
            broken[at] ^= 1 << int(rng.integers(8))
        elif change == 1:
            broken[at : at + length] = rng.bytes(length)
        elif change == 2:
            del broken[at : at + length]
        elif change == 3:
            broken[at:at] = rng.bytes(length)
        else:
            del broken[at:]
        mutated.write_bytes(bytes(broken))
        found = packed_file._open_checked(mutated, layout, tmp_path)
        if found is not None:
            assert broken == data
            assert content(found) == good
        refused += found is None
    assert refused >= 990


def test_entries_and_fingerprint_determine_the_file(model_dir, tmp_path):
    content(load(model_dir, tmp_path))
    path = only_file(tmp_path)
    plan = pack_plan(spec_of(model_dir), "int8")
    fingerprint = Checkpoint.open(model_dir).fingerprint(cache_dir=tmp_path)
    wide = [dataclasses.replace(entry, kind="bf16") if entry.inputs else entry for entry in plan]
    for entries, digest, weights in (
        (plan[:-1], fingerprint, "int8"),
        (wide, fingerprint, "int8"),
        (plan, "0" * 64, "int8"),
        (plan, fingerprint, "int4"),
    ):
        assert (
            packed_file._open_checked(path, packed_file._layout(entries, digest, weights), tmp_path)
            is None
        )


def test_two_models_of_one_shape_do_not_share_a_file(tmp_path):
    dirs = [save_tiny_model("llama", tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    contents = [content(load(directory, tmp_path / "cache")) for directory in dirs]
    assert contents[0] != contents[1]
    assert len(list((tmp_path / "cache" / "packed").iterdir())) == 2


def test_packing_is_logged_and_reported(model_dir, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="kvboost_edge")
    seen = []
    plan = pack_plan(spec_of(model_dir), "int4")
    packed = load_packed(
        Checkpoint.open(model_dir),
        plan,
        weights="int4",
        cache_dir=tmp_path,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (packed.nbytes, packed.nbytes)
    packed.close()
    first, last = (record.getMessage() for record in caplog.records)
    assert first.startswith(f"packing {model_dir} as int4 into {only_file(tmp_path)}, 0.")
    assert re.fullmatch(r"packed 0\.\d MB as int4 in \d+\.\d s, weight error [1-9]\.\d\d%", last)


def test_a_checkpoint_replaced_during_packing_is_refused(tmp_path):
    """Its weights must not be stored under the fingerprint of the previous file."""
    first, other = (save_tiny_model("llama", tmp_path / str(seed), seed=seed) for seed in (0, 1))
    cache = tmp_path / "cache"
    kept = tmp_path / "kept"
    shutil.copy(first / "model.safetensors", kept)
    plan = pack_plan(spec_of(first), "int8")
    swaps = iter([other / "model.safetensors"])

    def swap(done, total):
        for path in swaps:
            os.replace(shutil.copy(path, tmp_path / "new"), first / "model.safetensors")

    with pytest.raises(
        ModelFormatError, match=r"model\.safetensors changed while its weights were being packed"
    ):
        load_packed(Checkpoint.open(first), plan, weights="int8", cache_dir=cache, progress=swap)
    assert list((cache / "packed").iterdir()) == []
    shutil.copy(kept, first / "model.safetensors")
    assert content(load(first, cache)) == content(load(first, tmp_path / "fresh"))


def test_a_checkpoint_truncated_during_packing_is_refused(tmp_path):
    directory = save_tiny_model("llama", tmp_path / "model", vocab_size=20_000)
    plan = pack_plan(spec_of(directory), "int8")

    calls = itertools.count()

    def cut(done, total):
        if next(calls) == 2:  # the header and the first rows are written by then
            os.truncate(directory / "model.safetensors", 4096)

    with pytest.raises(
        ModelFormatError, match=r"model\.safetensors was truncated while it was being read"
    ):
        load_packed(
            Checkpoint.open(directory),
            plan,
            weights="int8",
            cache_dir=tmp_path,
            num_threads=1,
            progress=cut,
        )
    assert list((tmp_path / "packed").iterdir()) == []


def test_a_file_packed_by_another_process_is_verified(model_dir, tmp_path, monkeypatch):
    """The file under the name is checked before use, and it is not recorded as sound without a
    check.
    """
    good = content(load(model_dir, tmp_path / "good"))
    data = bytearray(only_file(tmp_path / "good").read_bytes())
    finish = atomic_files.finish_file

    def finish_and_lose(file, path):
        finish(file, path)
        path.unlink()
        path.write_bytes(data)

    monkeypatch.setattr(atomic_files, "finish_file", finish_and_lose)
    assert content(load(model_dir, tmp_path / "sound")) == good
    data[-100] ^= 1
    with pytest.raises(ModelFormatError, match="replaced by another process"):
        load(model_dir, tmp_path / "damaged")


def test_tensors_are_checked_against_the_plan(model_dir, tmp_path):
    config = Checkpoint.open(model_dir).config
    with SafetensorsSource(model_dir) as source:
        check_tensors(pack_plan(describe_model(config), "int8"), source)
        for change, message in (
            ({"intermediate_size": 64}, "gate_proj.*shape"),
            ({"num_hidden_layers": 2}, "not supported by"),
            ({"num_hidden_layers": 4}, "lack tensor"),
            ({"attention_bias": True}, "lack tensor.*bias"),
        ):
            with pytest.raises(ModelFormatError, match=message):
                check_tensors(pack_plan(describe_model({**config, **change}), "int8"), source)
