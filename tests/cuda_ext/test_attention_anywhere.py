"""Tests of the CUDA attention kernels with random calls, distant memory, and the C library's
fibers.
"""

import mmap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import LONG
from helpers.cuda.cases import Call, Case, check, make_inputs, oracle, run
from helpers.cuda.on_cpu import BF16, F16, Form, Schedule, library

MAP_NORESERVE = 0x4000  # a Linux flag without a name in Python 3.11
SCHEDULES = [Schedule(order, timing) for order in (0, 1, 2) for timing in (0, 1)]


@st.composite
def cases(draw):
    lengths = st.integers(0, 90)
    num_kv_heads = draw(st.integers(1, 2))
    bounds = st.one_of(st.just(-1), st.integers(0, 100))
    is_flat = draw(st.booleans())
    lens_q = draw(st.lists(st.integers(0, 40), min_size=1, max_size=3))
    return Case(
        tuple((lens_q[i] if is_flat else lens_q[0], draw(lengths)) for i in range(len(lens_q))),
        (num_kv_heads * draw(st.integers(1, 8)), num_kv_heads),
        head_dim=8 * draw(st.integers(1, 8)),
        window=(draw(bounds), draw(bounds)),
        softcap=draw(st.sampled_from([0.0, 0.0, 3.0, 30.0])),
        has_sinks=draw(st.booleans()),
        block_size=16 * draw(st.integers(0, 4)),
        shared=draw(st.integers(0, 2)),
        is_flat=is_flat,
        is_strided=draw(st.booleans()),
        num_splits=draw(st.integers(1, 3)),
        magnitude=draw(st.sampled_from([1.0, 4.0])),
    )


@settings(max_examples=150 if LONG else 40)
@given(
    case=cases(),
    form=st.builds(
        lambda unit, warps_m: Form(*unit, 64, warps_m),
        st.sampled_from([(False, F16), (False, BF16), (True, F16)]),
        st.sampled_from([1, 4]),
    ),
    schedule=st.sampled_from(SCHEDULES),
)
def test_random_calls_equal_the_oracle(case, form, schedule):
    inputs = make_inputs(case, form)
    check(case, form, oracle(case, form, inputs), run(library(), case, form, inputs, schedule))


def test_blocks_may_lie_more_than_2_to_the_31_elements_apart():
    form = Form(False, F16, 64, 1)
    case = Case(((2, 40),), (2, 1), block_size=16)
    inputs = make_inputs(case, form)
    call = Call(case, form, inputs)
    stride = 2**31 + 64
    pools = []
    for name in ("k", "v"):
        blocks = getattr(call, name).array
        # Only address space is reserved: pages that are never written take no memory.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        region = mmap.mmap(-1, 2 * stride * len(blocks), flags=flags)
        pool = np.frombuffer(region, dtype=np.uint16)
        for i, block in enumerate(blocks):
            pool[i * stride : i * stride + block.size] = block.ravel()
        setattr(call.params, name, pool.ctypes.data)
        setattr(call.params, f"{name}_batch_stride", stride)
        pools.append(pool)
    library().attention(call.params, form, Schedule(0, 0))
    check(case, form, oracle(case, form, inputs), call.result())


def test_lse_may_be_left_out():
    form = Form(False, F16, 64, 4)
    case = Case(((3, 40),))
    inputs = make_inputs(case, form)
    call = Call(case, form, inputs)
    call.params.lse = None
    library().attention(call.params, form, Schedule(0, 0))
    assert np.isnan(call.lse).all()
    np.testing.assert_array_equal(
        call.result().out[0], run(library(), case, form, inputs, Schedule(0, 0)).out[0]
    )


@pytest.mark.parametrize("is_wmma", [False, True], ids=["mma", "wmma"])
def test_c_library_fibers_give_the_same_results(is_wmma):
    """Processors other than x86-64 use only the C library's fibers."""
    form = Form(is_wmma, F16, 64, 4)
    case = Case(((20, 90), (3, 70)), (4, 2), block_size=16)
    inputs = make_inputs(case, form)
    plain = library((64,), ("-DKVBOOST_EDGE_UCONTEXT",))
    for schedule in SCHEDULES:
        result, expected = (
            run(kernels, case, form, inputs, schedule) for kernels in (plain, library())
        )
        np.testing.assert_array_equal(result.out[0], expected.out[0])
        np.testing.assert_array_equal(result.lse[1], expected.lse[1])
