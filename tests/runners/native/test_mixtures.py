"""Mixtures of experts: a token's logits are equal to the bit however it came to be computed, in every form of weights,
and none but its own tokens' experts count."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from helpers.models.gpt_oss_files import save_gpt_oss
from helpers.models.tiny_checkpoints import save_tiny_checkpoint
from helpers.oracles.bit_cases import (
    PROMPTS,
    TwiceThreaded,
    assert_same_behind_a_prefix,
    assert_same_beside_decode,
    assert_same_in_a_batch,
    assert_same_when_computed_again,
    same,
)
from helpers.runners.paged_driver import PagedDriver
from kvboost_edge import CPUPagedEngine
from kvboost_edge.backends.cpu import CPUBackend
from kvboost_edge.backends.reference import ReferenceBackend
from kvboost_edge.errors import KVBoostError
from kvboost_edge.runners.native.runner import NativeRunner

# GGUF types -> what their tensors become; widths of 256 for those in blocks.
STORED = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4")
# Biases of experts, windows and sinks: its directories as floats and as MXFP4, with floats in the pool or codes.
GPT_OSS = {
    "gpt-oss int4": "int4", "gpt-oss int8": "int8", "gpt-oss f32": "f32", "gpt-oss codes MXFP4": "auto",
    "gpt-oss MXFP4": "auto",
}  # fmt: skip
# Experts beside MLPs: a directory, and a GGUF file of it.
GEMMA4 = {"gemma4 int4": "int4", "gemma4 f32": "f32", "gemma4 Q8_0": "auto"}
FORMATS = {**{name: name for name in ("int4", "int4-asym", "int8", "bf16", "f32")}, **dict.fromkeys(STORED, "auto")}


def _save(name: str, directory: Path) -> Path:
    """A directory, or a GGUF file of one. Rows that are no multiple of 32 where the form allows it."""
    if name in GPT_OSS:
        return save_gpt_oss(directory, mxfp4=name.endswith("MXFP4"))
    if name not in STORED and name not in GEMMA4:
        return save_tiny_checkpoint("qwen3_moe", directory, hidden_size=80, num_hidden_layers=2)
    from helpers.gguf.writer import write_gguf
    from helpers.models.tiny_models import save_tiny_model

    if name in GEMMA4:
        model, kind = save_tiny_model("gemma4-moe", directory / "model"), name.removeprefix("gemma4 ")
        return write_gguf(model, directory / "m.gguf", kind=kind) if kind in STORED else model
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 6, "num_experts_per_tok": 2}
    (directory / "model").mkdir()
    model = save_tiny_checkpoint("qwen3_moe", directory / "model", num_hidden_layers=2, **sizes)
    return write_gguf(model, directory / "m.gguf", kind=name)


@pytest.fixture(scope="module", params=[*FORMATS, *GPT_OSS, *GEMMA4])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwiceThreaded]:
    if request.param in STORED or request.param in GEMMA4:
        pytest.importorskip("gguf")
        pytest.importorskip("torch")
    path = _save(request.param, tmp_path_factory.mktemp("mixture"))
    weights = {**FORMATS, **GPT_OSS, **GEMMA4}[request.param]
    model = TwiceThreaded(path, weights, kv_bits=(8, 4) if "codes" in request.param else (16, 16))
    yield model
    model.close()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("chunk", [1, 7, 31])
def test_any_chunking(model: TwiceThreaded, chunk: int, threads: int) -> None:
    driver = model.driver(threads)
    assert same(driver.prefill(driver.open(PROMPTS[0]), chunk), model.cold[0])


@pytest.mark.parametrize("threads", [1, 2])
def test_in_a_batch(model: TwiceThreaded, threads: int) -> None:
    assert_same_in_a_batch(model, threads)


def test_prefill_beside_decode(model: TwiceThreaded) -> None:
    assert_same_beside_decode(model, 2)


@pytest.mark.parametrize("cut", [0, 16, 48, 89])
def test_prefix_hit(model: TwiceThreaded, cut: int) -> None:
    assert_same_behind_a_prefix(model, cut)


def test_recomputed_after_it_was_dropped(model: TwiceThreaded) -> None:
    assert_same_when_computed_again(model)


@pytest.mark.parametrize("name", ["f32", "gpt-oss f32"])
def test_layer_by_layer_on_the_reference_backend(name: str, tmp_path: Path) -> None:
    """A pass that is no single call has the same operations of experts."""
    runner = NativeRunner.from_dir(_save(name, tmp_path), weights="f32")
    found = []
    for backend in (CPUBackend(runner.info.kv_spec, 16, num_threads=1), ReferenceBackend(runner.info.kv_spec, 16)):
        driver = PagedDriver(runner, backend)
        found.append(driver.prefill(driver.open(PROMPTS[0])))
    runner.close()
    assert np.linalg.norm(found[0] - found[1]) <= 1e-5 * np.linalg.norm(found[0])


BAD = 250  # a token whose router finds no number


def _with_a_broken_router(directory: Path) -> Path:
    """Channels 0 and 1 are those of the embedding in every layer, 0 but in token BAD; there they make the first
    layer's router infinity less infinity. No weight is anything but finite."""
    model = save_tiny_checkpoint("qwen3_moe", directory, num_hidden_layers=2)
    tensors = load_file(model / "model.safetensors")
    for name, values in tensors.items():
        if name.endswith("embed_tokens.weight"):
            values[:, :2] = 0
            values[BAD, :2] = 3
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            values[:2] = 0
        elif name.endswith("layers.0.mlp.gate.weight"):
            values[4, 0], values[4, 1] = 3e38, -3e38
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return model


@pytest.mark.parametrize("weights", ["f32", "int8"])
def test_a_router_that_gives_nan_ends_its_request_alone(weights: str, tmp_path: Path) -> None:
    """The others get what they get alone, in the same passes; a later request finds nothing of it in the cache."""
    options = {"max_new_tokens": 8, "ignore_eos": True, "logit_bias": {BAD: -1e4}}
    prompts = [[7, 9, 30], [7, 9, BAD, 31, 8], list(range(40)), [7, 9, BAD]]
    with CPUPagedEngine.from_pretrained(
        _with_a_broken_router(tmp_path), weights=weights, num_blocks=64, num_threads=2
    ) as engine:
        alone = [engine.generate(prompt, **options).output_token_ids for prompt in prompts[::2]]
        engine.reset_cache()
        handles = [engine.submit(prompt, **options) for prompt in prompts]
        for handle in handles[1::2]:
            with pytest.raises(KVBoostError, match="NaN"):
                handle.result()
        assert [handle.result().output_token_ids for handle in handles[::2]] == alone
        again = engine.generate(prompts[2], **options)
        assert (again.output_token_ids, again.cached_tokens) == (alone[1], 32)
        with pytest.raises(KVBoostError, match="NaN"):
            engine.generate(prompts[1], **options)
