"""The CUDA backend apart from the contract of all backends, which is tested in test_contract.py."""

import importlib.util
import logging
import types

import numpy as np
import pytest
import torch

from helpers.cuda.standin import needs_kernels, standing_in
from kvboost_edge.backends import cuda, cuda_check
from kvboost_edge.backends.base import AttentionParams, BatchLayout, KVSpec, LayerKVSpec
from kvboost_edge.backends.cuda import CUDABackend
from kvboost_edge.backends.cuda_check import failed_check
from kvboost_edge.backends.torch_backend import TorchBackend
from kvboost_edge.errors import BackendUnavailable, CapacityError, ConfigError
from kvboost_edge.kvcache.block_table import CopyOp

pytestmark = needs_kernels

CPU = torch.device("cpu")


@pytest.fixture
def loaded():
    with standing_in() as both:
        yield both


def make_spec(dtype="float16", *head_dims):
    return KVSpec(tuple(LayerKVSpec(2, head_dim) for head_dim in head_dims or (64,)), 16, dtype)


def layout(parts=None):
    """Build the layout of the 20th token of one sequence and the first of another, in a pool of 4
    blocks.
    """
    tables = np.array([[2, 0], [3, -1]], np.int32)
    return BatchLayout(
        np.array([0, 1, 2], np.int32),
        np.array([20, 1], np.int32),
        tables,
        np.array([3, 48], np.int64),
        parts,
    )


def rows(heads, head_dim=64, dtype=torch.float16):
    return torch.randn(2, heads, head_dim, generator=torch.Generator().manual_seed(heads)).to(dtype)


def test_each_call_is_one_launch(loaded):
    kernels, standin = loaded
    backend = CUDABackend(make_spec("float16", 64, 96), 4, device="cpu", kernels=kernels)
    batch = backend.prepare(layout())
    counts = [standin.launches]
    backend.write_kv(0, rows(2), rows(2), batch)
    counts.append(standin.launches)
    backend.attention(0, rows(6), batch, AttentionParams(0.1))
    counts.append(standin.launches)
    backend.copy_blocks([CopyOp(2, 1), CopyOp(1, 0)])
    counts.append(standin.launches)
    assert np.diff(counts).tolist() == [1, 1, 1], (
        "a copy must be one launch for the KV of all layers"
    )
    assert backend.describe()[:3] == ("cuda", "cpu", "kvboost_edge_cuda")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            make_spec("float32"),
            "0 of 1 layers, torch for the others (KV in float32, head dims [64])",
        ),
        (
            make_spec("float16", 64, 20, 264),
            "1 of 3 layers, torch for the others (KV in float16, head dims [20, 264])",
        ),
    ],
    ids=["float32", "head dims"],
)
def test_unsupported_layers_use_torch_and_are_logged_once(spec, said, loaded, caplog):
    kernels, standin = loaded
    with caplog.at_level(logging.WARNING):
        mine = CUDABackend(spec, 4, device="cpu", kernels=kernels)
    assert [said in record.getMessage() for record in caplog.records] == [True]
    assert said in mine.describe().attention_path
    torchs = TorchBackend(spec, 4)
    last = len(spec.layers) - 1
    head_dim = spec.layers[-1].head_dim
    keys, queries = (rows(heads, head_dim, getattr(torch, spec.dtype)) for heads in (2, 6))
    before = standin.launches
    for backend in (mine, torchs):
        backend.write_kv(last, keys, keys, backend.prepare(layout()))
    assert standin.launches == before
    assert_torchs(mine, torchs, standin, last, queries, layout())


def test_bfloat16_uses_torch_on_devices_without_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert cuda_check.kernel_dtypes(torch.device("cuda:7")) == ("float16",)
    monkeypatch.setattr(cuda, "kernel_dtypes", lambda device: ("float16",))
    backend = CUDABackend(make_spec("bfloat16"), 4, device="cpu", kernels=None)
    assert "torch for the others (KV in bfloat16" in backend.describe().attention_path
    batch = backend.prepare(layout())
    keys = rows(2, dtype=torch.bfloat16)
    backend.write_kv(0, keys, keys, batch)
    assert (
        backend.attention(0, rows(6, dtype=torch.bfloat16), batch, AttentionParams(0.1))[0]
        .isfinite()
        .all()
    )


def test_unsupported_queries_and_segments_use_torch(loaded):
    kernels, standin = loaded
    mine = CUDABackend(make_spec(), 4, device="cpu", kernels=kernels)
    torchs = TorchBackend(make_spec(), 4)
    parts = np.array([[0, 0, 0, 0, 0], [1, 0, 0, 0, 0]], np.int32)
    for plan, queries in ((layout(), rows(6).float()), (layout(parts), rows(6))):
        for backend in (mine, torchs):
            backend.write_kv(0, rows(2), rows(2), backend.prepare(plan))
        assert_torchs(mine, torchs, standin, 0, queries, plan)


def assert_torchs(mine, torchs, standin, layer, queries, plan):
    """Assert that attention equals torch's to the bit and launches no kernel."""
    before = standin.launches
    results = [
        backend.attention(layer, queries, backend.prepare(plan), AttentionParams(0.1))
        for backend in (mine, torchs)
    ]
    assert standin.launches == before
    assert all(torch.equal(got, wanted) for got, wanted in zip(*results, strict=True))


def test_quantized_kv_is_refused_by_name():
    spec = KVSpec((LayerKVSpec(2, 64),), 16, "float16", (8, 8))
    with pytest.raises(BackendUnavailable, match="kv_cache_bits"):
        CUDABackend(spec, 4, device="cpu", kernels=None)


def test_copies_outside_the_pool_are_refused_before_a_launch(loaded):
    kernels, standin = loaded
    backend = CUDABackend(make_spec(), 4, device="cpu", kernels=kernels)
    before = standin.launches
    with pytest.raises(ConfigError, match="0 -> 4"):
        backend.copy_blocks([CopyOp(0, 1), CopyOp(0, 4)])
    assert standin.launches == before


@pytest.mark.parametrize("major", [7, 8])
def test_the_kernels_pass_their_self_test(major, loaded, monkeypatch):
    kernels, standin = loaded
    if major < 8:  # such GPUs have no bfloat16
        monkeypatch.setattr(
            "kvboost_edge.backends.cuda_check.kernel_dtypes", lambda device: ("float16",)
        )
    with standin.of(major):
        assert failed_check(maker(kernels), CPU) is None


def maker(kernels):
    return lambda spec, num_blocks: CUDABackend(spec, num_blocks, device="cpu", kernels=kernels)


def changed(kernels, name, change):
    """Return the kernels with one function replaced."""
    names = {
        each: getattr(kernels, each) for each in ("write_kv", "copy_blocks", "paged_attention")
    }
    return types.SimpleNamespace(**(names | {name: change(names[name])}))


def _failing(f):
    def raise_error(*args, **kwargs):
        raise RuntimeError("no kernel image is available")

    return raise_error


FAULTS = {
    "a window one too wide": (
        "paged_attention",
        lambda f: lambda *a, window, **k: f(*a, window=window and window + 1, **k),
    ),
    "no sinks": ("paged_attention", lambda f: lambda *a, sinks, **k: f(*a, sinks=None, **k)),
    "no softcap": ("paged_attention", lambda f: lambda *a, softcap, **k: f(*a, softcap=0.0, **k)),
    "lse in base 2": (
        "paged_attention",
        lambda f: lambda *a, **k: (f(*a, **k)[0], f(*a, **k)[1] * 1.4427),
    ),
    "NaN": (
        "paged_attention",
        lambda f: lambda *a, **k: (f(*a, **k)[0] * torch.nan, f(*a, **k)[1]),
    ),
    "keys for values": ("write_kv", lambda f: lambda k, v, *a, **more: f(k, k, *a, **more)),
    "no copy": ("copy_blocks", lambda f: lambda *a: None),
    "an error of the device": ("write_kv", _failing),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_kernels_fail_their_self_test(fault, loaded):
    name, change = FAULTS[fault]
    said = failed_check(maker(changed(loaded[0], name, change)), CPU)
    assert said is not None
    assert ("no kernel image" if change is _failing else "failed their test") in said


def test_the_reason_for_not_using_the_kernels_is_given(monkeypatch):
    assert "CUDA devices" in str(cuda.unsupported_reason("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cuda.unsupported_reason("cuda") == "torch sees no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    cuda._untrusted_reason.cache_clear()
    assert (
        cuda.unsupported_reason("cuda")
        == "kvboost_edge_cuda is not installed; FORCE_CUDA=1 pip install ./cuda_ext"
    )
    cuda._untrusted_reason.cache_clear()


@pytest.mark.parametrize("error", [CapacityError, torch.OutOfMemoryError])
def test_a_full_device_is_tested_again(error, loaded, monkeypatch):
    def fail(spec, num_blocks):
        raise error("no room")

    found = iter([fail, maker(loaded[0])])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(cuda, "failed_check", lambda make, device: failed_check(next(found), CPU))
    cuda._untrusted_reason.cache_clear()
    assert "cuda:0 has too little free memory to test" in cuda.unsupported_reason("cuda:0")
    assert cuda.unsupported_reason("cuda:0") is None
    cuda._untrusted_reason.cache_clear()


def test_the_device_is_tested_once(loaded, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(cuda, "failed_check", lambda make, device: calls.append(device))
    cuda._untrusted_reason.cache_clear()
    assert [cuda.unsupported_reason("cuda:0") for _ in range(3)] == [None] * 3
    assert calls == [torch.device("cuda:0")]
    cuda._untrusted_reason.cache_clear()
