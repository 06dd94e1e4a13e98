"""Sharded half-precision checkpoints, as transformers writes them, against transformers on the same
values.
"""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from helpers.models.tiny_models import build_tiny_model, save_tokenizer
from helpers.oracles.transformers_logits import assert_native_equals

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def _save(family, dtype, directory):
    """Save a model as at least three files, with a layer that is in more than one."""
    build_tiny_model(family).to(dtype).save_pretrained(directory, max_shard_size="60KB")
    save_tokenizer(directory)
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    shards = {path.name for path in directory.glob("*.safetensors")}
    assert set(index.values()) == shards
    assert len(shards) >= 3
    assert any(
        len({index[name] for name in index if f".layers.{layer}." in name}) > 1
        for layer in range(3)
    )
    stored = {"torch.bfloat16": "BF16", "torch.float16": "F16"}[str(dtype)]
    for shard in shards:
        with safe_open(directory / shard, "np") as file:
            assert {file.get_slice(name).get_dtype() for name in file.keys()} == {stored}  # noqa: SIM118


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
def test_sharded_checkpoints_equal_transformers(family, dtype, tmp_path):
    _save(family, dtype, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_native_equals(model.eval(), tmp_path)
