"""Pooling of embedding models, from sentence-transformers files or GGUF metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.host.json_file import read_json_object

__all__ = ["POOLING_FILES", "UNSAID", "Pooling", "gguf_pooling", "read_pooling"]

POOLING_FILES = ("modules.json", "1_Pooling/config.json")
_ORDER = ("Transformer", "Pooling", "Dense", "Normalize")  # Dense may be repeated
_NO_CLS = "pools the first token, which sees no other in a causal model; encoders are not supported"
_NO_RANK = (
    "is a reranker with its own head (cls.output), which is not supported; convert it as a "
    "generative model, whose logits of yes and no are compared"
)
_GGUF = {1: "mean", 3: "last"}
_GGUF_REFUSED = {2: _NO_CLS, 4: _NO_RANK}


class Pooling(NamedTuple):
    """Method that reduces the hidden states of a text to one vector.

    Attributes:
        kind: "last" for the hidden state of the last token, or "mean" for the mean over all tokens.
        source: file or key that names the pooling; "" for a model that generates text.
        dense: folders of the dense projections that are applied afterwards, in order.
    """

    kind: str
    source: str
    dense: tuple[Path, ...] = ()


UNSAID = Pooling("last", "")


def read_pooling(model_dir: Path) -> Pooling:
    """Return the pooling of a model directory.

    Raises:
        ModelFormatError: a file is damaged or requests an unsupported pooling; the message names
            it.
    """
    path = model_dir / POOLING_FILES[0]
    if not path.is_file():
        return UNSAID
    kinds: list[str] = []
    pooling = UNSAID
    dense = []
    for module in _modules(path):
        kind = str(module.get("type")).rpartition(".")[2]
        folder = model_dir / str(module.get("path"))
        if kind not in _ORDER:
            raise ModelFormatError(
                f"{path}: the module {kind!r} is not supported (supported: {', '.join(_ORDER)}); "
                "embeddings without it would be wrong"
            )
        kinds.append(kind)
        if kind not in ("Pooling", "Dense"):
            continue
        if (
            folder.parent != model_dir
            or folder.name == ".."
            or not (folder / "config.json").is_file()
        ):
            raise ModelFormatError(
                f"{path} names {folder.name}/config.json, which is missing in {model_dir}"
            )
        if kind == "Pooling":
            pooling = _described(folder / "config.json")
        else:
            dense.append(folder)
    if kinds != sorted(kinds, key=_ORDER.index) or kinds.count("Pooling") > 1:
        raise ModelFormatError(
            f"{path}: modules {kinds} must be in the order {', '.join(_ORDER)}, with at most one "
            "Pooling"
        )
    return pooling._replace(dense=tuple(dense))


def gguf_pooling(values: Mapping[str, Any], path: Path) -> Pooling:
    """Return the pooling of a GGUF file, from its metadata.

    Raises:
        ModelFormatError: the pooling is not supported.
    """
    key = f"{values.get('general.architecture')}.pooling_type"
    number = values.get(key, 0)
    if number in _GGUF_REFUSED:
        raise ModelFormatError(f"{path}: {key}={number} {_GGUF_REFUSED[number]}")
    if number == 0:
        return UNSAID
    if number not in _GGUF:
        raise ModelFormatError(
            f"{path}: {key}={number!r} is unknown (0 none, 1 mean, 2 cls, 3 last, 4 rank)"
        )
    return Pooling(_GGUF[number], f"key {key}")


def _modules(path: Path) -> list[Mapping[str, Any]]:
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(module, Mapping) for module in modules):
        raise ModelFormatError(f"{path} must contain a list of objects")
    return modules


def _described(path: Path) -> Pooling:
    """Return the pooling that sentence-transformers settings describe, by name or by one flag per
    kind.
    """
    settings = read_json_object(path)
    prefix = "pooling_mode_"
    named = settings.get("pooling_mode")
    on = (
        [named]
        if named
        else [
            key.removeprefix(prefix) for key in settings if settings[key] is True and prefix in key
        ]
    )
    kinds = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean"}
    if len(on) != 1 or on[0] not in kinds:
        found = ", ".join(map(str, on)) or "nothing"
        reason = f"; it {_NO_CLS}" if on in (["cls_token"], ["cls"]) else ""
        raise ModelFormatError(
            f"{path} selects pooling {found}; exactly one of lasttoken and mean_tokens must be "
            f"selected{reason}"
        )
    return Pooling(kinds[on[0]], f"{path.parent.name}/{path.name}")
