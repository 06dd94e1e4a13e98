"""Conversion of a notebook to a Markdown page, with the output of its cells."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["notebook_page"]

_END_OF_CELL = "--- end of cell ---"


def notebook_page(path: Path, *, run: bool) -> str:
    """Return a notebook's cells and their output as Markdown.

    Args:
        path: Path of the notebook.
        run: Whether to run the cells in a separate process. If not, the page has no output.

    Raises:
        RuntimeError: A cell fails.
    """
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]).strip() for cell in cells]
    programs = [
        source for cell, source in zip(cells, sources, strict=True) if cell["cell_type"] == "code"
    ]
    outputs = iter(_outputs(path, programs) if run else [""] * len(programs))
    parts = []
    for cell, source in zip(cells, sources, strict=True):
        if cell["cell_type"] == "code":
            parts.append(f"```python\n{source}\n```\n")
            if output := next(outputs).strip():
                parts.append(f"```text\n{output}\n```\n")
        else:
            parts.append(f"{source}\n")
    return "\n".join(parts)


def _outputs(path: Path, programs: list[str]) -> list[str]:
    """Run the cells in order in one process and return the output of each."""
    ending = f"\nprint({_END_OF_CELL!r})\n"
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "notebook.py"
        program.write_text("".join(one + ending for one in programs), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, str(program)],
            cwd=folder,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"{path.name} failed:\n{done.stderr}")
    return done.stdout.split(f"{_END_OF_CELL}\n")[:-1]
