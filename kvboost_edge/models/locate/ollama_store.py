"""Models in Ollama's store, which are used in place.

A manifest lists blobs by digest. The blob of a model is a GGUF file:

    manifests/registry.ollama.ai/library/NAME/TAG -> {"layers": [{"mediaType": "...model", "digest":
    "sha256:..."}]}
    blobs/sha256-...
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.host.file_memo import home_directory

__all__ = ["OLLAMA", "ollama_model", "ollama_names"]

OLLAMA = "ollama:"
"""Prefix of model names in Ollama's store."""

_MODEL = "application/vnd.ollama.image.model"
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
# [HOST/][NAMESPACE/]NAME[:TAG]
_PIECE = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_NAME = re.compile(rf"(?P<path>{_PIECE}(/{_PIECE}){{0,2}})(:(?P<tag>{_PIECE}))?")
_HOST = "registry.ollama.ai"
_NAMESPACE = "library"
_MAX_MANIFEST_BYTES = 1_000_000
# Default store of the Linux service.
_SERVICE = Path("/usr/share/ollama/.ollama/models")


def ollama_model(name: str) -> Path:
    """Return the GGUF file of a model in Ollama's store, such as 'qwen3:0.6b'.

    Raises:
        ModelFormatError: the name is invalid, or the model is not in the store.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise ModelFormatError(
            f"{OLLAMA}{name} is not a valid Ollama name such as {OLLAMA}qwen3:0.6b"
        )
    pieces = found["path"].split("/")
    path = Path(*(_HOST, _NAMESPACE)[: 3 - len(pieces)], *pieces, found["tag"] or "latest")
    for root in _roots():
        manifest = root / "manifests" / path
        if manifest.is_file():
            return _blob(root, manifest, name)
    places = " and ".join(str(root) for root in _roots())
    raise ModelFormatError(
        f"Ollama has no model {name} in {places}; download it with `ollama pull {name}`, or set "
        "OLLAMA_MODELS to its store"
    )


def ollama_names() -> Iterator[str]:
    """Yield the names of all models in the store, in the form that `locate_model` accepts."""
    seen: set[str] = set()
    for root in _roots():
        manifests = root / "manifests"
        for path in sorted(manifests.glob("*/*/*/*")):
            host, namespace, name, tag = path.relative_to(manifests).parts
            place = (
                (host, namespace)
                if host != _HOST
                else (namespace,)
                if namespace != _NAMESPACE
                else ()
            )
            full = f"{OLLAMA}{'/'.join((*place, name))}:{tag}"
            if path.is_file() and not path.name.startswith(".") and full not in seen:
                seen.add(full)
                yield full


def _roots() -> list[Path]:
    named = os.environ.get("OLLAMA_MODELS")
    return (
        [Path(named).expanduser()] if named else [home_directory() / ".ollama" / "models", _SERVICE]
    )


def _blob(root: Path, manifest: Path, name: str) -> Path:
    try:
        with open(manifest, "rb") as file:
            fields = json.loads(file.read(_MAX_MANIFEST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFormatError(f"{manifest} is not a valid Ollama manifest: {error}") from error
    layers = fields.get("layers") if isinstance(fields, dict) else None
    digests = [_digest(manifest, layer) for layer in _models(layers)]
    if len(digests) != 1:
        raise ModelFormatError(f"{manifest} lists {len(digests)} model files, expected one")
    blob = root / "blobs" / f"sha256-{digests[0]}"
    if not blob.is_file():
        raise ModelFormatError(
            f"{blob}, listed in {manifest}, is missing; download it with `ollama pull {name}`"
        )
    return blob


def _models(layers: Any) -> list[dict[str, Any]]:
    found = layers if isinstance(layers, list) else []
    return [
        layer for layer in found if isinstance(layer, dict) and layer.get("mediaType") == _MODEL
    ]


def _digest(manifest: Path, layer: dict[str, Any]) -> str:
    """Return the SHA-256 digest of a layer.

    It becomes part of a file name, so only hexadecimal digits are allowed.
    """
    found = _DIGEST.fullmatch(str(layer.get("digest")))
    if found is None:
        raise ModelFormatError(
            f"{manifest} contains {layer.get('digest')!r:.80}, which is not a SHA-256 digest"
        )
    return found[1]
