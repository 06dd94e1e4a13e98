"""transformers as the oracle of the native runner, on the same checkpoint with float32 weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from helpers.distance import distance
from helpers.runners.paged_driver import PagedDriver
from helpers.runners.recurrent_driver import StateDriver
from kvboost_edge.backends.cpu import CPUBackend
from kvboost_edge.runners.native.runner import NativeRunner

NEW_TOKENS = 24


def driver_of(runner: NativeRunner, num_threads: int = 1) -> PagedDriver:
    """Return a driver with 32 blocks, and with state slots if the model is recurrent."""
    slots = 4 if runner.info.kv_spec.states else 0
    backend = CPUBackend(runner.info.kv_spec, 32, num_threads=num_threads, num_state_slots=slots)
    return StateDriver(runner, backend) if slots else PagedDriver(runner, backend)


def assert_native_equals(model: Any, directory: Path) -> None:
    """Assert that the logits of a prompt, computed in pieces, are within 1e-4 of the transformers
    model's, and that the greedy tokens after it are the same.
    """
    model.set_attn_implementation("eager")
    prompt = np.random.default_rng(7).integers(0, 256, 61).tolist()
    with torch.inference_mode():
        whole = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        )[0].tolist()
        expected = model(torch.tensor([whole]), use_cache=False).logits[0].numpy()[: len(prompt)]
    runner = NativeRunner.from_dir(directory, weights="f32")
    driver = driver_of(runner)
    sequence = driver.open(prompt)
    logits = driver.prefill(sequence, 23)
    assert distance(logits, expected) <= 1e-4
    driver.decode([sequence], [logits[-1]], NEW_TOKENS)
    assert sequence.token_ids == whole
    runner.close()
