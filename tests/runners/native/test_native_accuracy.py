"""Quantized runs against float64 arithmetic on the very same quantized weights: what int8 activations cost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvboost_edge.backends.cpu import CPUBackend
from kvboost_edge.kernels.quant_weights import KINDS, pack_rows
from kvboost_edge.kernels.reference_quant import unpack_rows
from kvboost_edge.runners.native.runner import NativeRunner
from paged_driver import PagedDriver
from tiny_models import build_tiny_model, save_tiny_model


def _as_quantized(weight: npt.NDArray[np.float32], kind: str) -> npt.NDArray[np.float64]:
    """The values that the packed form of a matrix stands for."""
    return unpack_rows(pack_rows(weight, KINDS[kind]), *weight.shape, kind).astype(np.float64)


LIMIT = 2e-2  # measured 1.1e-2 to 1.5e-2; these models are made sharp, so rounding shows more than in real ones


@pytest.mark.parametrize(("weights", "kind"), [("int8", "int8"), ("int4", "int4"), ("int4-asym", "int4m")])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_logits_are_near_float64_with_the_same_weights(family: str, weights: str, kind: str, tmp_path: Path) -> None:
    save_tiny_model(family, tmp_path)
    model = build_tiny_model(family).double()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            outer = name.startswith(("model.embed", "lm_head"))
            values = _as_quantized(parameter.detach().float().numpy(), "int8" if outer else kind)
            parameter.data = torch.from_numpy(values.copy())
    model.set_attn_implementation("eager")
    ids = np.random.default_rng(7).integers(0, 256, 60).tolist()
    with torch.inference_mode():
        exact = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    runner = NativeRunner.from_dir(tmp_path, weights=weights)
    driver = PagedDriver(runner, CPUBackend(runner.info.kv_spec, 8, num_threads=1))
    logits = driver.prefill(driver.open(ids))
    runner.close()
    assert np.linalg.norm(logits - exact) <= LIMIT * np.linalg.norm(exact)
