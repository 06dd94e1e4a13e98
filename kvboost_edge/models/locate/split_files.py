"""File names of split GGUF models: NAME-00001-of-00003.gguf and so on, in one directory."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["PartName", "part_name"]

_PART = re.compile(
    r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<ending>\.gguf)",
    re.IGNORECASE | re.DOTALL,
)


class PartName(NamedTuple):
    """Components of the name of a split file.

    Attributes:
        number: number of the file, starting at 1.
    """

    stem: str
    number: int
    total: int
    ending: str

    def names(self) -> list[str]:
        """Return the names of all files of the model, in order."""
        return [
            f"{self.stem}-{number:05d}-of-{self.total:05d}{self.ending}"
            for number in range(1, self.total + 1)
        ]


def part_name(name: str) -> PartName | None:
    """Return the components of the name or path of a split file, or None for other names."""
    found = _PART.fullmatch(name)
    if found is None or not 1 <= int(found["number"]) <= int(found["count"]):
        return None
    return PartName(found["stem"], int(found["number"]), int(found["count"]), found["ending"])
