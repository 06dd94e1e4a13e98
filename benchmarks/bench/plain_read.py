"""Plain read of memory by a team of threads.

It is the yardstick for a decode step, which reads every weight once. The threads take chunks from a
counter, like the linear kernels, and are started before timing. The kernel takes no NamedTuple,
whose type would tie the code cached on disk to the process's modules.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils, types

from kvboost_edge.kernels.integers import V16I, emit_load_bytes, int_constant
from kvboost_edge.kernels.jit import intrinsic, kernel
from kvboost_edge.kernels.team import KernelTeam
from kvboost_edge.kernels.vectors import address_of, fetch_add
from kvboost_edge.models.packed.weight_file import PackedWeights
from kvboost_edge.runners.native.runner import NativeRunner

__all__ = ["idle_read_gb_s", "plain_read", "runner_token_weights", "token_weights"]

_LINES = 8  # cache lines read at a time, each into a separate sum
_STEP = 64 * _LINES
# bytes; some 50 us of one thread, which is short for a read but long for the counter
_CHUNK = 1 << 20
_CHUNKS_PER_THREAD = 4  # minimum, so that every thread reads a part of a small model
# Indices into a job's int64 array: what to read and, on separate cache lines, the chunks taken, the
# chunks done and their sum.
_ADDRESS = 0
_NBYTES = 1
_CHUNK_BYTES = 2
_TAKEN = 8
_DONE = 16
_SUM = 24
_SIZE = 32


@intrinsic
def _sum_lines(typing: Any, address: Any, steps: Any) -> Any:
    """Return the sum of `steps` times 8 cache lines as 32-bit numbers, modulo 2^32."""

    def codegen(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        address, steps = arguments
        sums = [cgutils.alloca_once(b, V16I) for _ in range(_LINES)]
        for slot in sums:
            b.store(ir.Constant(V16I, [0] * 16), slot)
        with cgutils.for_range(b, steps, intp=ir.IntType(64)) as loop:
            at = b.add(address, b.mul(loop.index, int_constant(_STEP)))
            for line, slot in enumerate(sums):
                b.store(
                    b.add(b.load(slot), emit_load_bytes(b, b.add(at, int_constant(64 * line)))),
                    slot,
                )
        total = b.load(sums[0])
        for slot in sums[1:]:
            total = b.add(total, b.load(slot))
        reduce = ir.FunctionType(ir.IntType(32), [V16I])
        name = "llvm.vector.reduce.add.v16i32"
        return b.zext(
            b.call(cgutils.get_or_insert_function(b.module, reduce, name), [total]), ir.IntType(64)
        )

    return types.int64(types.int64, types.int64), codegen


@kernel
def _read_chunks(job: npt.NDArray[np.int64]) -> None:
    """Read chunks until none is left. Every thread of the team calls this on the same job."""
    counters = address_of(job)
    nbytes = job[_NBYTES]
    size = job[_CHUNK_BYTES]
    while True:
        start = fetch_add(counters + 8 * _TAKEN, 1) * size
        if start >= nbytes:
            return
        fetch_add(
            counters + 8 * _SUM,
            _sum_lines(job[_ADDRESS] + start, min(size, nbytes - start) // _STEP),
        )
        fetch_add(counters + 8 * _DONE, 1)


def plain_read(address: int, nbytes: int, team: KernelTeam) -> int:
    """Read bytes once, in whole steps of 512, and return their sum as 32-bit numbers.

    The sum prevents the compiler from removing the read.
    """
    nbytes = nbytes // _STEP * _STEP
    each = -(-nbytes // (_CHUNKS_PER_THREAD * team.num_threads) // _STEP) * _STEP
    size = max(_STEP, min(_CHUNK, each))
    job = np.zeros(_SIZE, np.int64)
    job[_ADDRESS] = address
    job[_NBYTES] = nbytes
    job[_CHUNK_BYTES] = size
    team.run(_read_chunks, job, job, _DONE, -(-nbytes // size))
    return int(job[_SUM]) % (1 << 32)


def idle_read_gb_s(address: int, nbytes: int, num_threads: int, *, times: int = 8) -> float:
    """Return the GB/s of reading these bytes `times` times.

    One read before that is not timed and starts the threads.
    """
    team = KernelTeam(num_threads)
    plain_read(address, nbytes, team)
    started = time.perf_counter()
    for _ in range(times):
        plain_read(address, nbytes, team)
    seconds = time.perf_counter() - started
    team.close()
    return times * nbytes / seconds / 1e9


def token_weights(packed: PackedWeights, share: float = 1.0) -> tuple[int, int]:
    """Return the address and bytes of the weights that one decoded token reads.

    Every matrix counts once, and matrices of experts count with `share`. A tied embedding is read
    as the head. An untied one is first in the file and omitted, because a token reads only one of
    its rows. For a mixture of experts, the number of bytes is right but not their location, as the
    bytes here are contiguous.
    """
    sections = packed._sections
    untied = ("embed", "embed.scales", "embed.minima") if "head" in sections else ()
    read = {name: section for name, section in sections.items() if name not in untied}
    first = min(start for start, _ in read.values())
    end = max(start + size for start, size in read.values())
    of_experts = sum(size for name, (_, size) in read.items() if ".experts_" in name)
    return packed._base + first, end - first - round((1 - share) * of_experts)


def runner_token_weights(runner: NativeRunner) -> tuple[int, int]:
    """Return `token_weights` of the model that a runner runs."""
    experts = runner._spec.experts
    return token_weights(runner._packed, experts.used / experts.count if experts else 1.0)
