"""Kernels and intrinsics. Numba is imported when the first of them must be compiled.

All other modules define kernels with `kernel`, `named_kernel` or `intrinsic`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from kvboost_edge.kernels.notices import on_first_compilation

__all__ = [
    "Kernel",
    "cache_path",
    "intrinsic",
    "is_on_disk",
    "kernel",
    "named_kernel",
    "on_first_compilation",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Kernel:
    """A kernel that Python and other kernels can call.

    Args:
        function: the Python function to compile.
        is_named: True for `named_kernel`.

    Attributes:
        function: the Python function.
        entry: the kernel's `KernelEntry`, or None. It calls the kernel in a kernel library.
    """

    def __init__(self, function: Callable[..., Any], *, is_named: bool) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.entry: Any = None
        self._is_named = is_named

    @functools.cached_property
    def dispatcher(self) -> Any:
        """Numba's dispatcher, which compiles the kernel or loads it from disk."""
        from kvboost_edge.kernels.compiler import CompiledKernel

        return CompiledKernel(self.function, is_named=self._is_named)

    def __call__(self, *arguments: Any) -> Any:
        if self.entry is not None and self.entry.library_call is not None:
            matches, result = self.entry.library_call(arguments)
            if matches:
                return result
        return self.dispatcher(*arguments)

    @property
    def _numba_type_(self) -> Any:
        """Numba's type of a global that refers to this kernel."""
        return self.dispatcher._numba_type_

    def __repr__(self) -> str:
        return f"<kernel {self.function.__module__}:{self.function.__name__}>"


def kernel(function: _Function) -> _Function:
    """Compile a function for nopython mode without the GIL, and cache the machine code on disk.

    Division follows NumPy's rules, and fastmath is off.
    """
    # With fastmath, LLVM may fuse or reorder additions depending on context, and a row's bits would
    # differ between a batch of one and a batch of many. Kernels write fused multiply-adds
    # explicitly.
    return cast("_Function", Kernel(function, is_named=False))


def named_kernel(name: str) -> Callable[[_Function], _Function]:
    """Return `kernel` for a function that is defined several times with different closures.

    Args:
        name: a name that is unique in the module; cache files and linked symbols use it.
    """

    def named(function: _Function) -> _Function:
        function.__name__ = function.__qualname__ = name
        return cast("_Function", Kernel(function, is_named=True))

    return named


class _Intrinsic:
    """A function that emits LLVM IR where a kernel calls it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(cast("Any", self), function)
        self._function = function

    @functools.cached_property
    def _numba_type_(self) -> Any:
        from kvboost_edge.kernels.compiler import intrinsic_type

        return intrinsic_type(self, self._function)


def intrinsic(function: Callable[..., Any]) -> Any:
    """Return an intrinsic whose function has the form that `numba.extending.intrinsic` expects."""
    return _Intrinsic(function)


def is_on_disk(function: Any, arguments: tuple[Any, ...]) -> bool:
    """Return whether the cache has machine code for these types, this machine and these sources."""
    dispatcher = function.dispatcher
    return bool(dispatcher._cache.has(arguments, dispatcher.targetctx.codegen()))


def cache_path() -> str | None:
    """Return the folder of compiled kernels, or None if no folder can be written.

    The folder is the first writable one of these: NUMBA_CACHE_DIR, `__pycache__` next to the
    sources, Numba's folder in the user's cache, `compiled` in the cache directory.
    """
    from kvboost_edge.kernels.code_cache import cache_folder

    folder = cache_folder()
    return None if folder is None else str(folder)
