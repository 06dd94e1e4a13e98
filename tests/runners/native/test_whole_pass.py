"""A pass in one kernel call gives the same bits as layer-by-layer calls, which other tests compare
with references.
"""

import dataclasses
import threading

import numpy as np
import pytest

from helpers.models.tiny_models import save_tiny_model
from helpers.runners.paged_driver import PagedDriver
from kvboost_edge import CPUPagedEngine
from kvboost_edge.backends.cpu import CPUBackend
from kvboost_edge.backends.reference import ReferenceBackend
from kvboost_edge.runners.native.runner import NativeRunner
from kvboost_edge.runners.native.whole_pass import WholePass

STEPS = 10  # during these steps, each sequence fills a block that an earlier pass began
PROMPTS = [
    np.random.default_rng(seed).integers(0, 256, length).tolist()
    for seed, length in enumerate((700, 40, 10))
]


class LayerByLayer(CPUBackend):
    """A backend that hides its kernels from runners, so that no pass runs in one call."""

    kernel_access = None


# In the last one, layers of both kinds have one shape, so their open blocks could be confused.
MODELS = {
    **{name: (name, {}) for name in ("llama", "gemma2", "mistral", "gemma4", "gemma4-wide")},
    "gemma4-alike": ("gemma4", {"global_head_dim": 32}),
}


@pytest.fixture(scope="module", params=MODELS)
def model_dir(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    family, overrides = MODELS[request.param]
    save_tiny_model(family, directory, **overrides)
    return directory


class InCalls(NativeRunner):
    """A runner that checks between the layers of a pass whether it was aborted."""

    def forward(self, batch):
        return super().forward(dataclasses.replace(batch, is_abandoned=lambda: False))


def _logits(directory, backend_type, threads, bits, kind=NativeRunner):
    """Return all logits of a prefill in chunks, followed by decode steps of three sequences
    together.
    """
    runner = kind.from_dir(directory, weights="int8", num_threads=threads, kv_bits=bits)
    backend = backend_type(runner.info.kv_spec, 64, num_threads=threads)
    driver = PagedDriver(runner, backend)
    results = []
    for prompt in PROMPTS:
        results.append(driver.prefill(driver.open(prompt), 300))
    sequences = list(driver.live)
    for _ in range(STEPS):
        for sequence in sequences:
            sequence.token_ids.append(7)
        results += driver.step([(sequence, 1) for sequence in sequences])
    runner.close()
    backend.close()
    return results


@pytest.mark.parametrize("bits", [(16, 16), (8, 8), (4, 4), (8, 4)])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.some(3)
def test_whole_passes_equal_layer_by_layer(model_dir, threads, bits):
    whole = _logits(model_dir, CPUBackend, threads, bits)
    apart = _logits(model_dir, LayerByLayer, 1, bits)
    assert len(whole) == len(apart) == 3 * (1 + STEPS)
    for one, other in zip(whole, apart, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("seconds", [0.0, 0.002])
@pytest.mark.some(3)
def test_passes_split_into_calls_are_equal(model_dir, monkeypatch, seconds):
    monkeypatch.setattr("kvboost_edge.runners.native.runner._CALL_SECONDS", seconds)
    whole = _logits(model_dir, CPUBackend, 2, (8, 8))
    calls = _logits(model_dir, CPUBackend, 2, (8, 8), InCalls)
    for one, other in zip(whole, calls, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_an_aborted_pass_ends_between_two_layers(tmp_path, monkeypatch, family):
    """A request cancelled during its prefill ends between two layers. The blocks of earlier steps
    remain cached.
    """
    monkeypatch.setattr("kvboost_edge.runners.native.runner._CALL_SECONDS", 0.0)
    save_tiny_model(family, tmp_path)
    prompt = np.random.default_rng(1).integers(0, 256, 200).tolist()
    with CPUPagedEngine.from_pretrained(
        tmp_path, runner="native", num_blocks=64, max_batch_tokens=64, kv_cache_bits=8
    ) as engine:
        expected = engine.generate(prompt, max_new_tokens=3).output_token_ids
        engine.reset_cache()
        runner = engine._parts.runner
        forward = runner.forward
        passes = []

        def cancelling(batch):
            passes.append(batch)

            def is_abandoned():
                if len(passes) == 2:
                    handle.cancel()
                return batch.is_abandoned()

            go.wait(20)
            return forward(dataclasses.replace(batch, is_abandoned=is_abandoned))

        go = threading.Event()
        monkeypatch.setattr(runner, "forward", cancelling)
        handle = engine.submit(prompt, max_new_tokens=3)
        go.set()
        assert handle.result(20).finish_reason == "cancelled"
        assert len(passes) == 2
        monkeypatch.setattr(runner, "forward", forward)
        again = engine.generate(prompt, max_new_tokens=3)
        assert again.output_token_ids == expected
        if family == "llama":
            assert again.cached_tokens == 64, "the blocks of the first step must be cached"


def test_only_the_compiled_backend_runs_whole_passes(tmp_path):
    save_tiny_model("llama", tmp_path)
    for bits in ((16, 16), (8, 8)):
        runner = NativeRunner.from_dir(tmp_path, weights="int8", kv_bits=bits)
        spec = runner.info.kv_spec
        params = runner._params
        kv = range(len(params))
        assert WholePass.of(CPUBackend(spec, 4, num_threads=1), params, kv) is not None
        assert WholePass.of(LayerByLayer(spec, 4, num_threads=1), params, kv) is None
        assert WholePass.of(ReferenceBackend(spec, 4), params, kv) is None
        runner.close()
