"""A model whose logits must be equal to the bit, however a token came to be computed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from helpers.runners.paged_driver import PagedDriver
from kvboost_edge.backends.cpu import CPUBackend
from kvboost_edge.runners.native.runner import NativeRunner

PROMPTS = [np.random.default_rng(seed).integers(0, 256, length).tolist() for seed, length in enumerate((90, 1, 40, 17))]
Logits = npt.NDArray[np.float32]
BLOCK = 16


class TwiceThreaded:
    """Runners of one and two threads, and the logits of each prompt computed alone in one pass, all rows of it."""

    def __init__(
        self, path: Path, weights: str, prompts: Sequence[list[int]] = PROMPTS, num_blocks: int = 64, **options: Any
    ) -> None:
        self.prompts, self.num_blocks = prompts, num_blocks
        self.runners = [
            NativeRunner.from_dir(path, weights=weights, num_threads=threads, **options) for threads in (1, 2)
        ]
        self.cold = []
        for prompt in prompts:
            driver = self.driver()
            self.cold.append(driver.prefill(driver.open(prompt)))

    def driver(self, threads: int = 1) -> PagedDriver:
        runner = self.runners[threads - 1]
        return PagedDriver(runner, CPUBackend(runner.info.kv_spec, self.num_blocks, num_threads=threads))

    def close(self) -> None:
        for runner in self.runners:
            runner.close()


def logits_in_any_pass(path: Path) -> tuple[Logits, Logits]:
    """Of a prompt in the file's own formats, at once and in pieces, all with the same last row; and in float32."""
    prompt = np.random.default_rng(7).integers(0, 256, 45).tolist()
    found = []
    for weights, chunk, threads in (("auto", 45, 1), ("auto", 45, 2), ("auto", 7, 2), ("auto", 1, 1), ("f32", 45, 1)):
        runner = NativeRunner.from_dir(path, weights=weights, num_threads=threads)
        driver = PagedDriver(runner, CPUBackend(runner.info.kv_spec, 32, num_threads=threads))
        found.append(np.array(driver.prefill(driver.open(prompt), chunk)))
        runner.close()
    for other in found[1:4]:
        np.testing.assert_array_equal(other[-1], found[0][-1])
    return found[0], found[4]


def same(actual: Logits, expected: Logits) -> bool:
    """Equal in shape and value, and finite."""
    return bool(np.isfinite(expected).all()) and np.array_equal(actual, expected)


def assert_same_in_a_batch(model: TwiceThreaded, threads: int) -> None:
    driver = model.driver(threads)
    sequences = [driver.open(prompt) for prompt in model.prompts]
    for part, expected in zip(driver.step([(s, s.num_left) for s in sequences]), model.cold, strict=True):
        assert same(part, expected)


def assert_same_beside_decode(model: TwiceThreaded, threads: int) -> None:
    driver = model.driver(threads)
    running, late = driver.open(model.prompts[2]), driver.open(model.prompts[0])
    driver.step([(running, 20)])
    for start in range(0, 90, 6):
        decoded, prefilled = driver.step([(running, 1), (late, 6)])
        assert same(decoded, model.cold[2][running.table.num_computed_tokens - 1 :][:1])
        assert same(prefilled, model.cold[0][start : start + 6])


def assert_same_behind_a_prefix(model: TwiceThreaded, cut: int) -> None:
    """Of which the first `cut` tokens are those of another sequence."""
    driver, prompt = model.driver(), model.prompts[0]
    first = driver.open([*prompt[:cut], *[299] * 20])
    driver.prefill(first)
    driver.close(first)
    again = driver.open(prompt)
    assert again.table.num_cached_tokens == cut // BLOCK * BLOCK
    assert same(driver.prefill(again), model.cold[0][again.table.num_cached_tokens :])


def assert_same_when_computed_again(model: TwiceThreaded) -> None:
    driver = model.driver()
    sequence = driver.open(model.prompts[0])
    driver.step([(sequence, 50)])
    driver.close(sequence)
    driver.manager.reset()
    again = driver.open(model.prompts[0])
    assert again.table.num_cached_tokens == 0
    assert same(driver.prefill(again, 29), model.cold[0])
