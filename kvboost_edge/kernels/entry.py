"""Separately compiled kernels that other kernels call by address.

Numba compiles a kernel that is called by name into its caller. A kernel that is called by address
is compiled on its own. A model therefore compiles only the kernels for its weight formats and KV
dtype, and several processes can compile them in parallel. A call by address costs a few
nanoseconds, while the kernels run for microseconds.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from numba.core import cgutils, types
from numba.core.types.containers import BaseTuple

from kvboost_edge.errors import ConfigError
from kvboost_edge.kernels.jit import intrinsic, is_on_disk

__all__ = ["KernelEntry", "caller", "entry_named"]

_PACKAGE = __name__.partition(".")[0]

Value = Any
Builder = Any


class KernelEntry:
    """A kernel with one fixed signature, compiled separately.

    Args:
        kernel: a module-level kernel, or a kernel in its module's table of entries. Its `__name__`
            is its name there.
        arguments: Numba types of the arguments.
    """

    def __init__(self, kernel: Callable[..., Any], *arguments: Any) -> None:
        self._kernel: Any = kernel
        self.arguments = arguments
        self.name = f"{kernel.__module__}:{kernel.__name__}"
        _ENTRIES[self.name] = self

    @property
    def is_ready(self) -> bool:
        """True if the machine code is in memory or on disk."""
        return self.arguments in self._kernel.overloads or is_on_disk(self._kernel, self.arguments)

    def compile(self) -> None:
        """Compile the kernel, or load its machine code from disk if it exists there."""
        self._kernel.compile(self.arguments)

    @property
    def address(self) -> int:
        """Address of the machine code, for use with `caller`; compiles the kernel if needed.

        The address is valid until the process exits.
        """
        self.compile()
        result = self._kernel.overloads[self.arguments]
        return int(result.library.get_pointer_to_function(result.fndesc.llvm_func_name))


_ENTRIES: dict[str, KernelEntry] = {}


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


def caller(*arguments: Any) -> Any:
    """Return the intrinsic `call(address, (...))` for entries with these argument types.

    Entries return nothing. An exception in an entry propagates to the caller.
    """

    @intrinsic
    def call(typing: Any, address: Any, values: Any) -> Any:
        def codegen(context: Any, b: Builder, signature: Any, given: Sequence[Value]) -> Value:
            kind = context.call_conv.get_function_type(types.none, arguments)
            function = b.inttoptr(given[0], kind.as_pointer())
            values = cgutils.unpack_tuple(b, given[1])
            status, _ = context.call_conv.call_function(b, function, types.none, arguments, values)
            with cgutils.if_unlikely(b, status.is_error):
                context.call_conv.return_status_propagate(b, status)
            return context.get_dummy_value()

        return types.void(types.int64, BaseTuple.from_types(arguments)), codegen

    return call
