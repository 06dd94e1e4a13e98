"""GGUF files in the layout of Ollama's converters, made from files in llama.cpp's layout.

The differences are those that Ollama's translation for llama.cpp lists (llama/compat in its
repository).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter


class OllamaChange(NamedTuple):
    """What Ollama's converter does differently for a family.

    Attributes:
        architecture: its name of the architecture, or "" if it is the same.
        keys: llama.cpp's keys of the architecture -> Ollama's, or None for a key that is missing.
        added: keys that only Ollama writes, with or without the architecture's prefix ("*.").
        tensors: parts of llama.cpp's tensor names -> Ollama's.
        tokens: number of tokens that have no row in the embedding.
        parts: names of tensors of other parts.
    """

    architecture: str = ""
    keys: Mapping[str, str | None] = {}
    added: Mapping[str, Any] = {}
    tensors: Mapping[str, str] = {}
    tokens: int = 0
    parts: tuple[str, ...] = ()


def write_ollama_layout(source: Path, target: Path, change: OllamaChange) -> Path:
    """Write a file in llama.cpp's layout again as Ollama's converter would have."""
    reader = GGUFReader(source)
    old = str(reader.fields["general.architecture"].contents())
    new = change.architecture or old
    writer = GGUFWriter(target, new)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        inner = name.removeprefix(f"{old}.")
        to = change.keys.get(inner, inner)
        if to is None:
            continue
        value = field.contents()
        if name == "tokenizer.ggml.tokens":
            value = [*value, *(f"<image_{i}>" for i in range(change.tokens))]
        if name == "tokenizer.ggml.token_type":
            value = [*value, *[3] * change.tokens]
        sub_type = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(
            name if inner == name else f"{new}.{to}", value, field.types[0], sub_type
        )
    for name, value in change.added.items():
        _add(writer, name.replace("*", new, 1), value)
    for tensor in reader.tensors:
        name = tensor.name
        for part, other in change.tensors.items():
            name = name.replace(part, other)
        writer.add_tensor(name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    for name in change.parts:
        writer.add_tensor(name, np.ones((4, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _add(writer: GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)
