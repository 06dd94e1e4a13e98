"""Logits of a file in its own formats, which passes of any size have, and in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from helpers.runners.paged_driver import PagedDriver
from kvboost_edge.backends.cpu import CPUBackend
from kvboost_edge.runners.native.runner import NativeRunner

Logits = npt.NDArray[np.float32]


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
