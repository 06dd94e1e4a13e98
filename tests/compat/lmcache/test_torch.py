"""Torch tensors return with their type and bits. Torch is imported only if a tensor is passed."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.compat.lmcache_cases import equal, kv_of
from kvboost_edge.errors import BackendUnavailable, install_extra

TYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.int8,
    torch.bool,
]


def tensors(tokens, dtype):
    """Convert the result of `kv_of` to tensors that are not contiguous, and part of a graph if the
    type allows.
    """
    made = []
    for pair in kv_of(tokens):
        plain = [
            torch.from_numpy(a).transpose(0, 2).contiguous().transpose(0, 2).to(dtype) for a in pair
        ]
        made.append(tuple(t.requires_grad_() if t.is_floating_point() else t for t in plain))
    return tuple(made)


def same(one, other):
    other = other.detach()
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_tensors_round_trip(engine, dtype):
    tokens = torch.arange(11)
    kv = tensors(tokens, dtype)
    engine.store(tokens, kv)
    found, ret_mask = engine.retrieve(tokens)
    assert all(
        same(one, other)
        for a, b in zip(found, kv, strict=True)
        for one, other in zip(a, b, strict=True)
    )
    assert not found[0][0].requires_grad
    assert ret_mask.dtype == torch.bool
    assert ret_mask.tolist() == [True] * 11
    blob, _ = engine.retrieve(tokens, return_tuple=False)
    assert same(blob, torch.stack([torch.stack(pair) for pair in kv]))


def test_masks_are_tensors_if_tokens_are(engine):
    tokens = torch.arange(11, dtype=torch.int32)
    kv = tensors(tokens, torch.bfloat16)
    engine.store(tokens, tuple(tuple(t[8:] for t in pair) for pair in kv), torch.arange(11) >= 8)
    found, ret_mask = engine.retrieve(tokens, torch.arange(11) >= 9)
    assert ret_mask.tolist() == [False] * 9 + [True] * 2
    assert same(found[1][1], kv[1][1][9:])
    _, ret_mask = engine.retrieve(tokens.tolist(), torch.arange(11) >= 9)
    assert isinstance(ret_mask, np.ndarray)
    kv, ret_mask = engine.retrieve(tokens)
    assert kv == ()
    assert ret_mask.tolist() == [False] * 11


def test_arrays_and_tensors_of_one_sequence_are_not_mixed(engine):
    tokens = np.arange(8)
    engine.store(tokens[:4], kv_of(tokens[:4]))
    engine.store(
        tokens,
        tuple(tuple(t[4:] for t in pair) for pair in tensors(tokens, torch.float32)),
        tokens >= 4,
    )
    found, ret_mask = engine.retrieve(tokens)
    assert equal(found, kv_of(tokens[:4]))
    assert ret_mask.tolist() == [True] * 4 + [False] * 4


@pytest.mark.parametrize(
    "make", [lambda t: t.to(torch.complex64), lambda t: t.to_sparse()], ids=["complex", "sparse"]
)
def test_unsupported_tensors_are_refused(engine, make):
    odd = tuple(make(t.detach()) for t in tensors(np.arange(4), torch.float32)[0])
    with pytest.raises(ValueError, match="cannot be stored"):
        engine.store(np.arange(4), (odd,))
    assert engine.lookup(np.arange(4)) == 0


def test_tensors_on_disk_without_torch_are_an_error_that_names_the_extra(
    engines, tmp_path, monkeypatch
):
    engine = engines(backend=f"file://{tmp_path}/t")
    engine.store([1, 2, 3], tensors([1, 2, 3], torch.bfloat16))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BackendUnavailable, match=re.escape(install_extra("torch"))):
        engine.retrieve([1, 2, 3])


def test_arrays_do_not_import_torch(tmp_path):
    code = (
        "import sys, numpy as np, kvboost_edge\n"
        "config = kvboost_edge.LMCacheEngineConfig(4, backend=('memory', sys.argv[1]))\n"
        "e = kvboost_edge.LMCacheEngine(config, kvboost_edge.LMCacheEngineMetadata('m', 1, 0, "
        "'vllm'))\n"
        "t = np.arange(6); kv = [(np.ones((6, 1, 2)), np.ones((6, 1, 2)))]\n"
        "e.store(t, kv); assert e.retrieve(t)[1].all() and e.lookup(t) == 6; e.close()\n"
        "sys.exit('torch' in sys.modules or 'redis' in sys.modules)\n"
    )
    command = [sys.executable, "-W", "error", "-c", code, f"file://{tmp_path}"]
    assert subprocess.run(command, cwd=Path(__file__).parents[3], check=False).returncode == 0
