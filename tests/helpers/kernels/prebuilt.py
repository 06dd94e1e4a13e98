"""A kernel library for the processes that tests start.

With it, a process does not import Numba and starts in less than half the time. pytest itself
compiles its kernels, so that tests run the sources even while they are being changed.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from kvboost_edge.errors import BackendUnavailable
from kvboost_edge.kernels.build import build_library
from kvboost_edge.kernels.library import (
    DIRECTORY_VARIABLE,
    library_choice,
    package_versions,
)
from kvboost_edge.kernels.sources import source_digest
from kvboost_edge.kernels.targets import usable_targets

FOLDER = Path(__file__).parents[3] / "build" / "test-kernels"
_LOG = logging.getLogger(__name__)


def prepare_library() -> None:
    """Build the library, unless it was built from the present sources. Without a linker there is
    none, and processes compile their kernels.
    """
    if not usable_targets() or _is_current():
        return
    _LOG.info("building a kernel library for the processes that tests start")
    try:
        build_library(usable_targets()[0], FOLDER)
    except BackendUnavailable as error:
        _LOG.warning("processes that tests start compile their kernels: %s", error)


def offer_library() -> None:
    """Let this process compile its kernels, and the processes that it starts load the library."""
    os.environ[DIRECTORY_VARIABLE] = "none"
    library_choice()  # caches this process's choice
    if _is_current():
        os.environ[DIRECTORY_VARIABLE] = str(FOLDER)


def _is_current() -> bool:
    """Return whether processes would use the library of this machine's class."""
    targets = usable_targets()
    if not targets:
        return False
    path = FOLDER / f"{targets[0].name}.json"
    if not path.is_file():
        return False
    built = json.loads(path.read_bytes())
    return (built["sources"], built["versions"]) == (source_digest(), package_versions())
