"""Tests of the CUDA attention kernels, compiled for this processor with fibers, against a float64
oracle.
"""

import dataclasses

import numpy as np
import pytest

from helpers.cuda.cases import Case, check, make_inputs, oracle, run
from helpers.cuda.on_cpu import BF16, F16, HEAD_DIMS, Form, Schedule, library
from helpers.pairwise import each_once, pairwise

FIRST = Schedule(0, 0)
OTHERS = (Schedule(1, 1), Schedule(2, 1))
KINDS = {"mma-f16": (False, F16), "mma-bf16": (False, BF16), "wmma-f16": (True, F16)}
NO_MASK = (-1, -1)
# Run by every kernel variant.
CORE = {
    "one key": Case(((1, 1),)),
    "varied": Case(((3, 140), (0, 5), (37, 37), (9, 4), (2, 0)), (4, 2)),
    "blocks": Case(((1, 130), (20, 83), (5, 5)), (3, 1), block_size=16, shared=2),
    "splits": Case(
        ((4, 200), (1, 30)), (4, 2), block_size=32, num_splits=3, has_sinks=True, softcap=15.0
    ),
    "window": Case(((50, 170),), (2, 2), window=(40, 0), block_size=48, has_sinks=True),
    "batch": Case(((6, 66), (6, 31)), (2, 2), is_flat=False, is_strided=True, window=NO_MASK),
}
MORE = {
    "square, no mask": Case(((70, 70),), window=NO_MASK),
    "whole tiles": Case(((64, 128), (16, 64)), (1, 1)),
    "one past a tile": Case(((65, 129), (17, 65)), (1, 1)),
    "more queries than keys": Case(((90, 20),)),
    "more queries than keys, no mask": Case(((90, 20),), window=NO_MASK),
    "no keys": Case(((5, 0),), window=NO_MASK),
    "no keys, sinks": Case(((5, 0), (9, 3)), has_sinks=True),
    "no keys, splits": Case(((5, 0), (9, 3)), num_splits=4),
    "no keys, blocks": Case(((2, 0), (1, 16)), block_size=16),
    **{
        f"{group} heads to a kv head": Case(((5, 40), (1, 70)), (2 * group, 2), block_size=16)
        for group in range(1, 9)
    },
    "window to both sides": Case(((40, 90),), window=(5, 9)),
    "window to the right": Case(((40, 90),), window=(-1, 4)),
    "window to the right, fewer keys": Case(((60, 30),), window=(-1, 4)),
    "window to the left": Case(((40, 90),), window=(3, -1)),
    "window wider than a tile": Case(((64, 300),), (1, 1), window=(150, 0)),
    "a window of itself": Case(((70, 70),), window=(0, 0)),
    "a window wider than all": Case(((40, 90),), window=(2**31 - 1, 2**31 - 1)),
    "a window past the keys": Case(((60, 10),), window=(4, 4), has_sinks=True),
    "window over splits": Case(((3, 300),), window=(130, 0), num_splits=2, block_size=80),
    "softcap": Case(((30, 90),), softcap=2.0, magnitude=3.0),
    "softcap, sharp": Case(((30, 90),), softcap=50.0, scale=1.0, magnitude=4.0),
    "sharp": Case(((30, 200),), scale=1.0, magnitude=6.0),
    "flat": Case(((30, 90),), scale=0.0),
    "sinks": Case(((30, 90),), (6, 3), has_sinks=True),
    "blocks of 256": Case(((3, 300), (40, 260)), block_size=256, shared=1),
    "blocks of 80": Case(((3, 200), (30, 170)), block_size=80, shared=1, is_strided=True),
    "blocks, batch": Case(((4, 60), (4, 33)), (4, 1), block_size=16, is_flat=False),
    "rows with gaps": Case(((7, 30), (20, 20)), (6, 2), is_strided=True),
    "batch of one length": Case(((6, 40), (6, 40)), is_flat=False),
    "batch with an index": Case(((6, 40), (6, 25)), is_flat=False, is_indexed=True),
    "more splits than tiles": Case(((4, 70), (2, 3)), num_splits=7, is_strided=True),
    "splits, batch": Case(((4, 200), (4, 70)), (4, 2), num_splits=2, is_flat=False, has_sinks=True),
}


@pytest.fixture(scope="module")
def kernels():
    return library()


def is_right_in_every_order(kernels, case, form):
    inputs = make_inputs(case, form)
    result = run(kernels, case, form, inputs, FIRST)
    check(case, form, oracle(case, form, inputs), result)
    for other in OTHERS:
        again = run(kernels, case, form, inputs, other)
        for one, two in zip(result.out + result.lse, again.out + again.lse, strict=True):
            np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(
    ("case", "kind", "head_dim", "warps_m"), pairwise(CORE, KINDS, HEAD_DIMS, (4, 1))
)
def test_every_attention_variant_equals_the_oracle_in_every_order(
    kernels, case, kind, head_dim, warps_m
):
    is_right_in_every_order(kernels, CORE[case], Form(*KINDS[kind], head_dim, warps_m))


@pytest.mark.parametrize(("case", "kind", "warps_m"), each_once(MORE, KINDS, (4, 1)))
def test_attention_equals_the_oracle_in_every_order(kernels, case, kind, warps_m):
    is_right_in_every_order(kernels, MORE[case], Form(*KINDS[kind], 64, warps_m))


@pytest.mark.parametrize(
    ("head_dim", "warps_m", "is_wmma"),
    pairwise((8, 40, 72, 80, 112, 160, 192, 248), (4, 1), (False, True)),
)
def test_a_head_dim_between_two_variants_uses_the_larger(kernels, head_dim, warps_m, is_wmma):
    form = Form(is_wmma, F16, min(dim for dim in HEAD_DIMS if dim >= head_dim), warps_m)
    for splits in (1, 2):
        case = Case(
            ((5, 70), (18, 18)),
            block_size=16,
            head_dim=head_dim,
            num_splits=splits,
            is_strided=splits == 2,
        )
        is_right_in_every_order(kernels, case, form)


def test_a_row_does_not_depend_on_the_batch(kernels):
    form = Form(False, F16, 64, 4)
    case = Case(((40, 100), (7, 30), (1, 64)), (4, 2))
    inputs = make_inputs(case, form)
    together = run(kernels, case, form, inputs, FIRST)
    for i, lens in enumerate(case.lens):
        own = inputs._replace(q=inputs.q[i : i + 1], k=inputs.k[i : i + 1], v=inputs.v[i : i + 1])
        alone = run(kernels, dataclasses.replace(case, lens=(lens,)), form, own, FIRST)
        np.testing.assert_array_equal(alone.out[0], together.out[i])
        np.testing.assert_array_equal(alone.lse[0], together.lse[i])
