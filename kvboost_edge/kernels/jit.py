"""Numba compile options, the on-disk cache of machine code, and inlining of kernels into kernels.

All other modules compile through `kernel`, `named_kernel` or `intrinsic`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.registry import CPUDispatcher
from numba.core.typed_passes import NativeLowering

from kvboost_edge.host.atomic_files import alone_in

__all__ = [
    "cache_path",
    "digest_of",
    "intrinsic",
    "is_on_disk",
    "kernel",
    "named_kernel",
    "on_first_compilation",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])


@cache
def _source_digest() -> str:
    """Return the digest of all Python files in this package."""
    return digest_of(Path(__file__).parent)


def digest_of(room: Path) -> str:
    """Return the SHA-256 of the names and contents of all Python files under a folder."""
    digest = hashlib.sha256()
    for path in sorted(room.rglob("*.py")):
        digest.update(path.relative_to(room).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


class _NamedDataFile(IndexDataCacheFile):  # type: ignore[misc]
    """Cache files of machine code, named after the hash of their key."""

    # Numba numbers these files and writes the index before the file that it names. After a crash
    # between the two writes, or in a race with another process, the index would point to machine
    # code of another version.
    def save(self, key: tuple[Any, ...], data: Any) -> None:
        digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
        name = f"{self._index_name.removesuffix('.nbi')}.{digest}.nbc"
        with alone_in(Path(self._cache_path)):
            self._save_locked(key, name, data)

    def holds(self, key: tuple[Any, ...]) -> bool:
        """Return whether the cache has a machine-code file for the key."""
        name = self._load_index().get(key)
        return name is not None and Path(self._data_path(name)).exists()

    def _save_locked(self, key: tuple[Any, ...], name: str, data: Any) -> None:
        """Write a file of machine code and its index entry; the caller holds the folder's lock."""
        # Without the lock, two processes that update the index at once would lose an entry and its
        # file.
        self._save_data(name, data)
        kept = {
            known: file for known, file in self._load_index().items() if known[-1] == key[-1]
        } | {key: name}
        self._save_index(kept)
        for path in Path(self._cache_path).glob(
            self._data_name_pattern.format(number=0).replace(".0.", ".*.")
        ):
            if path.name not in kept.values():
                path.unlink(missing_ok=True)


class _PackageCache(FunctionCache):  # type: ignore[misc]
    """Numba's file cache, keyed on all kernel sources instead of the source of one function.

    Args:
        function: the Python function to compile.
        is_named: True for `named_kernel`, whose code is identified by its name and the sources. If
            False, Numba adds a hash of the closure. That hash differs in every process if the
            closure holds other kernels.
    """

    def __init__(self, function: Callable[..., Any], *, is_named: bool = False) -> None:
        super().__init__(function)
        self._is_named = is_named
        locator = self._impl.locator
        self._cache_file = _NamedDataFile(
            self._cache_path, self._impl.filename_base, locator.get_source_stamp()
        )

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        if self._is_named:
            return sig, codegen.magic_tuple(), _source_digest()
        return (*super()._index_key(sig, codegen), _source_digest())

    def has(self, sig: Any, codegen: Any) -> bool:
        return bool(self._cache_file.holds(self._index_key(sig, codegen)))

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Load machine code; clear the index if its types are from another package version."""
        found = None
        try:
            found = super().load_overload(sig, target_context)
        except (AttributeError, ImportError, TypeError):
            self.flush()
        if found is None and _listeners:
            _listeners.pop()()
        return found


_listeners: list[Callable[[], None]] = []


def on_first_compilation(tell: Callable[[], None] | None) -> None:
    """Set a callback that runs once, before the first kernel that must be compiled.

    A kernel that is already in memory or on disk does not trigger the callback. It runs in the
    thread that called the kernel. Compiling takes seconds.

    Args:
        tell: the new callback, which replaces the previous one; None removes it.
    """
    _listeners[:] = [] if tell is None else [tell]


def kernel(function: _Function) -> _Function:
    """Compile a function for nopython mode without the GIL, and cache the machine code on disk.

    Division follows NumPy's rules, and fastmath is off.
    """
    # With fastmath, LLVM may fuse or reorder additions depending on context, and a row's bits would
    # differ between a batch of one and a batch of many. Kernels write fused multiply-adds
    # explicitly.
    return _compiled(function, is_named=False)


def named_kernel(name: str) -> Callable[[_Function], _Function]:
    """Return `kernel` for a function that is defined several times with different closures.

    Args:
        name: a name that is unique in the module; cache files and linked symbols use it.
    """

    def named(function: _Function) -> _Function:
        function.__name__ = function.__qualname__ = name
        return _compiled(function, is_named=True)

    return named


_OPTIONS = {
    "nopython": True,
    "nogil": True,
    "error_model": "numpy",
    "boundscheck": None,
    "no_cfunc_wrapper": True,
}


class _PartLibrary(JITCodeLibrary):  # type: ignore[misc]
    """Unoptimized code of a kernel and its callees, optimized once by the kernel that links it."""

    def finalize(self) -> None:
        for library in dict.fromkeys(self._linking_libraries):
            self._reload_init.update(library._reload_init)
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalize_dynamic_globals()
        self._finalized = True

    def add_llvm_module(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout
        self._final_module.link_in(module)


@register_pass(mutates_CFG=True, analysis_only=False)
class _PartLowering(NativeLowering):  # type: ignore[misc]
    """Numba's lowering, with a `_PartLibrary` as its target."""

    _name = "part_lowering"

    def run_pass(self, state: Any) -> bool:
        state.library = _PartLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        super().run_pass(state)
        # Callers look a function up by its machine code, so store an empty object in its place.
        found = object()
        state.targetctx.insert_user_function(found, state["cr"].fndesc, [state.library])
        state["cr"] = state["cr"]._replace(cfunc=found)
        return True


class _PartCompiler(CompilerBase):  # type: ignore[misc]
    def define_pipelines(self) -> list[Any]:
        pipeline = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes = PassManager("parts")
        for each, what in pipeline.passes:
            passes.add_pass(_PartLowering if each is NativeLowering else each, what)
        passes.finalize()
        return [passes]


class _Part(CPUDispatcher):  # type: ignore[misc]
    """A kernel as inlined into other kernels: it has no machine code and Python cannot call it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        options = {**_OPTIONS, "no_cpython_wrapper": True}
        super().__init__(function, targetoptions=options, pipeline_class=_PartCompiler)

    def add_overload(self, result: Any) -> None:
        self.overloads[tuple(result.signature.args)] = result


class _Kernel(CPUDispatcher):  # type: ignore[misc]
    """A kernel that Python can call, with machine code on disk."""

    # Callees are compiled in from their `_Part`s. Numba would optimize, compile and store every
    # kernel along the call chain, so a callee seven calls deep would be compiled seven times. In
    # total this took three times as long.
    def __init__(self, function: Callable[..., Any], *, is_named: bool) -> None:
        super().__init__(function, targetoptions=dict(_OPTIONS))
        self._cache = _PackageCache(function, is_named=is_named)
        self._part = _Part(function)

    def get_call_template(self, arguments: Any, names: Any) -> Any:
        """Return the signature for a call from another kernel."""
        return self._part.get_call_template(arguments, names)

    def get_overload(self, signature: Any) -> Any:
        """Return the code that a calling kernel links."""
        return self._part.get_overload(signature)


def _compiled(function: _Function, *, is_named: bool) -> _Function:
    return cast("_Function", _Kernel(function, is_named=is_named))


def is_on_disk(function: Any, arguments: tuple[Any, ...]) -> bool:
    """Return whether the cache has machine code for these types, this machine and these sources."""
    return bool(function._cache.has(arguments, function.targetctx.codegen()))


def intrinsic(function: Callable[..., Any]) -> Any:
    """Return Numba's intrinsic decorator for a function that emits LLVM IR."""
    return numba.extending.intrinsic(function)


def cache_path() -> str:
    """Return the folder of compiled kernels.

    The folder is next to the sources, or in the user's cache if the sources are read-only.
    """
    return str(_PackageCache(_source_digest.__wrapped__).cache_path)
