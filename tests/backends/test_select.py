"""Which backend is chosen: what is asked for is used or refused, never replaced."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from kvboost_edge.backends.base import KVSpec, LayerKVSpec
from kvboost_edge.backends.select import BackendChoice, choose_backend, make_backend
from kvboost_edge.errors import BackendUnavailable, ConfigError

SPEC = KVSpec((LayerKVSpec(2, 16),), 16, "float32")


@pytest.fixture(autouse=True)
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


def offer_cuda(monkeypatch: pytest.MonkeyPatch, count: int = 1) -> None:
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
def test_without_an_accelerator(name: str, device: str | None, expected: tuple[str, str]) -> None:
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
def test_with_two_cuda_devices(
    name: str, device: str | None, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    offer_cuda(monkeypatch, count=2)
    choice = choose_backend(name, device)
    assert (choice.name, choice.device) == expected


def test_auto_takes_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_backend() == BackendChoice("torch", "mps", "torch offers the device 'mps'")


@pytest.mark.parametrize(
    ("name", "device", "match"),
    [
        ("mps", None, "no Apple GPU"),
        ("cuda", None, "no CUDA device"),
        ("auto", "cuda", "no CUDA device"),
        ("torch", "mps", "no Apple GPU"),
    ],
)
def test_absent_devices_are_refused(name: str, device: str | None, match: str) -> None:
    with pytest.raises(BackendUnavailable, match=match):
        choose_backend(name, device)


def test_a_cuda_index_out_of_range_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_contradictions_are_refused(name: str, device: str | None, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        choose_backend(name, device)


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert choose_backend("auto").name == "cpu"
    with pytest.raises(BackendUnavailable, match=r"\[torch\]"):
        choose_backend("torch")


@pytest.mark.parametrize("name", ["cpu", "torch", "reference"])
def test_make_backend_builds_the_choice(name: str) -> None:
    backend = make_backend(choose_backend(name), SPEC, 3, num_threads=1)
    assert (backend.name, backend.device, backend.num_blocks) == (name, "cpu", 3)
    assert backend.pool_bytes == 3 * SPEC.bytes_per_block
    backend.close()
