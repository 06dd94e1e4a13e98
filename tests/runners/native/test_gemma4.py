"""Gemma 4 on the native runner: stored KV of layers that share it, file formats, tables, and other
backends.
"""

import pytest
from safetensors.numpy import load_file, save_file

from helpers.distance import distance
from helpers.gguf.writer import write_gguf
from helpers.models.tensor_files import change_tensors
from helpers.models.tiny_models import build_tiny_model, save_tiny_model
from helpers.oracles.transformers_logits import driver_of
from helpers.random_ids import random_ids
from helpers.runners.logits import dense_logits, native_logits
from helpers.runners.paged_driver import PagedDriver
from kvboost_edge.backends.base import LayerKVSpec
from kvboost_edge.backends.cpu import CPUBackend
from kvboost_edge.backends.reference import ReferenceBackend
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.runners.native.runner import NativeRunner

PROMPT = random_ids(90, 0)


def test_only_layers_with_their_own_kv_store_it(tmp_path):
    runner = NativeRunner.from_dir(save_tiny_model("gemma4", tmp_path), weights="int8")
    sliding = (2, 32)
    full = (2, 64)
    stored = [LayerKVSpec(*sliding), LayerKVSpec(*sliding), LayerKVSpec(*full)]
    assert list(runner.info.kv_spec.layers) == [
        *stored,
        LayerKVSpec(*sliding, 4),
        LayerKVSpec(*full, 5),
    ]
    runner.close()


def test_a_file_without_the_per_layer_table_is_refused(tmp_path):
    path = save_tiny_model("gemma4", tmp_path) / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.embed_tokens_per_layer.weight"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(
        ModelFormatError, match=r"lack tensor 'model\.embed_tokens_per_layer\.weight'"
    ):
        NativeRunner.from_dir(tmp_path, weights="int8")


@pytest.mark.parametrize(("name", "shared"), [("gemma4", 2), ("gemma4-wide", 0)])
@pytest.mark.parametrize(("kind", "limit"), [("F32", 1e-5), ("Q8_0", 0.1)])
def test_a_gguf_file_equals_the_checkpoint(name, shared, kind, limit, tmp_path):
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
    directory = save_tiny_model(name, tmp_path / "hf", **layers, num_kv_shared_layers=shared)
    path = write_gguf(directory, tmp_path / "m.gguf", kind=kind)
    expected = native_logits(directory, "f32", PROMPT)
    found = native_logits(path, "f32" if kind == "F32" else "auto", PROMPT)
    assert distance(found, expected) <= limit


@pytest.mark.parametrize("kind", ["Q8_0", "NVFP4"])
def test_a_quantized_per_layer_table_equals_its_floats(kind, tmp_path):
    directory = save_tiny_model("gemma4", tmp_path / "hf")
    path = write_gguf(
        directory,
        tmp_path / "m.gguf",
        kind=lambda name: kind if name == "per_layer_token_embd.weight" else "F32",
    )
    found = native_logits(path, "f32", PROMPT)
    table = "model.embed_tokens_per_layer.weight"
    with Checkpoint.open(path).open_source() as source:
        change_tensors(directory, {table: source.rows(table)})
    assert distance(found, native_logits(directory, "f32", PROMPT)) <= 1e-5


@pytest.mark.parametrize(
    "backend",
    [
        lambda spec: CPUBackend(spec, 16, num_threads=1),
        lambda spec: CPUBackend(spec, 16, num_threads=2),
        lambda spec: ReferenceBackend(spec, 16),
    ],
    ids=["cpu, 1 thread", "cpu, 2 threads", "reference"],
)
def test_layer_by_layer_backends_agree(backend, tmp_path):
    """Heads x head_dim is not a whole number of groups, so no pass runs in one call."""
    directory = save_tiny_model("gemma4", tmp_path, head_dim=12, global_head_dim=24)
    runner = NativeRunner.from_dir(directory, weights="f32")
    driver = PagedDriver(runner, backend(runner.info.kv_spec))
    assert runner.moved_keys_refusal is not None
    model = build_tiny_model("gemma4", head_dim=12, global_head_dim=24)
    model.set_attn_implementation("eager")
    found = driver.prefill(driver.open(PROMPT), 23)
    assert distance(found, dense_logits(model, PROMPT)) <= 1e-4
    runner.close()


def test_a_changed_per_layer_table_is_an_error(tmp_path):
    directory = save_tiny_model("gemma4", tmp_path)
    runner = NativeRunner.from_dir(directory, weights="int8")
    driver = driver_of(runner)
    sequence = driver.open(PROMPT)
    driver.step([(sequence, 20)])
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ModelFormatError, match=r"model\.safetensors"):
        driver.step([(sequence, 20)])
    runner.close()


def test_the_per_layer_table_is_not_in_memory(tmp_path):
    large = {"vocab_size_per_layer_input": 50_000}
    small, big = (
        save_tiny_model("gemma4", tmp_path / name, **more)
        for name, more in (("a", {}), ("b", large))
    )
    sizes = []
    for directory in (small, big):
        runner = NativeRunner.from_dir(directory, weights="int8")
        sizes.append(runner.info.weight_bytes)
        runner.close()
    assert abs(sizes[1] - sizes[0]) < 1000
