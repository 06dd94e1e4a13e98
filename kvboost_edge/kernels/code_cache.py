"""The on-disk cache of compiled kernels: its folders, files and keys.

Only `compiler.py` and `jit.py` import this module, when something must be compiled.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from numba.core.caching import (
    CompileResultCacheImpl,
    FunctionCache,
    IndexDataCacheFile,
    InTreeCacheLocator,
    NullCache,
    UserProvidedCacheLocator,
    UserWideCacheLocator,
)

from kvboost_edge.host.atomic_files import alone_in
from kvboost_edge.host.file_memo import cache_directory, make_private
from kvboost_edge.host.processor import describe_cpu
from kvboost_edge.kernels import sources
from kvboost_edge.kernels.library import kernel_library
from kvboost_edge.kernels.notices import tell_of_compilation

__all__ = ["cache_folder", "cache_of"]

_LOG = logging.getLogger(__name__)
_UNFINISHED = re.compile(r"\.nb[ic]\.tmp\.[0-9a-f]{16}$")
_UNFINISHED_S = 24 * 3600  # age at which the writer of an unfinished file must have died


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
        path = self.path_of(key)
        return path is not None and path.exists()

    def path_of(self, key: tuple[Any, ...]) -> Path | None:
        """Return the machine-code file that the index has for the key, or None."""
        name = self._load_index().get(key)
        return None if name is None else Path(self._data_path(name))

    def _load_index(self) -> dict[tuple[Any, ...], str]:
        """Return the index; it is empty if its file is missing or cannot be loaded."""
        # A file of another version can name types that no longer exist. A power failure can leave
        # a file empty.
        try:
            index: dict[tuple[Any, ...], str] = super()._load_index()
        except Exception as error:
            _LOG.debug("%s cannot be loaded: %r", self._index_path, error)
            return {}
        return index

    @contextlib.contextmanager
    def _open_for_write(self, filepath: str) -> Iterator[IO[bytes]]:
        with super()._open_for_write(filepath) as file:
            yield file
            # Otherwise a power failure after the renaming could leave a file without its contents.
            file.flush()
            os.fsync(file.fileno())

    def _save_locked(self, key: tuple[Any, ...], name: str, data: Any) -> None:
        """Write a file of machine code and its index entry; the caller holds the folder's lock."""
        # Without the lock, two processes that update the index at once would lose an entry and its
        # file.
        self._save_data(name, data)
        kept = {
            known: file for known, file in self._load_index().items() if known[-1] == key[-1]
        } | {key: name}
        self._save_index(kept)
        self._remove_old({self._index_name, *kept.values()})

    def _remove_old(self, kept: set[str]) -> None:
        """Remove files of older sources, and files that killed processes did not finish.

        The name of a file contains the line of the kernel, which an older version may have in
        another place.
        """
        kernel, line_and_version = self._index_name.removesuffix(".nbi").rsplit("-", 1)
        version = line_and_version.partition(".")[2]
        file = re.compile(rf"{re.escape(kernel)}-\w+\.{re.escape(version)}\.(nbi|\w+\.nbc)")
        for path in Path(self._cache_path).iterdir():
            with contextlib.suppress(OSError):
                if _UNFINISHED.search(path.name):
                    is_old = time.time() - path.stat().st_mtime > _UNFINISHED_S
                else:
                    is_old = file.fullmatch(path.name) is not None and path.name not in kept
                if is_old:
                    path.unlink(missing_ok=True)


def _is_trusted(folder: Path, *, is_parent: bool) -> bool:
    """Return whether only this user, root and the folder's group can change a folder of kernels.

    Args:
        folder: the folder.
        is_parent: True for the folder that contains it. In one with the sticky bit, such as /tmp,
            other users cannot replace this user's folders.
    """
    # The group is trusted, since Kubernetes gives it the right to write to volumes.
    if not hasattr(os, "getuid"):
        return True
    status = folder.stat()
    is_sticky = is_parent and bool(status.st_mode & stat.S_ISVTX)
    return status.st_uid in (os.getuid(), 0) and (is_sticky or not status.st_mode & stat.S_IWOTH)


class _UserProvidedLocator(UserProvidedCacheLocator):  # type: ignore[misc]
    """A folder in NUMBA_CACHE_DIR, unless other users can change what is in it."""

    def ensure_cache_path(self) -> None:
        path = Path(self.get_cache_path())
        for each in (path.parent, path):
            each.mkdir(mode=0o755, parents=True, exist_ok=True)
            if not _is_trusted(each, is_parent=each != path):
                _warn_untrusted(each, path.parent)
                raise PermissionError(f"{each} can be changed by other users")
        super().ensure_cache_path()


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
            {
                UserProvidedCacheLocator: _UserProvidedLocator,
                UserWideCacheLocator: _UserWideLocator,
            }.get(each, each)
            for each in CompileResultCacheImpl._locator_classes
        ),
        _CacheDirectoryLocator,
    )


@functools.cache
def _reports_i8mm() -> bool:
    return "i8mm" in describe_cpu().flags


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
        # Otherwise one variant depends on more than the processor's name and features in Numba's
        # tuple: a virtual machine may hide i8mm.
        library = kernel_library()
        form = "i8mm" if _reports_i8mm() else ""
        if library is not None:
            facts = library.manifest
            form = f"{facts.target} {facts.dot_form} {facts.cpu} {facts.features}"
        if self._is_named:
            return sig, codegen.magic_tuple(), form, sources.compiled_digest()
        return (*super()._index_key(sig, codegen), form, sources.compiled_digest())

    def has(self, sig: Any, codegen: Any) -> bool:
        return bool(self._cache_file.holds(self._index_key(sig, codegen)))

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Load machine code; delete a file that cannot be loaded."""
        found = None
        try:
            found = super().load_overload(sig, target_context)
        except Exception as error:
            self._drop(sig, target_context, error)
        if found is None:
            tell_of_compilation()
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        """Store machine code; log a warning if that fails, for example on a full disk."""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _LOG.debug("%s cannot be stored: %r", self._name, error)
            _warn_unsaved(error.strerror or str(error))

    def _drop(self, sig: Any, target_context: Any, error: Exception) -> None:
        path = self._cache_file.path_of(self._index_key(sig, target_context.codegen()))
        _LOG.warning("%s cannot be loaded, so the kernel is compiled again: %r", path, error)
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


class _NoCache(NullCache):  # type: ignore[misc]
    """Cache that keeps nothing, for processes that can write to no folder."""

    def has(self, sig: Any, codegen: Any) -> bool:
        return False

    def load_overload(self, sig: Any, target_context: Any) -> None:
        tell_of_compilation()


def cache_of(function: Callable[..., Any], *, is_named: bool = False) -> _PackageCache | _NoCache:
    """Return the cache of a function, or one that keeps nothing if no folder can be written."""
    try:
        return _PackageCache(function, is_named=is_named)
    except RuntimeError as error:
        _warn(cache_directory())
        _LOG.debug("%s", error)
        return _NoCache()


def cache_folder() -> Path | None:
    """Return the folder of compiled kernels, or None if no folder can be written."""
    path = cache_of(sources.digest_of).cache_path
    return None if path is None else Path(path)


@functools.cache
def _warn(directory: Path) -> None:
    """Log once that compiled kernels are not kept."""
    _LOG.warning(
        "this process compiles its kernels and does not keep them, because neither the package's "
        "folder nor Numba's nor %s can be written by this user alone. Set KVBOOST_EDGE_CACHE or "
        "NUMBA_CACHE_DIR to a writable folder",
        directory,
    )


@functools.cache
def _warn_unsaved(problem: str) -> None:
    """Log once that compiled kernels cannot be stored."""
    _LOG.warning(
        "compiled kernels cannot be stored in %s, and the next start compiles them again: %s. Free "
        "space there, or set NUMBA_CACHE_DIR to another folder",
        cache_folder(),
        problem,
    )


@functools.cache
def _warn_untrusted(folder: Path, given: Path) -> None:
    """Log once that a folder of compiled kernels is not used.

    Args:
        folder: the folder that other users can change.
        given: the folder in NUMBA_CACHE_DIR.
    """
    # Only its owner can change a folder's mode. A volume's mount point often belongs to root.
    if folder.stat().st_uid == os.getuid():
        advice = f"Use `chmod o-w {folder}`"
    else:
        advice = f"Set it to a folder of this user, such as a new one below {given}"
    _LOG.warning(
        "NUMBA_CACHE_DIR is not used, because other users can change %s and this process would run "
        "their code. %s",
        folder,
        advice,
    )
