"""Which backend holds the KV and why. Nothing here falls back silently: what was asked for is used or refused."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util

from kvboost_edge.backends.base import DEFAULT_NUM_OPEN, Backend, KVSpec
from kvboost_edge.errors import BackendUnavailable, ConfigError

__all__ = ["BACKEND_NAMES", "BackendChoice", "choose_backend", "make_backend"]

BACKEND_NAMES = ("auto", "cpu", "torch", "mps", "cuda", "reference")
_ACCELERATORS = ("cuda", "mps")


@dataclasses.dataclass(frozen=True, slots=True)
class BackendChoice:
    """`name` is "cpu", "torch" or "reference"; `device` a torch device string; `reason` one sentence for people."""

    name: str
    device: str
    reason: str


def choose_backend(name: str = "auto", device: str | None = None) -> BackendChoice:
    """Resolve the options `backend` and `device`.

    "auto" takes an accelerator that torch offers (or the one named by `device`), else the compiled CPU kernels.
    Raises ConfigError for an unknown name or a contradiction, BackendUnavailable for what is not on this machine.
    """
    if name not in BACKEND_NAMES:
        raise ConfigError(f"backend={name!r} is not one of {BACKEND_NAMES}")
    kind = None if device is None else device.partition(":")[0]
    if kind not in (None, "cpu", *_ACCELERATORS):
        raise ConfigError(f"device={device!r} is not one of 'cpu', 'mps', 'cuda' or 'cuda:<index>'")
    if name in _ACCELERATORS:
        if kind not in (None, name):
            raise ConfigError(f"backend={name!r} contradicts device={device!r}; give one of them")
        return BackendChoice("torch", _require_device(device or name), f"backend={name!r} was asked for")
    if name == "torch":
        return BackendChoice("torch", _require_device(device or "cpu"), "backend='torch' was asked for")
    if name in ("cpu", "reference"):
        if kind in _ACCELERATORS:
            raise ConfigError(f"backend={name!r} runs on the CPU, not on device={device!r}; use backend='torch'")
        return BackendChoice(name, "cpu", f"backend={name!r} was asked for")
    return _choose_auto(device, kind)


def _choose_auto(device: str | None, kind: str | None) -> BackendChoice:
    if kind in _ACCELERATORS and device is not None:
        return BackendChoice("torch", _require_device(device), f"device={device!r} was asked for")
    if kind is None:
        for accelerator in _ACCELERATORS:
            if _missing_device(accelerator) is None:
                return BackendChoice("torch", accelerator, f"torch offers the device {accelerator!r}")
        return BackendChoice("cpu", "cpu", "no accelerator is available to torch: compiled CPU kernels")
    return BackendChoice("cpu", "cpu", "device='cpu' was asked for: compiled CPU kernels")


def _require_device(device: str) -> str:
    problem = _missing_device(device)
    if problem is not None:
        raise BackendUnavailable(f"device={device!r} is not available: {problem}")
    return device


def _missing_device(device: str) -> str | None:
    """Why torch cannot use a device here, or None when it can."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed; install the extra [torch]"
    torch = importlib.import_module("torch")
    kind, _, index = device.partition(":")
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            return "torch sees no CUDA device"
        if index and (not index.isdigit() or int(index) >= count):
            return f"torch sees {count} CUDA device(s)"
    if kind == "mps" and not torch.backends.mps.is_available():
        return "torch sees no Apple GPU (MPS)"
    return None


def make_backend(
    choice: BackendChoice,
    spec: KVSpec,
    num_blocks: int,
    num_threads: int | None = None,
    *,
    num_open: int = DEFAULT_NUM_OPEN,
) -> Backend:
    """Allocate the backend of a choice: a pool of `num_blocks` blocks. `num_threads` concerns the CPU kernels,
    `num_open` quantized pools: how many blocks may be partly written at a time."""
    if choice.name == "torch":
        from kvboost_edge.backends.torch_backend import TorchBackend

        return TorchBackend(spec, num_blocks, device=choice.device)
    if choice.name == "reference":
        from kvboost_edge.backends.reference import ReferenceBackend

        return ReferenceBackend(spec, num_blocks, num_open=num_open)
    from kvboost_edge.backends.cpu import CPUBackend

    return CPUBackend(spec, num_blocks, num_threads=num_threads, num_open=num_open)
