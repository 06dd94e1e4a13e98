"""Model directories that tests build once. They stay in `build/test-models` for other tests,
workers and runs.

A test gets a copy, which it may change.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3] / "build" / "test-models"
SOURCES = (
    *sorted(Path(__file__).parent.glob("*.py")),
    Path(__file__).parents[1] / "text" / "byte_level.py",
)
PACKAGES = ("torch", "transformers", "numpy", "safetensors", "tokenizers")
LARGEST = (
    16 << 20
)  # bytes; larger models are built for each test, or the folder would take half a gigabyte
A_DAY = 86400.0


def copy_of(
    directory: Path, make: Callable[[Path], object], *arguments: Any, root: Path = ROOT
) -> Path:
    """Fill `directory` with the files that `make` writes into a folder. `make` is called only for
    new arguments.

    Its result depends on the arguments, which must be JSON values, on the helpers for models, and
    on the versions of the packages.
    """
    key = json.dumps([make.__qualname__, *arguments])
    entry = _generation(root) / hashlib.sha256(key.encode()).hexdigest()[:32]
    if not entry.exists():
        folder = Path(tempfile.mkdtemp(dir=entry.parent, prefix="new-"))
        try:
            make(folder)
            if sum(path.stat().st_size for path in folder.iterdir()) > LARGEST:
                return _copied(folder, directory)
            os.rename(folder, entry)
        except OSError:
            if not entry.exists():  # another worker was faster
                raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return _copied(entry, directory)


def _copied(source: Path, directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        shutil.copyfile(path, directory / path.name)
    return directory


@functools.cache
def _generation(root: Path) -> Path:
    """Return the folder for the models of these helpers and packages. Folders of other versions are
    deleted after a day.
    """
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in SOURCES))
    digest.update(json.dumps([version(name) for name in PACKAGES]).encode())
    folder = root / digest.hexdigest()[:16]
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True)
        for other in root.iterdir():
            if time.time() - other.stat().st_mtime > A_DAY:
                shutil.rmtree(other, ignore_errors=True)
    return folder
