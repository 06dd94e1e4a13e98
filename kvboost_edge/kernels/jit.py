"""The only place where Numba's compile options exist."""

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
    """Digest of every source file under this folder: code inlined from one into another must not
    outlive an edit.
    """
    return digest_of(Path(__file__).parent)


def digest_of(room: Path) -> str:
    """SHA-256 over names and contents of the Python files in a folder and in those below it."""
    digest = hashlib.sha256()
    for path in sorted(room.rglob("*.py")):
        digest.update(path.relative_to(room).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


class _NamedDataFile(IndexDataCacheFile):  # type: ignore[misc]
    """Files of machine code named after what they hold.

    Numba numbers them, and writes the index that names a file before the file: a process that looks
    in between, or any after one that was killed there, would run what an older version or another
    process left under that number.
    """

    def save(self, key: tuple[Any, ...], data: Any) -> None:
        digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
        name = f"{self._index_name.removesuffix('.nbi')}.{digest}.nbc"
        with alone_in(Path(self._cache_path)):
            self._save_locked(key, name, data)

    def holds(self, key: tuple[Any, ...]) -> bool:
        """Whether there is a file for the key."""
        name = self._load_index().get(key)
        return name is not None and Path(self._data_path(name)).exists()

    def _save_locked(self, key: tuple[Any, ...], name: str, data: Any) -> None:
        """The index is read, changed and written: another process that did so meanwhile would lose
        its entry, and the code it named.
        """
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
    """Numba's file cache keys on the file of the function alone; this one keys on all kernel
    sources.

    Numba adds a hash of what a closure holds, and that of another kernel is new in every process.
    is_named: the function's name, which its files bear, and the sources say what it is, see
    `named_kernel`.
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
        """As Numba's; an index that names types of another version of this package is emptied, not
        an error.
        """
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
    """Call `tell` once, from the thread that runs a kernel, when the next one is found that was
    never compiled here nor ahead (see aot.py): some seconds pass then without a word. It replaces
    what was given before; None: nothing is called.
    """
    _listeners[:] = [] if tell is None else [tell]


def kernel(function: _Function) -> _Function:
    """Compile without the GIL, with machine semantics for division and no fastmath flag; cached on
    disk.

    No fastmath flag may stand in anything that reaches a result: the compiler would fuse or reorder
    by context, and the same row would differ in bits between a batch of one and a batch of many.
    Fused multiply-adds are written out.
    """
    return _compiled(function, is_named=False)


def named_kernel(name: str) -> Callable[[_Function], _Function]:
    """`kernel` for a function that is made several times over, each time around other kernels or
    numbers.

    No two kernels of a module may have one name: on disk, and where machine code is linked, they
    are told apart by it.
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
    """The code of a part and of the parts in it, as it was written: who links it optimizes it, and
    once.
    """

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
    """Numba's, into a `_PartLibrary`; callers find it by an empty object, which stands for machine
    code.
    """

    _name = "part_lowering"

    def run_pass(self, state: Any) -> bool:
        state.library = _PartLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        super().run_pass(state)
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
    """A kernel inside others. It has no machine code of its own and cannot be called from
    Python.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        options = {**_OPTIONS, "no_cpython_wrapper": True}
        super().__init__(function, targetoptions=options, pipeline_class=_PartCompiler)

    def add_overload(self, result: Any) -> None:
        self.overloads[tuple(result.signature.args)] = result


class _Kernel(CPUDispatcher):  # type: ignore[misc]
    """A kernel as Python calls it, in machine code that is kept on disk.

    What it calls is compiled into it from its `_Part`s. Numba would optimize every kernel on its
    way up, make machine code of it and keep that too: what lies seven calls deep, seven times,
    which takes three times as long in all.
    """

    def __init__(self, function: Callable[..., Any], *, is_named: bool) -> None:
        super().__init__(function, targetoptions=dict(_OPTIONS))
        self._cache = _PackageCache(function, is_named=is_named)
        self._part = _Part(function)

    def get_call_template(self, arguments: Any, names: Any) -> Any:
        """How a kernel that calls this one sees it."""
        return self._part.get_call_template(arguments, names)

    def get_overload(self, signature: Any) -> Any:
        """What a kernel that calls this one links."""
        return self._part.get_overload(signature)


def _compiled(function: _Function, *, is_named: bool) -> _Function:
    return cast("_Function", _Kernel(function, is_named=is_named))


def is_on_disk(function: Any, arguments: tuple[Any, ...]) -> bool:
    """Whether machine code of a kernel for these argument types is kept for this machine and these
    sources.
    """
    return bool(function._cache.has(arguments, function.targetctx.codegen()))


def intrinsic(function: Callable[..., Any]) -> Any:
    """Numba's intrinsic decorator: the function emits LLVM IR instead of being compiled."""
    return numba.extending.intrinsic(function)


def cache_path() -> str:
    """Where compiled kernels are kept: beside the sources, or in the user's cache where those are
    read-only.
    """
    return str(_PackageCache(_source_digest.__wrapped__).cache_path)
