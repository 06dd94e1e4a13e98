"""Kernels compiled separately, which other kernels call by address.

A callee named in a kernel is compiled into it. A callee called by address is not: a model compiles
only the kernels of its own weight formats and KV dtype, in several processes at once. A call by
address costs a few nanoseconds; the kernels run for microseconds.
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
        kernel: a module-level kernel, or one in a table of entries of its module. Its `__name__`
            is the name that it has there.
        arguments: Numba types of its arguments.
    """

    def __init__(self, kernel: Callable[..., Any], *arguments: Any) -> None:
        self._kernel: Any = kernel
        self.arguments = arguments
        self.name = f"{kernel.__module__}:{kernel.__name__}"
        _ENTRIES[self.name] = self

    @property
    def is_ready(self) -> bool:
        """True if the machine code is in this process or on disk."""
        return self.arguments in self._kernel.overloads or is_on_disk(self._kernel, self.arguments)

    def compile(self) -> None:
        """Compile the kernel, or load its machine code from disk."""
        self._kernel.compile(self.arguments)

    @property
    def address(self) -> int:
        """Address of the machine code for `caller`, compiled if needed; valid until exit."""
        self.compile()
        result = self._kernel.overloads[self.arguments]
        return int(result.library.get_pointer_to_function(result.fndesc.llvm_func_name))


_ENTRIES: dict[str, KernelEntry] = {}


def entry_named(name: str) -> KernelEntry:
    """Return the entry of this name, importing its module; raise ConfigError if unknown."""
    module = name.partition(":")[0]
    if module.startswith(f"{_PACKAGE}."):
        importlib.import_module(module)
    if name not in _ENTRIES:
        raise ConfigError(f"{name!r} is not a kernel of {_PACKAGE}")
    return _ENTRIES[name]


def caller(*arguments: Any) -> Any:
    """Return the intrinsic `call(address, (...))` for entries with these argument types.

    The entries return nothing. An error in the entry propagates to the caller.
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
