"""The torch runner on 8-bit pools: close to its own 16-bit results, equal text warm and cold, and
refusals by name.
"""

import numpy as np
import pytest
import torch

from helpers.distance import distance
from helpers.models.tiny_models import build_tiny_model
from helpers.runners.paged_driver import PagedDriver
from kvboost_edge import CPUPagedEngine
from kvboost_edge.backends.select import choose_backend, make_backend
from kvboost_edge.errors import ConfigError
from kvboost_edge.runners.torch.runner import TorchRunner

pytestmark = pytest.mark.usefixtures("one_torch_thread")

TOKENS = np.random.default_rng(5).integers(0, 256, 70)
OPTIONS = {"runner": "torch", "kv_cache_bits": 8, "num_blocks": 64, "debug_checks": True}


@pytest.mark.parametrize("backend", ["torch", "cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_are_close_to_those_of_a_dense_cache(backend, dtype):
    runner = TorchRunner(build_tiny_model("llama").to(dtype), kv_bits=(8, 8))
    assert (runner.info.kv_spec.dtype, runner.info.kv_spec.bits) == ("float16", (8, 8))
    driver = PagedDriver(
        runner, make_backend(choose_backend(backend), runner.info.kv_spec, 16, num_threads=1)
    )
    paged = driver.prefill(driver.open(TOKENS.tolist()), 33)
    eager = runner.eager_logits(TOKENS)
    driver.backend.close()
    assert distance(paged, eager) <= 0.04
    if dtype == torch.float32:
        assert distance(paged, eager) >= 1e-5, "the cache must be quantized"


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_warm_and_cold_text_is_equal(backend, tiny_model_dir):
    with CPUPagedEngine.from_pretrained(str(tiny_model_dir), backend=backend, **OPTIONS) as engine:
        prompt = list(range(5, 75))
        cold, warm = (engine.generate(prompt, max_new_tokens=20) for _ in range(2))
        assert cold.output_token_ids == warm.output_token_ids
        assert warm.cached_tokens == 64
        spec = engine.runner_info.kv_spec
        stats = engine.paged_stats()
        assert (
            stats["pool_bytes"]
            >= 64 * spec.bytes_per_block + (stats["max_num_seqs"] + 1) * spec.bytes_per_open_block
        )
        assert stats["used_blocks"] == 0


def test_a_loaded_model_supports_only_8_bits():
    with pytest.raises(ConfigError, match="kv_cache_bits=4 is not supported"):
        CPUPagedEngine(build_tiny_model("llama"), None, kv_cache_bits=4)
