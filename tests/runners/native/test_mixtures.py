"""Mixtures of experts on the native runner: passes layer by layer equal those in one call."""

import pytest

from helpers.distance import distance
from helpers.models.gpt_oss_files import save_gpt_oss
from helpers.models.tiny_checkpoints import save_tiny_checkpoint
from helpers.random_ids import random_ids
from helpers.runners.paged_driver import PagedDriver
from kvboost_edge.backends.cpu import CPUBackend
from kvboost_edge.backends.reference import ReferenceBackend
from kvboost_edge.runners.native.runner import NativeRunner

PROMPT = random_ids(90, 0)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_mixtures_agree_on_the_reference_backend(kind, tmp_path):
    """Layer-by-layer passes use the same expert operations as a pass in one call."""
    directory = (
        save_gpt_oss(tmp_path)
        if kind == "gpt_oss"
        else save_tiny_checkpoint(kind, tmp_path, hidden_size=80)
    )
    runner = NativeRunner.from_dir(directory, weights="f32")
    found = []
    for backend in (
        CPUBackend(runner.info.kv_spec, 16, num_threads=1),
        ReferenceBackend(runner.info.kv_spec, 16),
    ):
        driver = PagedDriver(runner, backend)
        found.append(driver.prefill(driver.open(PROMPT)))
    runner.close()
    assert distance(found[1], found[0]) <= 1e-5
