"""Reader of the ELF files that ptxas writes, with one section of instructions per kernel."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["opcodes", "read_int"]

_INSTRUCTION = 16  # bytes per instruction, from sm_70 on


class _Section(NamedTuple):
    name: str
    kind: int
    offset: int
    size: int
    link: int


def opcodes(cubin: bytes) -> dict[str, Counter[int]]:
    """Return each kernel's opcode counts; an opcode is the low 12 bits of an instruction."""
    return {
        section.name.removeprefix(".text."): Counter(
            struct.unpack_from("<H", cubin, at)[0] & 0xFFF
            for at in range(section.offset, section.offset + section.size, _INSTRUCTION)
        )
        for section in _sections(cubin)
        if section.name.startswith(".text.")
    }


def read_int(cubin: bytes, symbol: str) -> int:
    """Return the initial value of a global int; raise KeyError if the symbol does not exist."""
    sections = list(_sections(cubin))
    for table in sections:
        if table.kind != 2:  # SHT_SYMTAB
            continue
        names = sections[table.link]
        for at in range(table.offset, table.offset + table.size, 24):
            name, _, _, index, value, _ = struct.unpack_from("<IBBHQQ", cubin, at)
            if _text(cubin, names.offset + name) == symbol:
                return int(struct.unpack_from("<i", cubin, sections[index].offset + value)[0])
    raise KeyError(symbol)


def _sections(cubin: bytes) -> Iterator[_Section]:
    if cubin[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", cubin, 40)
    width, count, names = struct.unpack_from("<HHH", cubin, 58)
    rows = [struct.unpack_from("<IIQQQQII", cubin, table + index * width) for index in range(count)]
    for name, kind, _, _, offset, size, link, _ in rows:
        yield _Section(_text(cubin, rows[names][4] + name), kind, offset, size, link)


def _text(data: bytes, start: int) -> str:
    return data[start : data.index(0, start)].decode()
