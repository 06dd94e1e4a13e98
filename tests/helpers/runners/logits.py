"""Logits of a whole prompt, by transformers and by the native runner in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from helpers.oracles.transformers_logits import driver_of
from kvboost_edge.runners.native.runner import NativeRunner


@torch.inference_mode()
def dense_logits(model: Any, token_ids: Sequence[int]) -> npt.NDArray[np.floating]:
    """Compute the logits [tokens, vocabulary] with a transformers model."""
    return model(torch.tensor([token_ids]), use_cache=False).logits[0].numpy()


def native_logits(
    path: Path, weights: str, prompt: Sequence[int], chunk: int = 23
) -> npt.NDArray[np.float32]:
    """Compute the logits with the native runner, `chunk` tokens per pass."""
    runner = NativeRunner.from_dir(path, weights=weights)
    driver = driver_of(runner)
    logits = np.array(driver.prefill(driver.open(prompt), chunk))
    runner.close()
    return logits
