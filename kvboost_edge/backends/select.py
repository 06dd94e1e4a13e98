"""The selection of a backend, with its reason. A backend requested by name has no fallback.

A backend is a module (`BackendModule`) with an entry in the table `BACKENDS`. The module is
imported on first use.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from typing import NamedTuple, Protocol, cast

from kvboost_edge.backends.base import DEFAULT_NUM_OPEN, Backend, KVSpec
from kvboost_edge.errors import BackendUnavailable, ConfigError, install_extra

__all__ = [
    "BACKENDS",
    "BACKEND_NAMES",
    "BackendChoice",
    "BackendModule",
    "array_kind_of",
    "choose_backend",
    "load_module",
    "make_backend",
]


class _Row(NamedTuple):
    """A table entry: properties of a backend that are known before its module is imported.

    Attributes:
        module: Name of the module.
        devices: Types of torch devices, the preferred one first.
        array_kind: "numpy" or "torch".
        extra: Required package and name of the extra that installs it; "" if nothing is required.
    """

    module: str
    devices: tuple[str, ...] = ("cpu",)
    array_kind: str = "numpy"
    extra: str = ""


BACKENDS = {
    "cpu": _Row("kvboost_edge.backends.cpu"),
    "cuda": _Row("kvboost_edge.backends.cuda", ("cuda",), "torch", extra="torch"),
    "torch": _Row(
        "kvboost_edge.backends.torch_backend", ("cpu", "cuda", "mps"), "torch", extra="torch"
    ),
    "reference": _Row("kvboost_edge.backends.reference"),
}
# In order of preference. As a value of the option `backend`, each selects the first backend that
# supports the device.
_ACCELERATORS = ("cuda", "mps")
BACKEND_NAMES = tuple(dict.fromkeys(("auto", *BACKENDS, *_ACCELERATORS)))


class BackendModule(Protocol):
    """The interface of a backend's module."""

    def unsupported_reason(self, device: str, spec: KVSpec | None = None) -> str | None:
        """Return why the backend cannot use a device or store KV of this kind, or None."""
        ...

    def make(
        self,
        spec: KVSpec,
        num_blocks: int,
        *,
        device: str,
        num_threads: int | None = None,
        num_open: int = ...,
        num_state_slots: int = ...,
        num_draft_rows: int = ...,
    ) -> Backend:
        """Allocate the backend. Parameters that do not apply to it are ignored.

        Raises:
            ConfigError: The spec is not supported, see `unsupported_reason`.
            BackendUnavailable: The device is not usable, see `unsupported_reason`.
            CapacityError: The memory cannot be allocated.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class BackendChoice:
    """A selected backend.

    Attributes:
        name: Name of the backend in the table.
        device: A torch device string.
        reason: One sentence for users.
        wanted: False if a faster backend for the device was not available.
    """

    name: str
    device: str
    reason: str
    wanted: bool = True


def choose_backend(name: str = "auto", device: str | None = None) -> BackendChoice:
    """Select a backend from the options `backend` and `device`.

    "auto" selects an available accelerator (or the one given by `device`), else the compiled CPU
    kernels.

    Raises:
        ConfigError: A name is unknown, or the options contradict each other.
        BackendUnavailable: The device is not available on this machine.
    """
    if name not in BACKEND_NAMES:
        raise ConfigError(f"backend={name!r} is not one of {BACKEND_NAMES}")
    kind = None if device is None else device.partition(":")[0]
    if kind not in (None, "cpu", *_ACCELERATORS):
        raise ConfigError(f"device={device!r} is not one of 'cpu', 'mps', 'cuda' or 'cuda:<index>'")
    if name == "auto":
        return _choose_auto(device, kind)
    asked = f"backend={name!r} was requested"
    if name in _ACCELERATORS:
        if kind not in (None, name):
            raise ConfigError(
                f"backend={name!r} contradicts device={device!r}; give only one of them"
            )
        return _accelerated(device or name, asked)
    devices = BACKENDS[name].devices
    if kind is not None and kind not in devices:
        raise ConfigError(
            f"backend={name!r} runs on {' or '.join(devices)}, not on device={device!r}; use "
            f"backend={_serving(kind)[0]!r}"
        )
    return _available(name, device or devices[0], asked)


def _choose_auto(device: str | None, kind: str | None) -> BackendChoice:
    if kind in _ACCELERATORS and device is not None:
        return _accelerated(device, f"device={device!r} was requested")
    if kind is None:
        problems: list[str] = []
        for accelerator in _ACCELERATORS:
            problem = _missing(_serving(accelerator)[-1], accelerator)
            if problem is None:
                return _accelerated(accelerator, f"torch found the device {accelerator!r}")
            problems.append(problem)
        reasons = "; ".join(dict.fromkeys(problems))
        return BackendChoice(
            "cpu", "cpu", f"no accelerator is available ({reasons}): compiled CPU kernels"
        )
    return BackendChoice("cpu", "cpu", "device='cpu' was requested: compiled CPU kernels")


def _serving(device: str) -> list[str]:
    """Return the backends for a device by preference. The last one has the fewest requirements."""
    return [name for name, row in BACKENDS.items() if device.partition(":")[0] in row.devices]


def _accelerated(device: str, reason: str) -> BackendChoice:
    """Choose the first backend that can use an accelerator, and say why faster ones cannot."""
    *better, last = _serving(device)
    choice = _available(last, device, reason)
    problem = None
    for name in better:
        problem = _missing(name, device)
        if problem is None:
            return BackendChoice(
                name, device, f"{reason}: the project's own kernels passed their test on it"
            )
    if problem is None:
        return choice
    return dataclasses.replace(
        choice, reason=f"{reason}; torch's own path, because {problem}", wanted=False
    )


def _available(name: str, device: str, reason: str) -> BackendChoice:
    problem = _missing(name, device)
    if problem is not None:
        raise BackendUnavailable(f"device={device!r} is not available: {problem}")
    return BackendChoice(name, device, reason)


def _missing(name: str, device: str) -> str | None:
    """Return why a backend cannot use a device on this machine, or None."""
    extra = BACKENDS[name].extra
    if not extra:
        return None  # Nothing else is required, so the module need not be imported.
    if importlib.util.find_spec(extra) is None:
        return f"{extra} is not installed; install the extra: {install_extra(extra)}"
    return load_module(name).unsupported_reason(device)


def array_kind_of(name: str) -> str:
    """Return the arrays of a backend, "numpy" or "torch"; "" for "auto"."""
    kind = name.partition(":")[0]
    row = BACKENDS.get(_serving(kind)[0] if kind in _ACCELERATORS else kind)
    return "" if row is None else row.array_kind


def load_module(name: str) -> BackendModule:
    """Import the module of a backend."""
    return cast(BackendModule, importlib.import_module(BACKENDS[name].module))


def make_backend(
    choice: BackendChoice,
    spec: KVSpec,
    num_blocks: int,
    num_threads: int | None = None,
    *,
    num_open: int = DEFAULT_NUM_OPEN,
    num_state_slots: int = 0,
    num_draft_rows: int = 0,
) -> Backend:
    """Allocate the selected backend.

    Args:
        choice: The selected backend.
        spec: Shapes and storage of all layers.
        num_blocks: Number of blocks in the pool.
        num_threads: Number of threads of the CPU kernels.
        num_open: Number of blocks of a quantized pool that may be partly written at a time.
        num_state_slots: Number of slots of recurrent state.
        num_draft_rows: Number of draft tokens whose inputs to recurrent state can be stored.
    """
    make = load_module(choice.name).make
    return make(
        spec,
        num_blocks,
        device=choice.device,
        num_threads=num_threads,
        num_open=num_open,
        num_state_slots=num_state_slots,
        num_draft_rows=num_draft_rows,
    )
