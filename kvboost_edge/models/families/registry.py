"""All families by model_type, and their GGUF files by architecture.

A family is one file of this folder that has `MODEL_TYPES`, and `GGUF` where GGUF files of it are
read. The files are found, not listed: a new family is a new file.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from kvboost_edge.models.families.family import Family, ModelType, Wrapper
from kvboost_edge.models.families.gguf_names import GgufArchitecture

__all__ = [
    "ARCHITECTURES",
    "FAMILIES",
    "MODEL_TYPES",
    "STORED_NAMES",
    "WRAPPERS",
]

_READERS = ("registry",)  # the modules that read the families' files


def _files() -> Iterator[ModuleType]:
    for found in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if found.name not in _READERS:
            yield importlib.import_module(f"{__package__}.{found.name}")


def _collected(name: str) -> Mapping[str, Any]:
    """Collect the entries of all files under one name, each key once."""
    found: dict[str, Any] = {}
    for module in _files():
        entries: Mapping[str, Any] = getattr(module, name, {})
        twice = found.keys() & entries.keys()
        if twice:
            raise ValueError(f"{module.__name__}: {name} has {sorted(twice)} a second time")
        found |= entries
    return MappingProxyType(found)


MODEL_TYPES: Mapping[str, ModelType] = _collected("MODEL_TYPES")
"""What is known of each model_type."""

ARCHITECTURES: Mapping[str, GgufArchitecture] = _collected("GGUF")
"""Architectures of GGUF files that are read, by general.architecture."""

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {name: known.family for name, known in MODEL_TYPES.items() if known.family is not None}
)
"""Families of the native runner by model_type."""

WRAPPERS: Mapping[str, Wrapper] = MappingProxyType(
    {name: known.wrapper for name, known in MODEL_TYPES.items() if known.wrapper is not None}
)
"""Model types of several parts whose language model is known, by model_type of the whole."""

STORED_NAMES: tuple[Callable[[str], str], ...] = tuple(
    family.stored_name for family in FAMILIES.values() if family.stored_name is not None
)
"""What turns the names of safetensors into Llama's, of the families that have others."""
