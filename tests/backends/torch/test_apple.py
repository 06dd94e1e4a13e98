"""Apple GPUs, as far as they can be tested without one: refusals, limits, and a trial at start that
finds faults.
"""

import re

import numpy as np
import pytest
import torch

from helpers.backends.fake_mps import DEVICE, FakeMpsBackend, fake_device
from kvboost_edge.backends.base import BatchLayout, KVSpec, LayerKVSpec
from kvboost_edge.backends.select import choose_backend
from kvboost_edge.backends.torch import apple
from kvboost_edge.backends.torch.padded_groups import TorchBatch
from kvboost_edge.backends.torch_backend import TorchBackend
from kvboost_edge.engine.memory.selection import available_on
from kvboost_edge.errors import BackendUnavailable, CapacityError

SPEC = KVSpec((LayerKVSpec(8, 128), LayerKVSpec(2, 64)), 16, "float16")


@pytest.fixture(autouse=True)
def fresh_trial():
    trial = apple.find_fault
    trial.cache_clear()
    yield
    trial.cache_clear()


@pytest.mark.parametrize(
    ("built", "message"), [(False, "is built without it"), (True, "this Mac has no Metal device")]
)
def test_a_machine_without_an_apple_gpu_uses_the_cpu(built, message, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: built)
    message = rf"no Apple GPU \(MPS\): torch {re.escape(torch.__version__)}.*{message}"
    for asked in ({"name": "mps"}, {"device": "mps"}, {"name": "torch", "device": "mps"}):
        with pytest.raises(BackendUnavailable, match=message):
            choose_backend(**asked)
    assert choose_backend().device == "cpu"


def on_either(spec, num_blocks, *, device):
    return TorchBackend(spec, num_blocks) if device == "cpu" else FakeMpsBackend(spec, num_blocks)


def test_a_correct_device_passes_the_self_test():
    with torch.no_grad(), fake_device():
        assert apple.find_fault(on_either, DEVICE) is None


def test_the_self_test_restores_torchs_thread_count(
    monkeypatch,
):
    threads = [3]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    seen = []

    def make(spec, num_blocks, *, device):
        seen.append(threads[-1])
        if device != "cpu":
            raise RuntimeError("no such device")
        return TorchBackend(spec, num_blocks)

    assert "fails: no such device" in str(apple.find_fault(make, "cpu:0"))
    assert (
        apple.find_fault(
            lambda spec, num_blocks, device: make(spec, num_blocks, device="cpu"), "cpu:0"
        )
        is None
    )
    assert set(seen) == {1}
    assert threads == [3, 1, 3, 1, 3]


class Leaking(TorchBackend):
    """Backend whose queries see up to 3 future tokens, as with is_causal in half precision in some
    versions.
    """

    def attention(self, layer, queries, batch, params, *more):
        for group in batch.groups(params.window):
            group.q_positions.add_(3 - group.q_positions % 4)
        return super().attention(layer, queries, batch, params, *more)


class Rounding(TorchBackend):
    def attention(self, *args):
        out, lse = super().attention(*args)
        return out * 1.01, lse


class Broken(TorchBackend):
    def attention(self, *args):
        return tuple(part * float("nan") for part in super().attention(*args))


class Raising(TorchBackend):
    def attention(self, *args):
        raise NotImplementedError(
            "The operator 'aten::amax' is not currently implemented for the MPS device"
        )


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Leaking, "differs from the CPU's"),
        (Rounding, "0.01"),
        (Broken, "nan"),
        (Raising, "fails: The operator"),
    ],
)
def test_a_faulty_device_is_refused_with_torchs_version(kind, message, monkeypatch):
    def make(spec, num_blocks, *, device):
        return (TorchBackend if device == "cpu" else kind)(spec, num_blocks)

    fault = apple.find_fault(make, "cpu:0")
    assert fault is not None
    assert f"torch {torch.__version__}" in fault
    assert message in fault
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(apple, "find_fault", lambda maker, device: fault)
    with pytest.raises(
        BackendUnavailable, match="device='mps' is not available: attention of torch"
    ):
        choose_backend("mps")
    chosen = choose_backend()
    assert chosen.device == "cpu"
    assert fault in chosen.reason


@pytest.mark.parametrize(
    ("bits", "per_block"), [((16, 16), 32768), ((8, 8), 8 * (128 * 16 + 384 + 128 * 16 + 64))]
)
def test_tensors_of_the_pool_stay_below_four_gibibytes(bits, per_block):
    """The largest layer determines the limit: 16 tokens of 8 heads of 128 channels, as keys or
    values, or as the codes of both.
    """
    spec = KVSpec(SPEC.layers, 16, "float16", bits)
    most = ((1 << 32) - 1) // per_block
    apple.check_buffers(spec, most)
    with pytest.raises(
        CapacityError, match=rf"num_blocks={most + 1} x {per_block} bytes.*num_blocks={most}"
    ):
        apple.check_buffers(spec, most + 1)
    with pytest.raises(CapacityError, match="Apple GPU's buffer"):
        FakeMpsBackend(spec, most + 1)


def test_gathered_tensors_stay_below_four_gibibytes():
    assert (
        apple.most_slots(SPEC) * 8 * 128 * 4 < 1 << 32 <= (apple.most_slots(SPEC) + 1) * 8 * 128 * 4
    )
    layout = BatchLayout(
        np.arange(6, dtype=np.int32),
        np.full(5, 20, np.int32),
        np.arange(10, dtype=np.int32).reshape(5, 2),
        np.arange(5) * 32 + 19,
    )
    batch = TorchBatch(layout, 16, torch.device("cpu"), most_slots=64)
    assert [len(group.blocks) for group in batch.groups(0)] == [2, 2, 1]
    with pytest.raises(CapacityError, match="up to 32 tokens does not fit"):
        TorchBatch(layout, 16, torch.device("cpu"), most_slots=31).groups(0)


@pytest.mark.parametrize(
    ("limit", "taken", "machine", "expected"),
    [(100, 30, 500, 70), (100, 30, 50, 50), (100, 130, 500, 0)],
)
def test_available_memory_respects_the_gpus_limit(limit, taken, machine, expected, monkeypatch):
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: limit)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: taken)
    monkeypatch.setattr("kvboost_edge.host.memory.available_bytes", lambda: machine)
    assert available_on("mps") == available_on("mps:0") == expected
