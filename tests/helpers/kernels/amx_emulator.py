"""Emulator of Intel's AMX for processors that lack it: tile instructions raise SIGILL, and a signal
handler executes them.

The instructions that Numba compiled for AMX run unchanged. The handler decodes each of them from
memory, so tests of those kernels need no such processor. Only instructions that the kernels use are
supported: LDTILECFG, TILERELEASE, TILEZERO, TILELOADD, TILESTORED and TDPBSSD, as described in
Intel's manual (Software Developer's Manual, volume 2), for Linux on x86-64. A kernel error that a
processor would refuse (mismatched sizes, no configuration) ends the process.

`install()` must be called once in a separate process, since the handler stays installed. The
emulator says nothing about speed.
"""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from kvboost_edge.kernels.vectors import fetch_add

_REGISTERS = 8
_THREADS = 64
_ROWS = 16
_WIDTH = 64
_PALETTE_BYTES = 64
# ucontext_t of glibc and musl: the thread's registers in the kernel's order, RIP is the 17th.
_FIRST_REGISTER = 5
_RIP = 5 + 16
# Index of each general register in the kernel's order, by its number in an instruction: RAX, RCX,
# RDX, RBX, RSP, RBP, RSI, RDI.
_PLACES = (13, 14, 12, 11, 15, 10, 9, 8, 0, 1, 2, 3, 4, 5, 6, 7)


class _SigAction(ctypes.Structure):
    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_byte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


class _Tiles:
    """The tile registers of all threads, in memory that is never freed."""

    bytes = np.zeros((_THREADS, _REGISTERS, _ROWS, _WIDTH), np.uint8)
    shapes = np.zeros(
        (_THREADS, _REGISTERS, 2), np.int64
    )  # rows, bytes per row; no rows means not configured
    owners = np.zeros(_THREADS, np.int64)
    counts = np.zeros(6, np.int64)  # by instruction


_BYTES, _SHAPES, _OWNERS, _COUNTS = (
    array.ctypes.data for array in (_Tiles.bytes, _Tiles.shapes, _Tiles.owners, _Tiles.counts)
)
_pthread_self = ctypes.CDLL(None).pthread_self
_pthread_self.restype = ctypes.c_int64
_pthread_self.argtypes = []
_abort = ctypes.CDLL(None).abort
_abort.restype = None
_abort.argtypes = []
_PLACE_TABLE = np.array(_PLACES)
CONFIGURE, RELEASE, ZERO, LOAD, STORE, MULTIPLY = range(6)


def _loader(bits: int) -> Any:
    @intrinsic
    def load(typing: Any, address: Any) -> Any:
        """Load a signed integer from an address."""

        def codegen(context: Any, b: Any, signature: Any, arguments: Sequence[Any]) -> Any:
            kind = ir.IntType(bits)
            value = b.load(b.inttoptr(arguments[0], ir.PointerType()), align=1, typ=kind)
            return value if bits == 64 else b.sext(value, ir.IntType(64))

        return types.int64(types.int64), codegen

    return load


def _storer(bits: int) -> Any:
    @intrinsic
    def store(typing: Any, address: Any, value: Any) -> Any:
        """Store the low bits of an integer at an address."""

        def codegen(context: Any, b: Any, signature: Any, arguments: Sequence[Any]) -> Any:
            kind = ir.IntType(bits)
            value = arguments[1] if bits == 64 else b.trunc(arguments[1], kind)
            b.store(value, b.inttoptr(arguments[0], ir.PointerType()), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return store


_load8 = _loader(8)
_load32 = _loader(32)
_load64 = _loader(64)
_store8 = _storer(8)
_store32 = _storer(32)
_store64 = _storer(64)
_inline = numba.njit(error_model="numpy", inline="never")


@intrinsic
def _claim(typing: Any, address: Any, value: Any) -> Any:
    """Atomically replace 0 by a value, and return the previous value."""

    def codegen(context: Any, b: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        pointer = b.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        pair = b.cmpxchg(
            pointer, ir.Constant(ir.IntType(64), 0), arguments[1], "acq_rel", "acquire"
        )
        return b.extract_value(pair, 0)

    return types.int64(types.int64, types.int64), codegen


@_inline
def _byte(address: int) -> int:
    return _load8(address) & 255


@_inline
def _thread() -> int:
    """Return the number of the calling thread."""
    own = _pthread_self()
    for index in range(_THREADS):
        before = _claim(_OWNERS + 8 * index, own)
        if before in (0, own):
            return index
    _abort()
    return 0


@_inline
def _register(context: int, number: int) -> int:
    return _load64(context + 8 * (_FIRST_REGISTER + _PLACE_TABLE[number]))


@_inline
def _memory(context: int, at: int, rex: int, length: int) -> tuple[int, int, int]:
    """Decode the memory operand whose ModRM byte is at `at`: its address, its stride, and its
    length in the code.
    """
    mod = _byte(at) >> 6
    low = _byte(at) & 7
    size = 1
    stride = 0
    address = 0
    base = low | (rex & 1) << 3
    if low == 4:
        both = _byte(at + 1)
        size = 2
        base = (both & 7) | (rex & 1) << 3
        index = (both >> 3 & 7) | (rex & 2) << 2
        if index != 4:
            stride = _register(context, index) << (both >> 6)
    if mod == 0 and base & 7 == 5:
        address = _load32(at + size)
        size += 4
        if low == 5:  # relative to the next instruction
            address += _load64(context + 8 * _RIP) + length + size
        return address, stride, size
    address = _register(context, base)
    if mod == 1:
        return address + _load8(at + size), stride, size + 1
    if mod == 2:
        return address + _load32(at + size), stride, size + 4
    return address, stride, size


@_inline
def _configure(thread: int, address: int) -> None:
    if _byte(address) != 1:
        _abort()
    for offset in range(1, _PALETTE_BYTES):
        is_width = 16 <= offset < 32
        is_rows = 48 <= offset < 56
        if not is_width and not is_rows and _byte(address + offset) != 0:
            _abort()
    for number in range(_REGISTERS):
        width = _byte(address + 16 + 2 * number) + 256 * _byte(address + 17 + 2 * number)
        rows = _byte(address + 48 + number)
        if width > _WIDTH or rows > _ROWS or (width == 0) != (rows == 0):
            _abort()
        _store64(_SHAPES + 8 * 2 * (thread * _REGISTERS + number), rows)
        _store64(_SHAPES + 8 * 2 * (thread * _REGISTERS + number) + 8, width)
        _clear(thread, number)


@_inline
def _shape(thread: int, number: int) -> tuple[int, int]:
    at = _SHAPES + 16 * (thread * _REGISTERS + number)
    rows = _load64(at)
    if rows == 0:
        _abort()
    return rows, _load64(at + 8)


@_inline
def _tile(thread: int, number: int) -> int:
    return _BYTES + (thread * _REGISTERS + number) * _ROWS * _WIDTH


@_inline
def _clear(thread: int, number: int) -> None:
    for offset in range(0, _ROWS * _WIDTH, 8):
        _store64(_tile(thread, number) + offset, 0)


@_inline
def _move(thread: int, number: int, address: int, stride: int, to_memory: bool) -> None:
    rows, width = _shape(thread, number)
    if not to_memory:
        _clear(thread, number)
    for row in range(rows):
        for column in range(width):
            own = _tile(thread, number) + row * _WIDTH + column
            other = address + row * stride + column
            if to_memory:
                _store8(other, _load8(own))
            else:
                _store8(own, _load8(other))


@_inline
def _multiply(thread: int, out: int, left: int, right: int) -> None:
    """Multiply signed bytes: out[row][column] += sum over k and i of left[row][4 k + i] *
    right[k][4 column + i].
    """
    if out in (left, right) or left == right:
        _abort()
    rows, width = _shape(thread, out)
    left_rows, left_width = _shape(thread, left)
    right_rows, right_width = _shape(thread, right)
    if rows != left_rows or width != right_width or left_width != 4 * right_rows:
        _abort()
    for row in range(rows):
        for column in range(width // 4):
            place = _tile(thread, out) + row * _WIDTH + 4 * column
            total = _load32(place)
            for k in range(right_rows):
                x = _tile(thread, left) + row * _WIDTH + 4 * k
                w = _tile(thread, right) + k * _WIDTH + 4 * column
                for i in range(4):
                    total += _load8(x + i) * _load8(w + i)
            _store32(place, total)


@_inline
def _step(context: int) -> None:
    """Execute the instruction at the thread's instruction pointer, and advance the pointer."""
    at = _load64(context + 8 * _RIP)
    thread = _thread()
    first = _byte(at + 1)
    second = _byte(at + 2)
    if (
        _byte(at) != 0xC4 or first & 0x9F != 0x82 or second & 0x84 != 0
    ):  # three-byte VEX, map 0F 38, R, W and L 0
        _abort()
    rex = (~first >> 5 & 7) & 3  # X and B, for an index and a base
    code = _byte(at + 3)
    prefix = second & 3
    operands = at + 4
    if code != 0x5E and second & 0x78 != 0x78:  # a third operand where none is allowed
        _abort()
    number = _byte(operands) >> 3 & 7
    is_memory = _byte(operands) >> 6 != 3
    length = 5
    what = -1
    if is_memory:
        address, stride, size = _memory(context, operands, rex, 4)
        length = 4 + size
        if code == 0x49 and prefix == 0 and number == 0:
            what = CONFIGURE
            _configure(thread, address)
        elif code == 0x4B and prefix in (2, 3):
            what = STORE if prefix == 2 else LOAD
            _move(thread, number, address, stride, prefix == 2)
    elif code == 0x49 and prefix == 3:
        what = ZERO
        _shape(thread, number)
        _clear(thread, number)
    elif code == 0x49 and prefix == 0:
        what = RELEASE
        for index in range(_REGISTERS):
            _store64(_SHAPES + 16 * (thread * _REGISTERS + index), 0)
    elif code == 0x5E and prefix == 3:
        what = MULTIPLY
        _multiply(thread, number, _byte(operands) & 7, ~(second >> 3) & 7)
    if what < 0:
        _abort()
    fetch_add(_COUNTS + 8 * what, 1)
    _store64(context + 8 * _RIP, at + length)


def install() -> None:
    """Install the signal handler that emulates tile instructions in this process."""
    handler = numba.cfunc(types.void(types.int32, types.int64, types.int64))(_handle)
    install.handler = handler  # type: ignore[attr-defined] # must outlive the call
    siginfo = 4
    nodefer = 0x40000000
    action = _SigAction(handler=handler.address, flags=siginfo | nodefer)
    if ctypes.CDLL(None).sigaction(signal.SIGILL, ctypes.byref(action), None) != 0:
        raise OSError("sigaction refused the handler of SIGILL")


def _handle(number: int, information: int, context: int) -> None:
    _step(context)


def counts() -> dict[str, int]:
    """Return the number of executed instructions by name."""
    names = ("ldtilecfg", "tilerelease", "tilezero", "tileloadd", "tilestored", "tdpbssd")
    return dict(zip(names, _Tiles.counts.tolist(), strict=True))
