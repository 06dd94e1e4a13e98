"""Separately compiled kernels that other kernels call by address.

Numba compiles a kernel that is called by name into its caller. A kernel that is called by address
is compiled on its own. A model therefore compiles only the kernels for its weight formats and KV
dtype, and several processes can compile them in parallel. A call by address costs a few
nanoseconds, while the kernels run for microseconds.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, cast

from kvboost_edge.errors import ConfigError
from kvboost_edge.kernels.jit import intrinsic, is_on_disk
from kvboost_edge.kernels.lazy import cgutils, types
from kvboost_edge.kernels.library import kernel_library
from kvboost_edge.kernels.signature import NOTHING, Kind, Tuple, function_at, numba_type

__all__ = ["KernelEntry", "all_entries", "caller", "entry_named"]

_PACKAGE = __name__.partition(".")[0]

Value = Any
Builder = Any


class KernelEntry:
    """A kernel with one fixed signature, compiled separately.

    A kernel library contains entries only. If the process uses a library, an entry's machine code
    comes from there.

    Args:
        kernel: a module-level kernel, or a kernel in its module's table of entries. Its `__name__`
            is its name there.
        arguments: types of the arguments.
        returns: type of the result.
    """

    def __init__(
        self, kernel: Callable[..., Any], *arguments: Kind, returns: Kind = NOTHING
    ) -> None:
        self._kernel = cast("Any", kernel)
        self._kernel.entry = self
        self.kinds = arguments
        self.returns = returns
        self.name = f"{kernel.__module__}:{kernel.__name__}"
        _ENTRIES[self.name] = self

    @property
    def kernel(self) -> Any:
        """The kernel."""
        return self._kernel

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Numba types of the arguments."""
        return tuple(map(numba_type, self.kinds))

    @functools.cached_property
    def _library_address(self) -> int:
        """Address of the machine code in the process's kernel library, or 0."""
        library = kernel_library()
        return 0 if library is None else library.address_of(self.name)

    @functools.cached_property
    def library_call(self) -> Callable[[tuple[Any, ...]], tuple[bool, Any]] | None:
        """Function that calls the code in the kernel library, or None. See `function_at`."""
        if not self._library_address:
            return None
        return function_at(self._library_address, self.name, self.kinds, self.returns)

    @property
    def is_stored(self) -> bool:
        """True if the machine code is in the kernel library or on disk."""
        return bool(self._library_address) or is_on_disk(self._kernel, self.arguments)

    @property
    def is_ready(self) -> bool:
        """True if the machine code is in the kernel library, in memory or on disk."""
        if self._library_address:
            return True
        return self.arguments in self._kernel.dispatcher.overloads or self.is_stored

    def compile(self) -> None:
        """Compile the kernel, or load its machine code from disk if it exists there."""
        if not self._library_address:
            self._kernel.dispatcher.compile(self.arguments)

    @property
    def address(self) -> int:
        """Address of the machine code, for use with `caller`; compiles the kernel if needed.

        The address is valid until the process exits.
        """
        if self._library_address:
            return self._library_address
        self.compile()
        result = self._kernel.dispatcher.overloads[self.arguments]
        return int(result.library.get_pointer_to_function(result.fndesc.llvm_func_name))


_ENTRIES: dict[str, KernelEntry] = {}


def all_entries() -> list[KernelEntry]:
    """Return the entries of all modules that are imported."""
    return [entry for name, entry in _ENTRIES.items() if name.startswith(f"{_PACKAGE}.")]


def entry_named(name: str) -> KernelEntry:
    """Import the module of the entry with this name and return the entry.

    Raises:
        ConfigError: the entry does not exist.
    """
    module = name.partition(":")[0]
    if module.startswith(f"{_PACKAGE}."):
        importlib.import_module(module)
    if name not in _ENTRIES:
        raise ConfigError(f"{name!r} is not the name of a kernel in {_PACKAGE}")
    return _ENTRIES[name]


def caller(*kinds: Kind) -> Any:
    """Return the intrinsic `call(address, (...))` for entries with these argument types.

    Entries return nothing. An exception in an entry propagates to the caller.
    """

    @intrinsic
    def call(typing: Any, address: Any, values: Any) -> Any:
        arguments = tuple(map(numba_type, kinds))

        def codegen(context: Any, b: Builder, signature: Any, given: Sequence[Value]) -> Value:
            kind = context.call_conv.get_function_type(types.none, arguments)
            function = b.inttoptr(given[0], kind.as_pointer())
            values = cgutils.unpack_tuple(b, given[1])
            status, _ = context.call_conv.call_function(b, function, types.none, arguments, values)
            with cgutils.if_unlikely(b, status.is_error):
                context.call_conv.return_status_propagate(b, status)
            return context.get_dummy_value()

        return types.void(types.int64, numba_type(Tuple(tuple, kinds))), codegen

    return call
