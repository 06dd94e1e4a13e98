"""A fake Ollama model store."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

MODEL = "application/vnd.ollama.image.model"
DATA = b"GGUF and what follows"


def add(store: Path, path: str, data: bytes = DATA, **layer: Any) -> Path:
    """Add a model to the store and return its blob. `layer` replaces fields of the manifest's
    layer.
    """
    digest = hashlib.sha256(data).hexdigest()
    blob = store / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(data)
    manifest = store / "manifests" / path
    manifest.parent.mkdir(parents=True, exist_ok=True)
    others = [
        {"mediaType": "application/vnd.ollama.image.template", "digest": f"sha256:{'0' * 64}"}
    ]
    entry = {"mediaType": MODEL, "digest": f"sha256:{digest}", "size": len(data), **layer}
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": [*others, entry]}))
    return blob
