"""Model directories that tests build once: they stay in `build/test-models` for other tests, workers and runs.

A test gets a copy, so it may change what it got.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "copy_of"]

ROOT = Path(__file__).parents[3] / "build" / "test-models"
PACKAGES = ("torch", "transformers", "numpy", "safetensors", "tokenizers")


def copy_of(directory: Path, make: Callable[[Path], object], *arguments: Any, root: Path = ROOT) -> Path:
    """Fill `directory` with the files that `make` writes into a folder; it is called for new arguments only.

    Its result depends on the arguments, which JSON can hold, on the helpers for models and on the packages' versions.
    """
    key = json.dumps([make.__qualname__, *arguments])
    entry = root / hashlib.sha256((_helpers() + key).encode()).hexdigest()[:32]
    if not entry.exists():
        root.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=root, prefix="new-"))
        try:
            make(folder)
            os.rename(folder, entry)
        except OSError:
            if not entry.exists():  # of another worker, which was faster
                raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
    for path in entry.iterdir():
        shutil.copyfile(path, directory / path.name)
    return directory


@functools.cache
def _helpers() -> str:
    """A digest of all that makes models, of the packages too."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources))
    return digest.hexdigest() + json.dumps([version(name) for name in PACKAGES])
