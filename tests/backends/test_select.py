"""The choice of a backend: a requested one is used or refused, never replaced."""

import dataclasses
import importlib.util
import subprocess
import sys

import pytest
import torch

from kvboost_edge.backends.base import BackendInfo, KVSpec, LayerKVSpec
from kvboost_edge.backends.select import (
    BACKEND_NAMES,
    BACKENDS,
    BackendChoice,
    array_kind_of,
    choose_backend,
    load_module,
    make_backend,
)
from kvboost_edge.config import CHOICES
from kvboost_edge.errors import BackendUnavailable, ConfigError

SPEC = KVSpec((LayerKVSpec(2, 16),), 16, "float32")


@pytest.fixture(autouse=True)
def no_accelerator(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


def offer_cuda(monkeypatch, count=1):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("name", "device", "expected"),
    [
        ("auto", None, ("cpu", "cpu")),
        ("auto", "cpu", ("cpu", "cpu")),
        ("cpu", None, ("cpu", "cpu")),
        ("reference", "cpu", ("reference", "cpu")),
        ("torch", None, ("torch", "cpu")),
        ("torch", "cpu", ("torch", "cpu")),
    ],
)
def test_backend_choice_without_an_accelerator(name, device, expected):
    choice = choose_backend(name, device)
    assert (choice.name, choice.device) == expected
    assert choice.reason


@pytest.mark.parametrize(
    ("name", "device", "expected"),
    [
        ("auto", None, ("torch", "cuda")),
        ("auto", "cpu", ("cpu", "cpu")),
        ("auto", "cuda:1", ("torch", "cuda:1")),
        ("cuda", None, ("torch", "cuda")),
        ("cuda", "cuda:1", ("torch", "cuda:1")),
        ("torch", "cuda", ("torch", "cuda")),
        ("cpu", None, ("cpu", "cpu")),
    ],
)
def test_backend_choice_with_two_cuda_devices(name, device, expected, monkeypatch):
    offer_cuda(monkeypatch, count=2)
    choice = choose_backend(name, device)
    assert (choice.name, choice.device) == expected


def test_auto_chooses_mps(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr("kvboost_edge.backends.torch.apple.find_fault", lambda make, device: None)
    assert choose_backend() == BackendChoice("torch", "mps", "torch found the device 'mps'")


@pytest.mark.parametrize(
    ("name", "device", "match"),
    [
        ("mps", None, "no Apple GPU"),
        ("cuda", None, "no CUDA device"),
        ("auto", "cuda", "no CUDA device"),
        ("torch", "mps", "no Apple GPU"),
    ],
)
def test_absent_devices_are_refused(name, device, match):
    with pytest.raises(BackendUnavailable, match=match):
        choose_backend(name, device)


def test_a_cuda_index_out_of_range_is_refused(monkeypatch):
    offer_cuda(monkeypatch, count=1)
    with pytest.raises(BackendUnavailable, match=r"cuda:1.*1 CUDA device"):
        choose_backend("auto", "cuda:1")


@pytest.mark.parametrize(
    ("name", "device", "match"),
    [
        ("gpu", None, "backend='gpu'"),
        ("auto", "tpu", "device='tpu'"),
        ("cpu", "cuda", "backend='cpu'"),
        ("reference", "mps", "backend='reference'"),
        ("mps", "cpu", "contradicts"),
        ("cuda", "mps", "contradicts"),
    ],
)
def test_contradictory_backends_and_devices_are_refused(name, device, match):
    with pytest.raises(ConfigError, match=match):
        choose_backend(name, device)


def test_backend_choice_without_torch(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert choose_backend("auto").name == "cpu"
    with pytest.raises(BackendUnavailable, match=r"\[torch\]"):
        choose_backend("torch")


@pytest.fixture
def extension(monkeypatch):
    """Function that sets the reason why the project's CUDA kernels cannot be used; None allows
    them.
    """
    offer_cuda(monkeypatch)

    def say(reason):
        monkeypatch.setattr("kvboost_edge.backends.cuda._untrusted_reason", lambda device: reason)

    return say


def test_the_cuda_extension_is_chosen_if_it_passed_its_self_test(extension):
    extension(None)
    for name, device in (("auto", None), ("auto", "cuda:0"), ("cuda", None)):
        choice = choose_backend(name, device)
        assert (choice.name, choice.device, choice.wanted) == ("cuda", device or "cuda", True)
        assert "passed their test" in choice.reason
    assert choose_backend("torch", "cuda").name == "torch"
    assert choose_backend("auto", "cpu").name == "cpu"


def test_the_choice_explains_a_missing_cuda_extension(extension):
    extension("kvboost_edge_cuda is not installed")
    for name in ("auto", "cuda"):
        choice = choose_backend(name)
        assert (choice.name, choice.device, choice.wanted) == ("torch", "cuda", False)
        assert choice.reason.endswith(
            "torch's own path, because kvboost_edge_cuda is not installed"
        )
    assert choose_backend("torch", "cuda").wanted


HERE = [name for name, row in BACKENDS.items() if "cpu" in row.devices]


@pytest.mark.parametrize("name", HERE)
def test_make_backend_builds_the_choice(name):
    backend = make_backend(choose_backend(name), SPEC, 3, num_threads=1)
    assert (backend.name, backend.device, backend.num_blocks) == (name, "cpu", 3)
    assert backend.pool_bytes == 3 * SPEC.bytes_per_block
    assert backend.array_kind == array_kind_of(name)
    assert backend.describe()[:2] == (name, "cpu")
    backend.close()


@pytest.mark.parametrize("name", HERE)
def test_backends_name_what_they_do_not_support(name):
    module = load_module(name)
    for device in (choose_backend(name).device, "cuda", "mps"):
        reason = module.unsupported_reason(device, SPEC)
        assert reason is None if device == "cpu" else reason
    assert "(8, 2)" in str(module.unsupported_reason("cpu", dataclasses.replace(SPEC, bits=(8, 2))))


def test_backends_describe_themselves():
    coded = dataclasses.replace(SPEC, dtype="float16", bits=(8, 8))
    said = {}
    for name, spec in (("cpu", SPEC), ("reference", SPEC), ("torch", SPEC), ("coded", coded)):
        backend = make_backend(
            choose_backend("cpu" if spec is coded else name), spec, 3, num_threads=1
        )
        said[name] = backend.describe()
        held = sum(region.nbytes for region in said[name].pool_regions)
        assert held == (0 if name == "torch" else backend.pool_bytes)
        said[name] = said[name]._replace(pool_regions=())
        assert (backend.kernel_access is not None) == (backend.name == "cpu")
        backend.close()
    assert said["cpu"] == BackendInfo("cpu", "cpu", "float", "kernel-team", 1)
    assert said["reference"] == BackendInfo("reference", "cpu", "none", "none", None)
    assert said["torch"] == BackendInfo("torch", "cpu", "none", "torch", torch.get_num_threads())
    assert said["coded"].attention_path not in ("none", "float")


def test_array_kinds_are_known_before_construction():
    names = {
        "cpu": "numpy",
        "torch": "torch",
        "mps": "torch",
        "cuda": "torch",
        "cuda:1": "torch",
        "auto": "",
    }
    assert {name: array_kind_of(name) for name in names} == names


def test_the_options_list_every_backend():
    assert sorted(CHOICES["backend"]) == sorted(BACKEND_NAMES)


def test_choosing_a_backend_imports_no_kernels_or_torch():
    script = (
        "import sys\n"
        "from kvboost_edge.backends.select import choose_backend\n"
        "assert choose_backend('cpu').name == 'cpu'\n"
        "assert not {'numba', 'torch'} & set(sys.modules)\n"
        "assert choose_backend('torch').name == 'torch'\n"
        "assert 'numba' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
