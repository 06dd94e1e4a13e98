"""Kernels that are compiled each on its own, and that other kernels call by their addresses.

What a kernel names is compiled into it. What it calls by address is not: a model needs the code of
its own weights and of its own cache alone, and the entries it needs can be compiled by several
processes at once. A call by address costs some nanoseconds, of kernels that run for microseconds.
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
    """A kernel with the one signature it is called with: Numba's types of its arguments.

    The kernel is a name of its module, or is in a table of entries there, and has the name it has
    there.
    """

    def __init__(self, kernel: Callable[..., Any], *arguments: Any) -> None:
        self._kernel: Any = kernel
        self.arguments = arguments
        self.name = f"{kernel.__module__}:{kernel.__name__}"
        _ENTRIES[self.name] = self

    @property
    def is_ready(self) -> bool:
        """Whether the machine code is in this process or on disk."""
        return self.arguments in self._kernel.overloads or is_on_disk(self._kernel, self.arguments)

    def compile(self) -> None:
        """Compile, or load what is compiled."""
        self._kernel.compile(self.arguments)

    @property
    def address(self) -> int:
        """Address of the machine code for `caller`, compiled or loaded first; it stays as long as
        the process.
        """
        self.compile()
        result = self._kernel.overloads[self.arguments]
        return int(result.library.get_pointer_to_function(result.fndesc.llvm_func_name))


_ENTRIES: dict[str, KernelEntry] = {}


def entry_named(name: str) -> KernelEntry:
    """The entry whose `name` this is, in whatever process. ConfigError where there is none."""
    module = name.partition(":")[0]
    if module.startswith(f"{_PACKAGE}."):
        importlib.import_module(module)
    if name not in _ENTRIES:
        raise ConfigError(f"{name!r} is no kernel of {_PACKAGE}")
    return _ENTRIES[name]


def caller(*arguments: Any) -> Any:
    """The function `call(address, (…))`, for kernels, that calls an entry of such arguments that
    returns nothing.
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
