"""A reader of Dockerfiles."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Instruction:
    """An instruction of a Dockerfile, such as `name="COPY"`, `value="a b /c/"`, and its line."""

    name: str
    value: str
    line: int


def read_dockerfile(path: Path) -> list[Instruction]:
    """Return the instructions, with continued lines joined and comments removed."""
    found = []
    text, start = "", 0
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.lstrip().startswith("#") or not (text or line.strip()):
            continue
        start = start if text else number
        if line.endswith("\\"):
            text += line[:-1]
            continue
        name, _, value = (text + line).partition(" ")
        found.append(Instruction(name.upper(), re.sub(r"\s+", " ", value).strip(), start))
        text = ""
    return found
