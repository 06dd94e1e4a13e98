"""Loading of the compiled part of the package."""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

__all__ = ["ExtensionUnavailable", "operators", "unavailable_reason"]

_REBUILD = "FORCE_CUDA=1 pip install --force-reinstall --no-deps --no-cache-dir ./cuda_ext"
_HERE = Path(__file__).parent


class ExtensionUnavailable(ImportError):
    """Raised if the compiled part is missing or was built for another torch version.

    The message gives the cause and the remedy.
    """


def operators() -> Any:
    """Load and return `torch.ops.kvboost_edge_cuda`; raise ExtensionUnavailable on failure."""
    reason = unavailable_reason()
    if reason is not None:
        raise ExtensionUnavailable(reason)
    return torch.ops.kvboost_edge_cuda


@lru_cache(maxsize=1)
def unavailable_reason() -> str | None:
    """Return why the compiled part cannot be loaded into this process, or None if it can.

    The function does not check for a GPU.
    """
    compiled = sorted(_HERE.glob("_compiled*.so")) + sorted(_HERE.glob("_compiled*.pyd"))
    if not compiled:
        return (
            f"kvboost_edge_cuda has no compiled part; build it with CUDA 11.8 or later: {_REBUILD}"
        )
    built_for = _built_for()
    if built_for != (torch.__version__, torch.version.cuda):
        return (
            f"kvboost_edge_cuda was built for torch {built_for[0]} (CUDA {built_for[1]}), but this "
            f"is torch {torch.__version__} (CUDA {torch.version.cuda}); rebuild it: {_REBUILD}"
        )
    try:
        torch.ops.load_library(str(compiled[0]))
    except (OSError, RuntimeError) as error:
        return (
            f"{compiled[0].name} of kvboost_edge_cuda cannot be loaded ({error}); rebuild it: "
            f"{_REBUILD}"
        )
    return None


def _built_for() -> tuple[str, str | None]:
    """Return the versions of torch and CUDA that the compiled part was built for."""
    if importlib.util.find_spec("kvboost_edge_cuda.built_for") is None:
        return ("unknown", None)
    built_for: Any = importlib.import_module("kvboost_edge_cuda.built_for")
    return (built_for.TORCH, built_for.CUDA)
