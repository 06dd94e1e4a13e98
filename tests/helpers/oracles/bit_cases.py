"""Logits of a file in float32 and in its own formats, where pass sizes must not matter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from helpers.runners.paged_driver import PagedDriver
from kvboost_edge.backends.cpu import CPUBackend
from kvboost_edge.runners.native.runner import NativeRunner

Logits = npt.NDArray[np.float32]
PROMPT = np.random.default_rng(7).integers(0, 256, 61).tolist()


def native_logits(
    path: Path, weights: str = "f32", *, chunk: int = 23, num_threads: int = 1
) -> Logits:
    """Compute the logits of PROMPT with the native runner."""
    runner = NativeRunner.from_dir(path, weights=weights, num_threads=num_threads)
    driver = PagedDriver(runner, CPUBackend(runner.info.kv_spec, 32, num_threads=num_threads))
    logits = np.array(driver.prefill(driver.open(PROMPT), chunk))
    runner.close()
    return logits


def logits_in_any_pass(path: Path) -> tuple[Logits, Logits]:
    """Return the logits in the file's own formats and in float32. In its own formats, the last row
    must be identical for passes of any size.
    """
    found = native_logits(path, "auto", chunk=len(PROMPT))
    for chunk, num_threads in ((len(PROMPT), 2), (7, 2), (1, 1)):
        other = native_logits(path, "auto", chunk=chunk, num_threads=num_threads)
        np.testing.assert_array_equal(other[-1], found[-1])
    return found, native_logits(path, chunk=len(PROMPT))
