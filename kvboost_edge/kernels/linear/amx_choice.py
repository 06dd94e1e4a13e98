"""Decision whether this process uses AMX for long prompts.

Kernels are compiled for AMX if the processor has it. They are used only if the OS grants the tile
registers, their results equal those of AVX512-VNNI bit for bit, and they are not slower. The trial
is needed because a hypervisor may report instructions that it runs slowly or incorrectly. Results
are the same either way.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
import time
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.kernels.entry import KernelEntry
from kvboost_edge.kernels.integers import dot_form, has_tile_registers
from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.linear.amx import amx_tile
from kvboost_edge.kernels.linear.dispatch import TARGET_TYPE
from kvboost_edge.kernels.linear.panel import MATRIX_TOKENS, PAIR_TOKENS, TILES_AT_ONCE
from kvboost_edge.kernels.linear.weight_formats import FORMATS, GROUP
from kvboost_edge.kernels.linear.weight_tiles import Target, Tile, int_tile
from kvboost_edge.kernels.signature import INT64
from kvboost_edge.kernels.tuples import numbers_kind
from kvboost_edge.kernels.vectors import LANES

__all__ = ["AmxChoice", "amx_choice", "linear_path", "trial_entries"]

_LOG = logging.getLogger(__name__)

# Linux: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) applies to all threads of the process.
_ARCH_PRCTL = 158
_REQUEST = 0x1023
_TILE_DATA = 18
# The trial has 896 inputs, 32 outputs and 192 tokens, about 15 us per call. The fastest round of
# each variant counts.
_GROUPS = 28
_PANELS = 6
_TIMES = 8
_ROUNDS = 10
_OPERATIONS = 2 * (_PANELS * MATRIX_TOKENS) * 2 * LANES * _GROUPS * GROUP

_INT4 = FORMATS["int4"].kind
_INT8 = FORMATS["int8"].kind
_AMX_INT4 = amx_tile[_INT4, False]
_AMX_INT8 = amx_tile[_INT8, False]
_VNNI_INT4, _VNNI_INT8 = (
    int_tile[kind, TILES_AT_ONCE, PAIR_TOKENS, False] for kind in (_INT4, _INT8)
)


class AmxChoice(NamedTuple):
    """The decision on AMX.

    Attributes:
        used: True if AMX is used.
        reason: why AMX is or is not used, for logs and reports.
    """

    used: bool
    reason: str


@functools.cache
def amx_choice() -> AmxChoice:
    """Decide whether to use AMX and return the decision with its reason.

    The decision is made once per process, in a trial of a few milliseconds. The trial's two kernels
    are compiled or loaded first.
    """
    if not has_tile_registers():
        return AmxChoice(False, "kernels are compiled without AMX")
    refusal = _ask_for_tiles()
    choice = AmxChoice(False, refusal) if refusal else _try()
    _LOG.info("AMX %s: %s", "is used" if choice.used else "is not used", choice.reason)
    return choice


def linear_path() -> str:
    """Return the variant of the linear kernels: a `dot_form`, or "amx+vnni512"."""
    return f"amx+{dot_form()}" if amx_choice().used else dot_form()


def _ask_for_tiles() -> str:
    """Request tile registers from the OS; return "" or the reason for the refusal."""
    if sys.platform != "linux":
        return f"tile registers are requested on Linux only, not on {sys.platform}"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA) != 0:
        return (
            "the system grants no tile registers: arch_prctl failed with "
            f"{os.strerror(ctypes.get_errno())!r}"
        )
    return ""


@kernel
def _amx_trial(kind: int, times: int, tile: Tile, panel: int, target: Target) -> None:
    for _ in range(times):
        if kind == _INT4:
            _AMX_INT4(tile, panel, target)
        else:
            _AMX_INT8(tile, panel, target)


@kernel
def _vnni_trial(kind: int, times: int, tile: Tile, panel: int, target: Target) -> None:
    for _ in range(times):
        if kind == _INT4:
            _VNNI_INT4(tile, panel, target)
        else:
            _VNNI_INT8(tile, panel, target)


_TRIAL_ARGUMENTS = (INT64, INT64, numbers_kind(Tile), INT64, TARGET_TYPE)
trial_entries = (
    [KernelEntry(trial, *_TRIAL_ARGUMENTS) for trial in (_amx_trial, _vnni_trial)]
    if has_tile_registers()
    else []
)
"""Kernels that the trial runs."""


class _Trial:
    """Random tokens and weights that a kernel multiplies in panels of `size` tokens."""

    def __init__(self, name: str, function: Any, size: int) -> None:
        rng = np.random.default_rng(0)
        tokens = _PANELS * MATRIX_TOKENS
        codes = rng.integers(-127, 128, (tokens, _GROUPS, GROUP), dtype=np.int8)
        codes[:, 0] = rng.choice(np.array([-127, 127], np.int8), codes[:, 0].shape)
        scales = rng.random((tokens, _GROUPS), dtype=np.float32)
        weights = rng.integers(0, 256, (2, _GROUPS, LANES * GROUP), dtype=np.uint8)
        row_scales = rng.random((2, _GROUPS, LANES)).astype(np.float16)
        panel = _panel(codes, scales, FORMATS[name].offset, size)
        self._out = np.zeros((tokens, 2 * LANES), np.float32)
        self._held = weights, row_scales, panel
        where = Tile(
            weights.ctypes.data,
            row_scales.ctypes.data,
            0,
            weights.strides[0],
            row_scales.strides[0],
            0,
            _GROUPS,
            tokens // size,
            panel.strides[0],
        )
        target = Target(
            self._out.ctypes.data, self._out.strides[0], 4 * LANES, 0, 0, np.float32(1.0)
        )
        self._function = function
        self._arguments = (where, panel.ctypes.data, target)
        self._kind = FORMATS[name].kind

    def result(self) -> npt.NDArray[np.float32]:
        """Run the multiplication once and return the outputs, float32 [tokens, 32]."""
        self.run(1)
        return self._out

    def run(self, times: int) -> None:
        self._function(self._kind, times, *self._arguments)


def _panel(
    codes: npt.NDArray[np.int8], scales: npt.NDArray[np.float32], offset: int, size: int
) -> npt.NDArray[Any]:
    """Return the cells of all panels, [panels, groups]; see panel.py."""
    cell = np.dtype(
        [("codes", np.int8, (size, GROUP)), ("terms", np.int32, size), ("scales", np.float32, size)]
    )
    panel = np.zeros((len(codes) // size, codes.shape[1]), cell)
    shape = (-1, size, codes.shape[1])
    panel["codes"] = codes.reshape(*shape, GROUP).transpose(0, 2, 1, 3)
    panel["terms"] = -offset * codes.sum(2, dtype=np.int32).reshape(shape).transpose(0, 2, 1)
    panel["scales"] = scales.reshape(shape).transpose(0, 2, 1)
    return panel


def _try() -> AmxChoice:
    """Compare AMX with AVX512-VNNI: first the bits of the results, then the time for int4 tiles."""
    for name in ("int8", "int4"):
        amx = _Trial(name, _amx_trial, MATRIX_TOKENS)
        vnni = _Trial(name, _vnni_trial, PAIR_TOKENS)
        if amx.result().tobytes() != vnni.result().tobytes():
            _LOG.warning("AMX is not used: its results differ from AVX512-VNNI on this machine")
            return AmxChoice(False, "its results differ from AVX512-VNNI on this machine")
    # Time only the last format, int4, because most models use no other format.
    amx_s, vnni_s = (
        min(times)
        for times in zip(*[(_seconds(amx), _seconds(vnni)) for _ in range(_ROUNDS)], strict=True)
    )
    rates = (
        f"{_OPERATIONS / amx_s / 1e12:.2f} TOPS per thread, AVX512-VNNI "
        f"{_OPERATIONS / vnni_s / 1e12:.2f}, bit-identical"
    )
    return AmxChoice(
        amx_s <= vnni_s, rates if amx_s <= vnni_s else f"slower on this machine: {rates}"
    )


def _seconds(trial: _Trial) -> float:
    """Return the duration of one multiplication in seconds."""
    started = time.perf_counter()
    trial.run(_TIMES)
    return (time.perf_counter() - started) / _TIMES
