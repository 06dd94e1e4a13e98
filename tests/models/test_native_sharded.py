"""Half-precision checkpoints in several files, as transformers writes them, against transformers on the same values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from kvboost_edge.backends.cpu import CPUBackend
from kvboost_edge.runners.native.runner import NativeRunner
from paged_driver import PagedDriver
from tiny_models import build_tiny_model, save_tokenizer

NEW_TOKENS = 24


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads only slow down work this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _save(family: str, dtype: torch.dtype, directory: Path) -> None:
    """At least three files, with a layer that is in more than one."""
    build_tiny_model(family).to(dtype).save_pretrained(directory, max_shard_size="60KB")
    save_tokenizer(directory)
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    shards = {path.name for path in directory.glob("*.safetensors")}
    assert set(index.values()) == shards
    assert len(shards) >= 3
    assert any(len({index[name] for name in index if f".layers.{layer}." in name}) > 1 for layer in range(3))
    stored = {"torch.bfloat16": "BF16", "torch.float16": "F16"}[str(dtype)]
    for shard in shards:
        with safe_open(directory / shard, "np") as file:
            assert {file.get_slice(name).get_dtype() for name in file.keys()} == {stored}  # noqa: SIM118


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
def test_shards_equal_transformers(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    _save(family, dtype, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    prompt = np.random.default_rng(7).integers(0, 256, 61).tolist()
    with torch.inference_mode():
        whole = model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None,
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        )[0].tolist()  # fmt: skip
        expected = model(torch.tensor([prompt]), use_cache=False).logits[0].numpy()
    runner = NativeRunner.from_dir(tmp_path, weights="f32")
    driver = PagedDriver(runner, CPUBackend(runner.info.kv_spec, 32, num_threads=1))
    sequence = driver.open(prompt)
    logits = driver.prefill(sequence, 23)
    assert np.linalg.norm(logits - expected) <= 1e-4 * np.linalg.norm(expected)
    driver.decode([sequence], [logits[-1]], NEW_TOKENS)
    assert sequence.token_ids == whole
    runner.close()
