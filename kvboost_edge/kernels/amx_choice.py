"""Whether this process multiplies long prompts with Intel's AMX: what the system allows, and what a trial shows.

Kernels are compiled for AMX where the processor names it. They are used only if the system gives this process tile
registers, if they give the results of AVX512-VNNI bit for bit here and now, and if they are not slower: a hypervisor
may show instructions that it does not run well. Results are the same either way.
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

from kvboost_edge.kernels.jit import kernel
from kvboost_edge.kernels.linear_amx import amx_tile
from kvboost_edge.kernels.linear_dot import GROUP, KIND_INT4, KIND_INT8, OFFSET, has_tile_registers
from kvboost_edge.kernels.linear_panel import MATRIX_TOKENS, TILES_AT_ONCE, WIDE_TOKENS
from kvboost_edge.kernels.linear_tiles import Target, Tile, int_tile
from kvboost_edge.kernels.vectors import LANES

__all__ = ["AmxChoice", "amx_choice"]

logger = logging.getLogger(__name__)

# Linux: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), for all threads of the process.
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18
_GROUPS, _BLOCKS, _ROUNDS = 28, 6, 15  # 896 inputs, 192 tokens: 11 million products, less than a millisecond in all

_AMX_INT4, _AMX_INT8 = amx_tile[KIND_INT4, False], amx_tile[KIND_INT8, False]
_VNNI_INT4, _VNNI_INT8 = (int_tile[kind, TILES_AT_ONCE, WIDE_TOKENS, False] for kind in (KIND_INT4, KIND_INT8))


class AmxChoice(NamedTuple):
    """used: whether AMX multiplies; reason: why, or why not, for people."""

    used: bool
    reason: str


@functools.cache
def amx_choice() -> AmxChoice:
    """Decided once per process, by a trial of a few milliseconds; never raises."""
    if not has_tile_registers():
        return AmxChoice(False, "kernels are compiled without AMX")
    refusal = _ask_for_tiles()
    choice = AmxChoice(False, refusal) if refusal else _try()
    logger.info("AMX %s: %s", "is used" if choice.used else "is not used", choice.reason)
    return choice


def _ask_for_tiles() -> str:
    """Ask the system for tile registers; why it refuses, or ""."""
    if sys.platform != "linux":
        return f"tile registers are asked for on Linux only, not on {sys.platform}"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA) != 0:
        return f"the system gives no tile registers: arch_prctl says {os.strerror(ctypes.get_errno())!r}"
    return ""


@kernel
def _amx_trial(kind: int, tile: Tile, panel: int, target: Target) -> None:
    if kind == KIND_INT4:
        _AMX_INT4(tile, panel, target)
    else:
        _AMX_INT8(tile, panel, target)


@kernel
def _vnni_trial(kind: int, tile: Tile, panel: int, target: Target) -> None:
    if kind == KIND_INT4:
        _VNNI_INT4(tile, panel, target)
    else:
        _VNNI_INT8(tile, panel, target)


class _Trial:
    """The same random tokens and weights for both forms."""

    def __init__(self, kind: int) -> None:
        rng = np.random.default_rng(0)
        self._kind = kind
        self.tokens = _BLOCKS * MATRIX_TOKENS
        codes = rng.integers(-127, 128, (self.tokens, _GROUPS, GROUP), dtype=np.int8)
        codes[:, 0] = rng.choice(np.array([-127, 127], np.int8), codes[:, 0].shape)
        scales = rng.random((self.tokens, _GROUPS), dtype=np.float32)
        self._weights = rng.integers(0, 256, (2, _GROUPS, LANES * GROUP), dtype=np.uint8)
        self._scales = rng.random((2, _GROUPS, LANES)).astype(np.float16)
        self._panels = {size: _panel(codes, scales, OFFSET[kind], size) for size in (MATRIX_TOKENS, WIDE_TOKENS)}

    def run(self, function: Any, size: int) -> npt.NDArray[np.float32]:
        """float32 [tokens, 32], from blocks of so many tokens."""
        out = np.zeros((self.tokens, 2 * LANES), np.float32)
        panel, weights, scales = self._panels[size], self._weights, self._scales
        where = Tile(
            weights.ctypes.data, scales.ctypes.data, 0, weights.strides[0], scales.strides[0], _GROUPS,
            self.tokens // size, panel.strides[0],
        )  # fmt: skip
        function(
            self._kind,
            where,
            panel.ctypes.data,
            Target(out.ctypes.data, out.strides[0], 4 * LANES, 0, 0, np.float32(1.0)),
        )
        return out


def _panel(codes: npt.NDArray[np.int8], scales: npt.NDArray[np.float32], offset: int, size: int) -> npt.NDArray[Any]:
    """Records of blocks of `size` tokens as linear_panel.py describes them, [blocks, groups]."""
    record = np.dtype([("codes", np.int8, (size, GROUP)), ("terms", np.int32, size), ("scales", np.float32, size)])
    panel = np.zeros((len(codes) // size, codes.shape[1]), record)
    shape = (-1, size, codes.shape[1])
    panel["codes"] = codes.reshape(*shape, GROUP).transpose(0, 2, 1, 3)
    panel["terms"] = -offset * codes.sum(2, dtype=np.int32).reshape(shape).transpose(0, 2, 1)
    panel["scales"] = scales.reshape(shape).transpose(0, 2, 1)
    return panel


def _try() -> AmxChoice:
    forms = {"amx": (_amx_trial, MATRIX_TOKENS), "vnni": (_vnni_trial, WIDE_TOKENS)}
    trials = [_Trial(kind) for kind in (KIND_INT8, KIND_INT4)]
    for trial in trials:
        results = [trial.run(*form).tobytes() for form in forms.values()]
        if results[0] != results[1]:
            logger.warning("AMX of this machine gives other results than AVX512-VNNI: it is not used")
            return AmxChoice(False, "it gives other results than AVX512-VNNI here")
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(_ROUNDS):
        for name, form in forms.items():
            started = time.perf_counter()
            trials[-1].run(*form)
            seconds[name].append(time.perf_counter() - started)
    operations = 2 * trials[-1].tokens * 2 * LANES * _GROUPS * GROUP
    amx, vnni = (operations / min(seconds[name]) / 1e12 for name in ("amx", "vnni"))
    rates = f"{amx:.2f} TOPS a thread, AVX512-VNNI {vnni:.2f}, the same bits"
    return AmxChoice(amx >= vnni, rates if amx >= vnni else f"slower here: {rates}")
