"""A model whose logits must be equal to the bit, however a token came to be computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.backends.cpu import CPUBackend
from kvboost_edge.runners.native.runner import NativeRunner
from paged_driver import PagedDriver

PROMPTS = [np.random.default_rng(seed).integers(0, 256, length).tolist() for seed, length in enumerate((90, 1, 40, 17))]
Logits = npt.NDArray[np.float32]


class TwiceThreaded:
    """Runners of one and two threads, and the logits of each of PROMPTS computed alone in one pass."""

    def __init__(self, path: Path, weights: str, **options: Any) -> None:
        self.runners = [
            NativeRunner.from_dir(path, weights=weights, num_threads=threads, **options) for threads in (1, 2)
        ]
        self.cold = []
        for prompt in PROMPTS:
            driver = self.driver()
            self.cold.append(driver.prefill(driver.open(prompt)))

    def driver(self, threads: int = 1) -> PagedDriver:
        runner = self.runners[threads - 1]
        return PagedDriver(runner, CPUBackend(runner.info.kv_spec, 64, num_threads=threads))

    def close(self) -> None:
        for runner in self.runners:
            runner.close()


def same(actual: Logits, expected: Logits) -> bool:
    """Equal in shape and value."""
    return actual.shape == expected.shape and bool((actual == expected).all())
