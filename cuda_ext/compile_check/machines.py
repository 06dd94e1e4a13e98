"""What multiprocessors of each architecture have, and how many CTAs fit: arithmetic, nothing
measured.

Figures: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MACHINES", "Machine", "ctas_that_fit"]

_KIB = 1024
_WARP = 32


class Machine(NamedTuple):
    """Limits of one architecture. Bytes of shared memory: a CTA's largest, a multiprocessor's, and
    what each CTA takes beside its own. HMMA: the low 12 bits of an instruction that multiplies on
    tensor cores.
    """

    name: str
    shared_per_cta: int
    shared_per_sm: int
    shared_reserved: int
    warps_per_sm: int
    ctas_per_sm: int
    hmma: int
    registers_per_sm: int = 65536
    registers_per_thread: int = 255
    registers_at_once: int = 256  # to a warp

    @property
    def number(self) -> int:
        return int(self.name.removeprefix("sm_"))


MACHINES = (
    Machine("sm_70", 96 * _KIB, 96 * _KIB, 0, 64, 32, 0x236),
    Machine("sm_75", 64 * _KIB, 64 * _KIB, 0, 32, 16, 0x23C),
    Machine("sm_80", 163 * _KIB, 164 * _KIB, _KIB, 64, 32, 0x23C),
    Machine("sm_86", 99 * _KIB, 100 * _KIB, _KIB, 48, 16, 0x23C),
    Machine("sm_89", 99 * _KIB, 100 * _KIB, _KIB, 48, 24, 0x23C),
    Machine("sm_90", 227 * _KIB, 228 * _KIB, _KIB, 64, 32, 0x23C),
)


def ctas_that_fit(machine: Machine, threads: int, registers: int, shared: int) -> int:
    """CTAs that one multiprocessor holds at a time; 0 where not even one fits."""
    if registers > machine.registers_per_thread or shared > machine.shared_per_cta:
        return 0
    warps = -(-threads // _WARP)
    per_warp = -(-registers * _WARP // machine.registers_at_once) * machine.registers_at_once
    by_registers = (
        machine.registers_per_sm // (per_warp * warps) if registers else machine.ctas_per_sm
    )
    by_shared = machine.shared_per_sm // max(1, shared + machine.shared_reserved)
    return min(machine.ctas_per_sm, machine.warps_per_sm // warps, by_registers, by_shared)
