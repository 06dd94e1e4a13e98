"""Layers with shapes of their own that share keys and values: equal to the bit, however few rows go on to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.numpy import load_file, save_file

from helpers.engine.native_bench import Bits
from helpers.gguf.writer import write_gguf
from helpers.models.tiny_models import build_tiny_model, save_tiny_model
from helpers.oracles.bit_cases import BLOCK, TwiceThreaded, assert_same_behind_a_prefix, same
from helpers.runners.paged_driver import PagedDriver
from kvboost_edge.backends.base import Backend, KVSpec, LayerKVSpec
from kvboost_edge.backends.cpu import CPUBackend
from kvboost_edge.backends.reference import ReferenceBackend
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.runners.native.runner import NativeRunner

LENGTHS = (90, 1, 40, 600)  # past the windows of 24, and past attention's first partition of 512 tokens
PROMPTS = [np.random.default_rng(seed).integers(0, 256, length).tolist() for seed, length in enumerate(LENGTHS)]
WIDTHS: tuple[Bits, ...] = ((16, 16), (8, 8), (4, 4))
# In the last one layers of both kinds have one shape, and so could have their open blocks in one place.
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "gemma4": ("gemma4", {}),
    "gemma4-wide": ("gemma4-wide", {}),
    "gemma4-alike": ("gemma4", {"global_head_dim": 32}),
    "gemma4-experts": ("gemma4", {"enable_moe_block": True, "num_experts": 12, "top_k_experts": 3,
                                  "moe_intermediate_size": 64}),
}  # fmt: skip
Logits = npt.NDArray[np.float32]


@pytest.fixture(scope="module", params=[(name, bits) for name in MODELS for bits in WIDTHS], ids=str)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwiceThreaded]:
    (family, overrides), bits = MODELS[request.param[0]], request.param[1]
    directory = save_tiny_model(family, tmp_path_factory.mktemp("gemma4"), max_position_embeddings=1024, **overrides)
    model = TwiceThreaded(directory, "int8", PROMPTS, 96, kv_bits=bits)
    yield model
    model.close()


@pytest.mark.parametrize(
    "rows", [[], [89], [0], [0, 1, 2, 30, 31, 88, 89], [15, 16, 17, 47], [*range(10, 89)]], ids=str
)
@pytest.mark.parametrize("threads", [1, 2])
def test_only_the_wanted_rows(model: TwiceThreaded, rows: list[int], threads: int) -> None:
    driver = model.driver(threads)
    sequence = driver.open(PROMPTS[0])
    logits, _ = driver.step_for([(sequence, 90)], rows)
    assert same(logits, model.cold[0][rows])
    sequence.token_ids.append(7)
    after = driver.step([(sequence, 1)])[0]
    whole = model.driver()
    assert same(after, whole.prefill(whole.open([*PROMPTS[0], 7]))[-1:])


@pytest.mark.parametrize("threads", [1, 2])
def test_the_last_rows_of_a_batch_in_pieces(model: TwiceThreaded, threads: int) -> None:
    """Pieces of different lengths of four prompts in each pass; one that ends its prompt wants its last row."""
    driver = model.driver(threads)
    sequences = [driver.open(prompt) for prompt in PROMPTS]
    found: dict[int, Logits] = {}
    for piece in (37, 1, 70, 500):
        work = [(one, min(piece + index, one.num_left)) for index, one in enumerate(sequences) if one.num_left]
        ends = np.cumsum([count for _, count in work])
        last = [int(end) - 1 for end, (one, count) in zip(ends, work, strict=True) if count == one.num_left]
        which = [sequences.index(one) for one, count in work if count == one.num_left]
        logits, _ = driver.step_for(work, last)
        found.update(zip(which, logits, strict=True))
    assert sorted(found) == [0, 1, 2, 3]
    for index, row in found.items():
        assert same(row, model.cold[index][-1])


def test_states_beside_logits(model: TwiceThreaded) -> None:
    driver = model.driver(2)
    work = [(driver.open(PROMPTS[0]), 90), (driver.open(PROMPTS[2]), 40)]
    logits, states = driver.step_for(work, [5, 89], [100, 129])
    assert same(logits, model.cold[0][[5, 89]])
    alone = model.driver()
    _, expected = alone.step_for([(alone.open(PROMPTS[2]), 40)], [], [10, 39])
    assert same(states, expected)


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
@pytest.mark.parametrize("threads", [1, 2])
def test_any_chunking(model: TwiceThreaded, chunk: int, threads: int) -> None:
    driver = model.driver(threads)
    assert same(driver.prefill(driver.open(PROMPTS[0]), chunk), model.cold[0])


@pytest.mark.parametrize("cut", [1, BLOCK - 1, BLOCK, 2 * BLOCK, 41, 89])
def test_prefix_hit(model: TwiceThreaded, cut: int) -> None:
    assert_same_behind_a_prefix(model, cut)


def test_a_fork_inside_a_block(model: TwiceThreaded) -> None:
    driver = model.driver(2)
    parent = driver.open(PROMPTS[0][:37])
    driver.prefill(parent)
    child = driver.fork(parent)
    parent.token_ids += PROMPTS[2]
    child.token_ids += PROMPTS[0][37:]
    _, logits = driver.step([(parent, 20), (child, 53)])
    assert same(logits, model.cold[0][37:])


def test_recomputed_after_it_was_dropped(model: TwiceThreaded) -> None:
    driver = model.driver()
    sequence = driver.open(PROMPTS[0])
    driver.step_for([(sequence, 50)], [])
    driver.close(sequence)
    driver.manager.reset()
    assert same(driver.prefill(driver.open(PROMPTS[0]), 29), model.cold[0])


def test_only_layers_that_compute_keys_and_values_store_them(tmp_path: Path) -> None:
    runner = NativeRunner.from_dir(save_tiny_model("gemma4", tmp_path), weights="int8")
    sliding, full = (2, 32), (2, 64)
    stored = [LayerKVSpec(*sliding), LayerKVSpec(*sliding), LayerKVSpec(*full)]
    assert list(runner.info.kv_spec.layers) == [*stored, LayerKVSpec(*sliding, 4), LayerKVSpec(*full, 5)]
    runner.close()


def test_a_file_without_the_table_of_tokens_is_refused(tmp_path: Path) -> None:
    path = save_tiny_model("gemma4", tmp_path) / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.embed_tokens_per_layer.weight"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelFormatError, match=r"lack tensor 'model\.embed_tokens_per_layer\.weight'"):
        NativeRunner.from_dir(tmp_path, weights="int8")


def _logits(model: Path, weights: str) -> Logits:
    runner = NativeRunner.from_dir(model, weights=weights)
    driver = PagedDriver(runner, CPUBackend(runner.info.kv_spec, 16, num_threads=1))
    found = driver.prefill(driver.open(PROMPTS[0]))
    runner.close()
    return found


@pytest.mark.parametrize(("name", "shared"), [("gemma4", 2), ("gemma4-wide", 0)])
@pytest.mark.parametrize(("kind", "limit"), [("F32", 1e-5), ("Q8_0", 0.1)])
def test_a_gguf_file_is_the_model_it_was_written_of(
    name: str, shared: int, kind: str, limit: float, tmp_path: Path
) -> None:
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
    directory = save_tiny_model(name, tmp_path / "hf", **layers, num_kv_shared_layers=shared)
    path = write_gguf(directory, tmp_path / "m.gguf", kind=kind)
    expected = _logits(directory, "f32")
    found = _logits(path, "f32" if kind == "F32" else "auto")
    assert np.linalg.norm(found - expected) <= limit * np.linalg.norm(expected)


@pytest.mark.parametrize(
    "backend",
    [
        lambda spec: CPUBackend(spec, 16, num_threads=1),
        lambda spec: CPUBackend(spec, 16, num_threads=2),
        lambda spec: ReferenceBackend(spec, 16),
    ],
    ids=["cpu, 1 thread", "cpu, 2 threads", "reference"],
)
def test_backends_with_layers_one_by_one_agree(backend: Callable[[KVSpec], Backend], tmp_path: Path) -> None:
    """The reference backend, and half as many heads x head_dim as a group has, where no pass is one call."""
    directory = save_tiny_model("gemma4", tmp_path, head_dim=12, global_head_dim=24)
    runner = NativeRunner.from_dir(directory, weights="f32")
    driver = PagedDriver(runner, backend(runner.info.kv_spec))
    assert runner.moved_keys_refusal is not None
    model = build_tiny_model("gemma4", head_dim=12, global_head_dim=24)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPTS[0]]), use_cache=False).logits[0].numpy()
    found = driver.prefill(driver.open(PROMPTS[0]), 23)
    assert np.linalg.norm(found - expected) <= 1e-4 * np.linalg.norm(expected)
    runner.close()


def test_a_table_that_changes_under_the_runner_is_an_error(tmp_path: Path) -> None:
    directory = save_tiny_model("gemma4", tmp_path)
    runner = NativeRunner.from_dir(directory, weights="int8")
    driver = PagedDriver(runner, CPUBackend(runner.info.kv_spec, 16, num_threads=1))
    sequence = driver.open(PROMPTS[0])
    driver.step([(sequence, 20)])
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ModelFormatError, match=r"model\.safetensors"):
        driver.step([(sequence, 20)])
    runner.close()


def test_weights_in_memory_are_without_the_table(tmp_path: Path) -> None:
    large = {"vocab_size_per_layer_input": 50_000}
    small, big = (save_tiny_model("gemma4", tmp_path / name, **more) for name, more in (("a", {}), ("b", large)))
    sizes = []
    for directory in (small, big):
        runner = NativeRunner.from_dir(directory, weights="int8")
        sizes.append(runner.info.weight_bytes)
        runner.close()
    assert abs(sizes[1] - sizes[0]) < 1000
