"""Mixtures of experts on the native runner: other backends, and routers that give no number."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from helpers.models.gpt_oss_files import save_gpt_oss
from helpers.models.tiny_checkpoints import save_tiny_checkpoint
from helpers.runners.paged_driver import PagedDriver
from kvboost_edge import CPUPagedEngine
from kvboost_edge.backends.cpu import CPUBackend
from kvboost_edge.backends.reference import ReferenceBackend
from kvboost_edge.errors import KVBoostError
from kvboost_edge.runners.native.runner import NativeRunner

PROMPT = np.random.default_rng(0).integers(0, 256, 90).tolist()


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_layer_by_layer_on_the_reference_backend(kind, tmp_path):
    """A pass that is no single call has the same operations of experts."""
    directory = save_gpt_oss(tmp_path) if kind == "gpt_oss" else save_tiny_checkpoint(kind, tmp_path, hidden_size=80)
    runner = NativeRunner.from_dir(directory, weights="f32")
    found = []
    for backend in (CPUBackend(runner.info.kv_spec, 16, num_threads=1), ReferenceBackend(runner.info.kv_spec, 16)):
        driver = PagedDriver(runner, backend)
        found.append(driver.prefill(driver.open(PROMPT)))
    runner.close()
    assert np.linalg.norm(found[0] - found[1]) <= 1e-5 * np.linalg.norm(found[0])


BAD = 250  # a token whose router finds no number


def _with_a_broken_router(directory):
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
def test_a_router_that_gives_nan_ends_its_request_alone(weights, tmp_path):
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
