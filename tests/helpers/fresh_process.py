"""Python code in a new interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

__all__ = ["in_fresh_process"]

ROOT = Path(__file__).parents[2]


def in_fresh_process(code: str) -> str:
    """Run the code in a new interpreter with warnings as errors, and return its standard output."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
