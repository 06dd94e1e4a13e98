"""Modules of Numba and LLVM that are imported when a kernel must be compiled.

Importing them takes more time and memory than any other step of a start. A process whose kernels
are all in a kernel library (`library.py`) never imports them.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["binding", "cgutils", "codegen", "numba_config", "types"]


class _Module:
    """Stand-in for a module, imported at the first access to one of its names."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


# Names are not kept here, because `numba.config` may change.
binding: Any = _Module("llvmlite.binding")
cgutils: Any = _Module("numba.core.cgutils")
codegen: Any = _Module("numba.core.codegen")
numba_config: Any = _Module("numba.core.config")
types: Any = _Module("numba.core.types")
