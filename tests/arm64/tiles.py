"""Linear microkernels as ARM machine code, executed by an emulator of the processor alone.

They are compiled on this machine, for any architecture, and linked to a small C program. The
results must equal those of the plain variant on this machine, bit by bit. This needs no arm64 root:
only aarch64-linux-gnu-gcc and qemu-aarch64-static. `make test-arm64-tiles` runs it for all formats.

    python tests/arm64/tiles.py [FORMAT ...]
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from llvmlite import binding

from helpers.kernels.tile_assembly import compiled_tile, product_of, tile_module
from kvboost_edge.kernels.linear.unpacked import UnpackedTiles
from kvboost_edge.kernels.linear.weight_formats import FORMAT_OF, FORMATS, INT_KINDS
from kvboost_edge.kernels.linear.weight_tiles import IntTiles

GROUPS = 17
TILES = 2
# Variant -> the processor that LLVM compiles for, the emulated one, and the instruction.
VARIANTS = {
    "i8mm": ("ampere1", "max,sve=off", "smmla"),
    "neon": ("cortex-a76", "cortex-a76", "sdot"),
    "plain": ("cortex-a72", "cortex-a72", ""),
}
SHAPES = ((1, 1), (1, 2), (1, 4), (2, 2))
# Of the microkernels that unpack the weights of formats with a grid first.
UNPACKED_SHAPES = ((1, 2), (1, 4), (2, 2))
_ADDRESSES = (0, 1, 2, 9, 10, 13)  # of weights, scales, minima, panel, outputs and bias
_DRIVER = """
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef int64_t I;
typedef void (*Tile)(I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, float);
%s
static const Tile tiles[] = {%s};
static const int places[6] = {0, 1, 2, 9, 10, 13};
int main(void) {
    I number, sizes[6], a[15];
    float factor;
    char *out = 0;
    if (!fread(&number, 8, 1, stdin) || !fread(sizes, 48, 1, stdin) || !fread(a, 120, 1, stdin)) return 1;
    if (!fread(&factor, 4, 1, stdin)) return 1;
    for (int i = 0; i < 6; i++) {
        char *data = aligned_alloc(64, (sizes[i] + 64 + 63) / 64 * 64);
        if (fread(data, 1, sizes[i], stdin) != (size_t)sizes[i]) return 1;
        a[places[i]] = (I)data;
        if (i == 4) out = data;
    }
    tiles[number](a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], factor);
    return fwrite(out, 1, sizes[4], stdout) != (size_t)sizes[4];
}
"""


class Case(NamedTuple):
    form: str
    kind: int
    fine: bool
    shape: tuple[int, int]
    unpacks: bool = False

    @property
    def tiles(self) -> IntTiles:
        tiles, tokens = self.shape
        if self.unpacks:
            return UnpackedTiles(self.kind, tokens, self.fine, self.form, tiles)
        return IntTiles(self.kind, tiles, tokens, self.fine, self.form)

    @property
    def takes_pairs(self) -> bool:
        """True if the microkernel multiplies pairs of tokens with smmla."""
        return self.tiles.takes_pairs and not self.unpacks


def _cases(kinds: Sequence[int]) -> list[Case]:
    found = [
        Case(form, kind, fine, shape)
        for form in VARIANTS
        for kind in kinds
        for fine in (False, True)
        for shape in SHAPES
    ]
    found += [
        Case(form, kind, fine, shape, unpacks=True)
        for form in VARIANTS
        for kind in kinds
        if FORMAT_OF[kind].grid is not None
        for fine in (False, True)
        for shape in UNPACKED_SHAPES
    ]
    return found


def _object(case: Case, number: int) -> bytes:
    """Return the microkernel as an object file for Linux on arm64."""
    triple = "aarch64-unknown-linux-gnu"
    text = tile_module(case.tiles, triple).replace('@"tile"', f'@"tile_{number}"')
    machine = binding.Target.from_triple(triple).create_target_machine(
        cpu=VARIANTS[case.form][0], opt=2, reloc="static", codemodel="small"
    )
    return bytes(machine.emit_object(binding.parse_assembly(text)))


def _link(cases: list[Case], folder: Path) -> Path:
    names = [f"tile_{number}" for number in range(len(cases))]
    declared = "\n".join(f"void {name}({', '.join(['I'] * 15)}, float);" for name in names)
    (folder / "driver.c").write_text(_DRIVER % (declared, ", ".join(names)))
    files = []
    for number, case in enumerate(cases):
        files.append(folder / f"{number}.o")
        files[-1].write_bytes(_object(case, number))
    command = ["aarch64-linux-gnu-gcc", "-O1", "-static", "-no-pie", str(folder / "driver.c")]
    subprocess.run([*command, *map(str, files), "-o", str(folder / "run")], check=True)
    return folder / "run"


def _emulated(program: Path, cpu: str, number: int, case: Case) -> Any:
    """Return a function that computes as the one of `compiled_tile`, under emulation."""

    def run(*arguments: Any) -> None:
        *integers, factor = arguments
        tiles = case.tiles
        steps = integers[3:6]
        out_bytes = integers[11] * tiles.tokens
        sizes = [*(step * TILES for step in steps), tiles.cell * GROUPS, out_bytes, 4 * 16 * TILES]
        data = struct.pack("<q6q15qf", number, *sizes, *integers, factor)
        for place, size in zip(_ADDRESSES, sizes, strict=True):
            data += ctypes.string_at(integers[place], size)
        command = ["qemu-aarch64-static", "-cpu", cpu, str(program)]
        done = subprocess.run(command, input=data, capture_output=True, check=True)
        ctypes.memmove(integers[10], done.stdout, out_bytes)

    return run


def main() -> int:
    """Run the cases, print a line for each variant, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    integers = [FORMAT_OF[kind].name for kind in INT_KINDS]
    parser.add_argument("formats", nargs="*", metavar="FORMAT", help="format (default: all)")
    chosen = parser.parse_args().formats or integers
    if unknown := sorted(set(chosen) - set(integers)):
        parser.error(
            f"no integer format is named {unknown[0]!r}; choose from {', '.join(integers)}"
        )
    command = ["qemu-aarch64-static", "--version"]
    version = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    print(f"{datetime.date.today()}, {version.splitlines()[0]}")
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    cases = _cases([FORMATS[name].kind for name in chosen])
    plain: dict[tuple[int, bool, int], Any] = {}
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        program = _link(cases, Path(folder))
        for number, case in enumerate(cases):
            key = (case.kind, case.fine, case.tiles.tokens)
            if key not in plain:
                tiles = IntTiles(case.kind, 1, key[2], case.fine, "plain")
                run, engine = compiled_tile(tile_module(tiles, binding.get_default_triple()), {})
                plain[key] = product_of(run, tiles, GROUPS, TILES)
                del engine
            run = _emulated(program, VARIANTS[case.form][1], number, case)
            if not np.array_equal(product_of(run, case.tiles, GROUPS, TILES), plain[key]):
                wrong.append(case)
        first = next((i for i, case in enumerate(cases) if case.takes_pairs), None)
        if first is not None:
            run = _emulated(program, "cortex-a76", first, cases[first])
            try:
                product_of(run, cases[first].tiles, GROUPS, TILES)
            except subprocess.CalledProcessError as error:
                code = error.returncode
                print(f"smmla on an emulated Cortex-A76, which lacks it: ended with {code}")
            else:
                wrong.append(cases[first])
    for form, (compiled, emulated, instruction) in VARIANTS.items():
        own = [case for case in cases if case.form == form]
        bad = [case for case in own if case in wrong]
        pairs = sum(case.takes_pairs for case in own)
        unpacking = sum(case.unpacks for case in own)
        print(
            f"{form} ({instruction or 'no dot product'}; compiled for {compiled}, emulated "
            f"{emulated}): {len(own) - len(bad)} of {len(own)} microkernels equal the plain "
            f"variant on this machine, {pairs} of them with smmla, {unpacking} unpack weights first"
        )
        for case in bad:
            name = FORMAT_OF[case.kind].name
            print(f"    different: {name}, fine={case.fine}, {case.shape}, {case.unpacks=}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
