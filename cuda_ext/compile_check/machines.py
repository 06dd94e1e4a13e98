"""Multiprocessor limits of each architecture, and the occupancy computed from them.

The limits are from the CUDA C++ Programming Guide, table "Technical Specifications per Compute
Capability".
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MACHINES", "Machine", "ctas_that_fit"]

_KIB = 1024
_WARP = 32


class Machine(NamedTuple):
    """Limits of one architecture.

    Attributes:
        name: name of the architecture, such as "sm_80".
        shared_per_cta: maximum bytes of shared memory per CTA.
        shared_per_sm: bytes of shared memory per multiprocessor.
        shared_reserved: bytes that the system reserves for each CTA in addition.
        warps_per_sm: maximum number of warps per multiprocessor.
        ctas_per_sm: maximum number of CTAs per multiprocessor.
        hmma: opcode of tensor-core multiplications, the low 12 bits of an instruction.
        registers_per_sm: number of registers per multiprocessor.
        registers_per_thread: maximum number of registers per thread.
        registers_at_once: allocation unit of a warp's registers.
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
    registers_at_once: int = 256

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
    """Return how many CTAs fit on one multiprocessor at a time; 0 if none fits."""
    if registers > machine.registers_per_thread or shared > machine.shared_per_cta:
        return 0
    warps = -(-threads // _WARP)
    per_warp = -(-registers * _WARP // machine.registers_at_once) * machine.registers_at_once
    by_registers = (
        machine.registers_per_sm // (per_warp * warps) if registers else machine.ctas_per_sm
    )
    by_shared = machine.shared_per_sm // max(1, shared + machine.shared_reserved)
    return min(machine.ctas_per_sm, machine.warps_per_sm // warps, by_registers, by_shared)
