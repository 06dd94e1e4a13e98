"""The fake Apple GPU raises where a real one would: for planted operators, dtypes and integers,
alone and in the backend.
"""

import numpy as np
import pytest
import torch

from helpers.backends.fake_mps import DEVICE, FakeMpsBackend, Refused, fake_device, recorded
from helpers.backends.mps_kernels import CALLEES, problem_of, read_table
from helpers.kernels.paged_cases import make_case
from kvboost_edge.backends.base import AttentionParams, KVSpec, LayerKVSpec
from kvboost_edge.backends.torch.masked_attention import attend, visible_slots

BITS = [((16, 16), "float32"), ((16, 16), "float16"), ((8, 8), "float16")]


@pytest.fixture(autouse=True)
def on_the_fake_device():
    with torch.no_grad(), fake_device():
        yield


def some(*shape, dtype=torch.float32):
    return torch.ones(shape).to(dtype).to(DEVICE)


@pytest.mark.parametrize(
    ("planted", "message"),
    [
        (lambda: some(4, 4).double(), "float64, which Apple GPUs do not support"),
        (lambda: some(4, 4).to("cpu", torch.float64), "float64, which Apple GPUs do not support"),
        (lambda: some(4, 4).to(torch.complex64), "complex64"),
        (lambda: torch.zeros(3, dtype=torch.float64, device=DEVICE), "float64"),
        (
            lambda: torch._int_mm(some(32, 32, dtype=torch.int8), some(32, 32, dtype=torch.int8)),
            "_int_mm .*none for",
        ),
        (lambda: torch.linalg.eigvals(some(4, 4)), "none for MPS|other operators"),
        (lambda: torch.ones(4, dtype=torch.int64).to(DEVICE) + 1, "64-bit integers"),
        (
            lambda: (
                torch.ones(4, dtype=torch.int64).to(DEVICE)
                <= torch.ones(4, dtype=torch.int64).to(DEVICE)
            ),
            "64-bit",
        ),
        (lambda: some(2, 4, 4) @ some(2, 4, 4).transpose(1, 2), "strided memory"),
        (lambda: some(4) + torch.ones(4), "mixes tensors of the CPU"),
        (
            lambda: torch.nn.functional.scaled_dot_product_attention(
                *[some(1, 2, 4, 8)] * 3, is_causal=True
            ),
            "scaled_dot_product|mul|other operators",
        ),
        (lambda: some(1, 1).expand(1 << 16, 1 << 16).clone(), "exceeds a buffer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_operations_are_refused(planted, message):
    with pytest.raises(Refused, match=message):
        planted()


def test_device_tensors_are_not_read_without_a_copy():
    with pytest.raises(RuntimeError):
        some(4).numpy()
    np.testing.assert_array_equal((some(4) * 2).cpu().numpy(), np.full(4, 2, np.float32))


def attended(bits, dtype):
    """Run a pass that fills blocks and one that reads them, and return the output of the latter."""
    case = make_case(
        np.random.default_rng(0),
        ((20, 40), (1, 33)),
        kv_heads=2,
        per_group=3,
        dim=24,
        block_size=16,
    )
    backend = FakeMpsBackend(KVSpec((LayerKVSpec(2, 24),), 16, dtype, bits), 12)
    for spans in ([(0, 0, 20), (1, 0, 32)], case.spans):
        batch = backend.prepare(case.layout(spans))
        keys, values = (
            torch.from_numpy(case.rows(rows, spans)) for rows in (case.keys, case.values)
        )
        backend.write_kv(0, keys, values, batch)
    params = AttentionParams(0.2, softcap=3.0, sinks=np.ones(6, np.float32))
    out, _ = backend.attention(
        0, torch.from_numpy(case.rows(case.queries, case.spans)), batch, params
    )
    backend.close()
    return out.numpy()


@pytest.mark.parametrize(("bits", "dtype"), BITS)
def test_the_recorder_lists_the_backends_operators(bits, dtype):
    recorded.clear()
    assert np.isfinite(attended(bits, dtype)).all()
    assert {"bmm", "index.Tensor", "masked_fill_.Scalar", "amax", "exp_"} <= recorded
    assert ("searchsorted.Tensor" in recorded) == (bits == (8, 8))


@pytest.mark.parametrize(
    ("place", "fault"),
    [
        ("attend", lambda queries, *more: attend(queries.double(), *more)),
        (
            "attend",
            lambda queries, keys, *more: attend(torch.special.airy_ai(queries), keys, *more),
        ),
        (
            "visible_slots",
            lambda group, chosen, window: (
                visible_slots(group, chosen, window) & (group.rows.sum() > 0)
            ),
        ),
    ],
    ids=["float64", "an operator without a kernel", "a sum of 64-bit integers"],
)
def test_a_planted_fault_is_detected(place, fault, monkeypatch):
    monkeypatch.setattr(f"kvboost_edge.backends.torch_backend.{place}", fault)
    with pytest.raises(Refused):
        attended((16, 16), "float32")


def test_the_operator_table_equals_torchs():
    assert len(read_table()) > 2000
    known = {
        "bmm": True,
        "add.Tensor": True,
        "_int_mm": False,
        "linalg_eig": False,
        "no_such_operator": False,
    }
    assert {name: problem_of(name) is None for name in known} == known
    assert "scaled_dot_product" in str(problem_of("_scaled_dot_product_attention_math_for_mps"))
    assert all(name in read_table() for name in CALLEES)
