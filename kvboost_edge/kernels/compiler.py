"""Compilation of kernels with Numba: options, the on-disk cache, and inlining into other kernels.

Only `jit.py` and `build.py` import this module, when something must be compiled.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llvmlite import binding
from numba.core import config
from numba.core.caching import (
    CompileResultCacheImpl,
    FunctionCache,
    IndexDataCacheFile,
    InTreeCacheLocator,
    NullCache,
    UserWideCacheLocator,
)
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.registry import CPUDispatcher
from numba.core.typed_passes import NativeLowering
from numba.core.types import Function
from numba.core.typing.templates import make_intrinsic_template

from kvboost_edge.host.atomic_files import alone_in
from kvboost_edge.host.file_memo import cache_directory, make_private
from kvboost_edge.kernels import sources
from kvboost_edge.kernels.library import kernel_library
from kvboost_edge.kernels.notices import tell_of_compilation

__all__ = ["CompiledKernel", "cache_folder", "intrinsic_type", "object_code"]

_LOG = logging.getLogger(__name__)


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


class _UserWideLocator(UserWideCacheLocator):  # type: ignore[misc]
    """Numba's folder in the home directory, if there is a home directory."""

    def ensure_cache_path(self) -> None:
        # Numba would create a folder named "~" in the working directory.
        if self.get_cache_path().startswith("~"):
            raise FileNotFoundError("the user has no home directory")
        super().ensure_cache_path()


class _CacheDirectoryLocator(InTreeCacheLocator):  # type: ignore[misc]
    """A folder in the cache directory, for users that can write to none of Numba's folders."""

    def get_cache_path(self) -> str:
        below = self.get_suitable_cache_subpath(self._py_file)
        return str(cache_directory().absolute() / "compiled" / below)

    def ensure_cache_path(self) -> None:
        path = Path(self.get_cache_path())
        # The files contain code that this process runs.
        if not (make_private(path.parent) and make_private(path)):
            raise PermissionError(f"{path} can be written by other users")
        tempfile.TemporaryFile(dir=path).close()


class _CacheFiles(CompileResultCacheImpl):  # type: ignore[misc]
    """Numba's files and folders, with a folder in the cache directory as the last choice."""

    _locator_classes = (
        *(
            _UserWideLocator if each is UserWideCacheLocator else each
            for each in CompileResultCacheImpl._locator_classes
        ),
        _CacheDirectoryLocator,
    )


class _PackageCache(FunctionCache):  # type: ignore[misc]
    """Numba's file cache, keyed on the sources of all kernels instead of that of one function.

    Args:
        function: the Python function to compile.
        is_named: True for `named_kernel`, whose code is identified by its name and the sources. If
            False, Numba adds a hash of the closure. That hash differs in every process if the
            closure holds other kernels.

    Raises:
        RuntimeError: Numba and the package have no folder that can be written.
    """

    _impl_class = _CacheFiles

    def __init__(self, function: Callable[..., Any], *, is_named: bool = False) -> None:
        super().__init__(function)
        self._is_named = is_named
        locator = self._impl.locator
        self._cache_file = _NamedDataFile(
            self._cache_path, self._impl.filename_base, locator.get_source_stamp()
        )

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        # The variant of the kernels follows the process's kernel library, if it has one.
        library = kernel_library()
        form = ""
        if library is not None:
            facts = library.manifest
            form = f"{facts.target} {facts.dot_form} {facts.cpu} {facts.features}"
        if self._is_named:
            return sig, codegen.magic_tuple(), form, sources.compiled_digest()
        return (*super()._index_key(sig, codegen), form, sources.compiled_digest())

    def has(self, sig: Any, codegen: Any) -> bool:
        return bool(self._cache_file.holds(self._index_key(sig, codegen)))

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Load machine code; clear the index if its types are from another package version."""
        found = None
        try:
            found = super().load_overload(sig, target_context)
        except (AttributeError, ImportError, TypeError):
            self.flush()
        if found is None:
            tell_of_compilation()
        return found


class _NoCache(NullCache):  # type: ignore[misc]
    """Cache that keeps nothing, for processes that can write to no folder."""

    def has(self, sig: Any, codegen: Any) -> bool:
        return False

    def load_overload(self, sig: Any, target_context: Any) -> None:
        tell_of_compilation()


def _cache_of(function: Callable[..., Any], *, is_named: bool = False) -> _PackageCache | _NoCache:
    """Return the cache of a function, or one that keeps nothing if no folder can be written."""
    try:
        return _PackageCache(function, is_named=is_named)
    except RuntimeError as error:
        _warn(cache_directory())
        _LOG.debug("%s", error)
        return _NoCache()


@functools.cache
def _warn(directory: Path) -> None:
    """Log once that compiled kernels are not kept."""
    _LOG.warning(
        "this process compiles its kernels and does not keep them, because neither the package's "
        "folder nor Numba's nor %s can be written by this user alone. Set KVBOOST_EDGE_CACHE or "
        "NUMBA_CACHE_DIR to a writable folder",
        directory,
    )


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


class CompiledKernel(CPUDispatcher):  # type: ignore[misc]
    """A kernel that Python can call, with machine code on disk."""

    # Callees are compiled in from their `_Part`s. Numba would optimize, compile and store every
    # kernel along the call chain, so a callee seven calls deep would be compiled seven times. In
    # total this took three times as long.
    def __init__(self, function: Callable[..., Any], *, is_named: bool) -> None:
        super().__init__(function, targetoptions=dict(_OPTIONS))
        self._cache = _cache_of(function, is_named=is_named)
        self._part = _Part(function)

    def get_call_template(self, arguments: Any, names: Any) -> Any:
        """Return the signature for a call from another kernel."""
        return self._part.get_call_template(arguments, names)

    def get_overload(self, signature: Any) -> Any:
        """Return the code that a calling kernel links."""
        return self._part.get_overload(signature)

    @property
    def part(self) -> Any:
        """The kernel as inlined into other kernels."""
        return self._part


def intrinsic_type(handle: Any, function: Callable[..., Any]) -> Any:
    """Return Numba's type of an intrinsic, whose handle is the global that kernels refer to."""
    return Function(make_intrinsic_template(handle, function, function.__name__))


def object_code(
    kernel: CompiledKernel, arguments: tuple[Any, ...], symbol: str
) -> tuple[bytes, Any]:
    """Compile a kernel for a kernel library.

    Args:
        kernel: the kernel.
        arguments: Numba types of its arguments.
        symbol: name of its function in the object file. No other name is visible.

    Returns:
        The object file, and the Numba type of the result.

    Raises:
        ValueError: the code contains addresses of this process.
    """
    kernel.part.compile(arguments)
    result = kernel.part.overloads[arguments]
    library = JITCodeLibrary(result.library.codegen, symbol)
    library.add_linking_library(result.library)
    module = result.library._final_module.clone()
    found = result.fndesc.llvm_func_name
    for value in (*module.functions, *module.global_variables):
        if not value.is_declaration and value.name != found and not value.name.startswith("llvm."):
            value.linkage = "internal"
    module.get_function(found).name = symbol
    library._final_module = module
    library._optimize_final_module()
    for value in module.global_variables:
        if value.name.startswith("numba.dynamic.globals"):
            raise ValueError(f"{symbol} uses {value.name}, an address in this process")
    machine = binding.Target.from_triple(binding.get_process_triple()).create_target_machine(
        cpu=library.codegen._get_host_cpu_name(),
        features=library.codegen._tm_features,
        opt=config.OPT,
        reloc="pic",
        codemodel="default",
    )
    return machine.emit_object(module), result.signature.return_type


def cache_folder() -> Path | None:
    """Return the folder of compiled kernels, or None if no folder can be written."""
    path = _cache_of(sources.digest_of).cache_path
    return None if path is None else Path(path)
