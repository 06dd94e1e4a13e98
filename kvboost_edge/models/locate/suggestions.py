"""Recommended models by memory size, and suggestions for unknown model names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from kvboost_edge.models.locate.ollama_store import OLLAMA

__all__ = ["SUGGESTIONS", "Suggestion", "name_hint"]

_EVERYDAY_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(:[A-Za-z0-9][\w.-]*)?")


class Suggestion(NamedTuple):
    """Recommended model.

    Attributes:
        memory_gb: memory in GB of a machine that can run the model with enough room for its KV
            cache.
        name: name on the hub, as accepted by `-m`.
        file_bytes: approximate size of the file in bytes.
        licence: licence of the model.
        ollama: name in Ollama's library.
    """

    memory_gb: int
    name: str
    file_bytes: float
    licence: str
    ollama: str


SUGGESTIONS = (
    Suggestion(2, "Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M", 0.49e9, "Apache 2.0", "qwen2.5:0.5b"),
    Suggestion(2, "Qwen/Qwen3-0.6B-GGUF:Q8_0", 0.64e9, "Apache 2.0", "qwen3:0.6b"),
    Suggestion(4, "Qwen/Qwen2.5-1.5B-Instruct-GGUF:Q4_K_M", 1.12e9, "Apache 2.0", "qwen2.5:1.5b"),
    Suggestion(4, "Qwen/Qwen3-1.7B-GGUF:Q8_0", 1.83e9, "Apache 2.0", "qwen3:1.7b"),
    Suggestion(8, "Qwen/Qwen3-4B-GGUF:Q4_K_M", 2.50e9, "Apache 2.0", "qwen3:4b"),
    Suggestion(16, "Qwen/Qwen3-8B-GGUF:Q4_K_M", 5.03e9, "Apache 2.0", "qwen3:8b"),
    Suggestion(32, "Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M", 18.6e9, "Apache 2.0", "qwen3:30b-a3b"),
)
"""Recommended models, smallest first. docs/models.md has the same table."""


def name_hint(name: str, ollama_names: Iterable[str]) -> str:
    """Return advice for an unknown model name such as `qwen3:0.6b`, or "" for names of another
    form.

    Args:
        name: unknown name.
        ollama_names: models in Ollama's store on this machine, as accepted by `-m`.
    """
    if not _EVERYDAY_NAME.fullmatch(name):
        return ""
    wanted = name.lower()
    here = [one for one in ollama_names if _is_meant(wanted, one.removeprefix(OLLAMA))]
    known = [one.name for one in SUGGESTIONS if _is_meant(wanted, one.ollama)]
    close = [*here[:2], *known[:2]]
    likely = f"did you mean {' or '.join(close)}? " if close else ""
    return (
        f"{likely}Ollama's models are written {OLLAMA}NAME, such as {OLLAMA}{name}, and the hub's "
        "owner/name; `kvboost-edge models` lists the models on this machine, `kvboost-edge models "
        "--suggest` recommended ones"
    )


def _is_meant(wanted: str, name: str) -> bool:
    """Return whether a name starts with `wanted`, followed by a tag, size or version."""
    return re.match(rf"{re.escape(wanted)}(?![a-z])", name.lower()) is not None
