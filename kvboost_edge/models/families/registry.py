"""Registry of all families by model_type, and of GGUF architectures by name.

A family is a file in this folder that defines `MODEL_TYPES`. It also defines `GGUF` if the family
can be read from GGUF files, and `ASSISTANTS` if there are assistants for it. New files are found
automatically.
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
    "ASSISTANTS",
    "FAMILIES",
    "MODEL_TYPES",
    "STORED_NAMES",
    "WRAPPERS",
]

_READERS = ("registry",)  # modules in this folder that are not families


def _files() -> Iterator[ModuleType]:
    for found in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if found.name not in _READERS:
            yield importlib.import_module(f"{__package__}.{found.name}")


def _collected(name: str) -> Mapping[str, Any]:
    """Return the merged entries of the mapping `name` in all files.

    Raises:
        ValueError: two files define the same key.
    """
    found: dict[str, Any] = {}
    for module in _files():
        entries: Mapping[str, Any] = getattr(module, name, {})
        twice = found.keys() & entries.keys()
        if twice:
            raise ValueError(f"{module.__name__}: {name} redefines {sorted(twice)}")
        found |= entries
    return MappingProxyType(found)


MODEL_TYPES: Mapping[str, ModelType] = _collected("MODEL_TYPES")
"""Model types by name."""

ARCHITECTURES: Mapping[str, GgufArchitecture] = _collected("GGUF")
"""Supported GGUF architectures, by the value of general.architecture."""

ASSISTANTS: Mapping[str, str] = _collected("ASSISTANTS")
"""Model types of the assistants that draft for a model, with the model_type of their layers."""

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {name: known.family for name, known in MODEL_TYPES.items() if known.family is not None}
)
"""Families that the native runner supports, by model_type."""

WRAPPERS: Mapping[str, Wrapper] = MappingProxyType(
    {name: known.wrapper for name, known in MODEL_TYPES.items() if known.wrapper is not None}
)
"""Composite models with a known language model, by their model_type."""

STORED_NAMES: tuple[Callable[[str], str], ...] = tuple(
    family.stored_name for family in FAMILIES.values() if family.stored_name is not None
)
"""Functions that map tensor names in safetensors to Llama's, of families that use other names."""
