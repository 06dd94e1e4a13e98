"""A pass that runs out of memory at any allocation leaves the buffers of earlier passes intact."""

import itertools
import weakref

import numpy as np
import pytest

from helpers.models.tiny_models import save_tiny_model
from helpers.runners.paged_driver import PagedDriver
from kvboost_edge.backends.cpu import CPUBackend
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.runners.native.runner import NativeRunner

SMALL, LARGE = (
    [np.random.default_rng(n).integers(0, 256, n).tolist() for n in counts]
    for counts in ((5, 9), (1030,))
)


class Scarce:
    """Wrapper of NumPy's allocating functions that makes one call fail."""

    def __init__(self, patch, fails_at):
        self.left = fails_at
        for name in ("empty", "concatenate"):
            patch.setattr(np, name, self.counted(getattr(np, name)))

    def counted(self, real):
        def take(*arguments, **options):
            self.left -= 1
            if self.left == 0:
                raise MemoryError("the test has no more")
            return real(*arguments, **options)

        return take


def addresses_are_of_what_is_held(buffers):
    found = buffers.addresses(1, 1)
    assert {number: array.ctypes.data for number, array in buffers._arrays.items()} == {
        number: found[number] for number in buffers._arrays
    }
    for index, table in enumerate(buffers._tables):
        at = lt.B_TABLES + 2 * index
        assert (table.cos.ctypes.data, table.sin.ctypes.data) == (found[at], found[at + 1])
        assert len(table.cos) == len(table.sin)
    assert found[-1] == (buffers._query_factors.ctypes.data if buffers._query_factors.size else 0)


def computed(driver, prompts):
    sequences = [driver.open(prompt) for prompt in prompts]
    try:
        return driver.step([(sequence, len(sequence.token_ids)) for sequence in sequences])
    finally:
        for sequence in sequences:
            driver.close(sequence)


@pytest.mark.parametrize("family", ["ministral3", "gemma4-moe", "qwen3_moe"])
def test_a_pass_after_a_memory_error_is_unchanged(family, tmp_path, monkeypatch):
    """The families cover queries with position-dependent factors, two RoPE tables, and the buffers
    of a mixture of experts.
    """
    save_tiny_model(family, tmp_path, max_position_embeddings=4096)
    backend = None
    for fails_at in itertools.count(1):
        runner = NativeRunner.from_dir(tmp_path, weights="int8", num_threads=1)
        backend = backend or CPUBackend(runner.info.kv_spec, 120, num_threads=1)
        driver = PagedDriver(runner, backend)
        before = computed(driver, SMALL)
        with monkeypatch.context() as patch:
            scarce = Scarce(patch, fails_at)
            try:
                large = computed(driver, LARGE)
            except MemoryError:
                large = []
        addresses_are_of_what_is_held(runner._buffers)
        for one, other in zip(computed(driver, SMALL), before, strict=True):
            np.testing.assert_array_equal(one, other)
        runner.close()
        if scarce.left > 0:
            break
    assert len(large) == 1, "the last pass must have enough memory"
    assert fails_at > 12
    backend.close()


def test_close_frees_the_buffers_of_a_runner_that_is_referenced(tmp_path):
    save_tiny_model("llama", tmp_path)
    runner = NativeRunner.from_dir(tmp_path, weights="int8", num_threads=1)
    backend = CPUBackend(runner.info.kv_spec, 8, num_threads=1)
    computed(PagedDriver(runner, backend), SMALL)
    kept = [weakref.ref(array) for array in runner._buffers._arrays.values()]
    assert len(kept) > 3
    backend.close()
    runner.close()
    assert [one() for one in kept] == [None] * len(kept)
