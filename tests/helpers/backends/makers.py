"""Backends under contract tests, fed with NumPy arrays: created, filled with cases and compared
with the oracle.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from conftest import ONE_THREAD
from helpers.backends.fake_mps import FakeMpsBackend
from helpers.cuda.standin import CAN_RUN, DEVICE, ON_GPU, standing_in
from helpers.kernels.paged_cases import Case, assert_close, make_case, num_blocks_for, round_to
from kvboost_edge.backends.base import AttentionParams, Backend, BatchLayout, KVSpec, LayerKVSpec
from kvboost_edge.backends.cpu import CPUBackend
from kvboost_edge.backends.cuda import CUDABackend
from kvboost_edge.backends.reference import ReferenceBackend
from kvboost_edge.backends.torch_backend import TorchBackend


def on_cuda(spec: KVSpec, num_blocks: int) -> Backend:
    """Make the CUDA backend. Without a GPU, its kernels run over fibers; torch computes attention
    over float32 KV.
    """
    import kvboost_edge_cuda

    return CUDABackend(spec, num_blocks, device=DEVICE, kernels=kvboost_edge_cuda)


MAKERS: dict[str, Callable[..., Backend]] = {
    "reference": ReferenceBackend,
    "cpu": CPUBackend,
    "torch-cpu": TorchBackend,
    "torch-mps": FakeMpsBackend,
}
if ON_GPU:
    MAKERS = {"cuda": on_cuda}
elif CAN_RUN and not ONE_THREAD:  # fibers have one thread in any case
    MAKERS |= {"cuda-mma": on_cuda, "cuda-wmma": on_cuda}
# The wmma kernels compute in float16. Torch handles KV in float32 with any kernels.
UNMADE = {
    ("cuda-wmma", "bfloat16"),
    ("cuda-wmma", "float32"),
    ("torch-mps", "bfloat16"),
    ("torch-mps", "float32"),
}
# Error bounds for weights and results in a dtype, where the backend computes in it. Otherwise the
# bound of float32 applies.
HALF_ERRORS = {"float16": 5e-3, "bfloat16": 4e-2}
MIX = ((1, 30), (40, 40), (1, 65), (7, 100), (1, 1), (1, 530))  # new tokens, all tokens


def into(backend: Backend, array: np.ndarray) -> Any:
    """Convert an array to the kind that the backend takes."""
    if backend.array_kind == "numpy":
        return array
    tensor = torch.from_numpy(array)
    if backend.name != "cuda":  # the stand-in for Apple GPUs takes the CPU's
        return tensor
    return tensor.to(backend.device, getattr(torch, backend.spec.dtype))


class Arrays:
    """A backend under test that is fed with NumPy arrays."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def write(self, layer: int, keys: np.ndarray, values: np.ndarray, layout: BatchLayout) -> None:
        self.backend.write_kv(
            layer,
            into(self.backend, keys),
            into(self.backend, values),
            self.backend.prepare(layout),
        )

    def attend(
        self, layer: int, queries: np.ndarray, layout: BatchLayout, params: AttentionParams
    ) -> tuple[np.ndarray, np.ndarray]:
        out, lse = self.backend.attention(
            layer, into(self.backend, queries), self.backend.prepare(layout), params
        )
        assert out.shape == queries.shape
        assert lse.shape == queries.shape[:2]
        if self.backend.array_kind == "torch":
            return out.float().cpu().numpy(), lse.cpu().numpy()
        return out, lse

    def write_whole(self, case: Case, layer: int = 0) -> None:
        """Poison the pool and write all tokens of all sequences."""
        self.backend.poison_blocks(range(self.backend.num_blocks))
        spans = [(sequence, 0, total) for sequence, (_, total) in enumerate(case.lengths)]
        self.write(layer, case.rows(case.keys, spans), case.rows(case.values, spans), case.whole)

    def attend_new(self, case: Case, params: AttentionParams) -> tuple[np.ndarray, np.ndarray]:
        return self.attend(0, case.rows(case.queries, case.spans), case.layout(case.spans), params)


@dataclasses.dataclass(frozen=True)
class Maker:
    """Factory of pools with one kind of backend and one storage dtype; they are closed after the
    test.
    """

    name: str
    dtype: str
    made: list[Backend]

    @property
    def in_half(self) -> bool:
        return self.name.startswith("cuda") and self.dtype in HALF_ERRORS

    def case(self, *args: Any, **kwargs: Any) -> Case:
        """Make a `small_case` with queries rounded as the backend takes them."""
        return self.fit(small_case(*args, **kwargs))

    def fit(self, case: Case) -> Case:
        """Round the queries of a case if the backend computes in a half-precision dtype."""
        if self.in_half:
            case.queries[:] = [round_to(queries, self.dtype) for queries in case.queries]
        return case

    def assert_close(
        self, got: tuple[np.ndarray, np.ndarray], expected: tuple[np.ndarray, np.ndarray]
    ) -> None:
        if not self.in_half:
            assert_close(got, expected)
            return
        np.testing.assert_allclose(got[0], expected[0], rtol=0, atol=HALF_ERRORS[self.dtype])
        np.testing.assert_allclose(got[1], expected[1], rtol=1e-4, atol=1e-3)

    def check(self, arrays: Arrays, case: Case, params: AttentionParams) -> None:
        """Assert that attention of the case's new tokens matches the float64 oracle."""
        self.assert_close(
            arrays.attend_new(case, params), case.expected(case.spans, params, self.dtype)
        )

    def __call__(
        self, kv_heads: int, dim: int, *, block_size: int = 16, num_blocks: int = 8, layers: int = 1
    ) -> Arrays:
        spec = KVSpec((LayerKVSpec(kv_heads, dim),) * layers, block_size, self.dtype)
        self.made.append(MAKERS[self.name](spec, num_blocks))
        return Arrays(self.made[-1])

    def filled(self, case: Case) -> Arrays:
        """Return a pool that holds the case's tokens and is poisoned everywhere else."""
        _, kv_heads, dim = case.keys[0].shape
        arrays = self(
            kv_heads, dim, block_size=case.block_size, num_blocks=num_blocks_for(case.lengths, 16)
        )
        arrays.write_whole(case)
        return arrays


@contextlib.contextmanager
def opened(maker: Maker) -> Iterator[Maker]:
    """Yield the maker and close its pools. CUDA makers get the extension meanwhile."""
    with contextlib.ExitStack() as stack:
        if maker.name.startswith("cuda"):
            _, standin = stack.enter_context(standing_in())
            if standin is not None:
                stack.enter_context(standin.of(7 if maker.name == "cuda-wmma" else 8))
        yield maker
        for backend in maker.made:
            backend.close()


def small_case(
    seed: int = 0,
    lengths: tuple[tuple[int, int], ...] = MIX,
    *,
    kv_heads: int = 2,
    per_group: int = 3,
    dim: int = 24,
    block_size: int = 16,
) -> Case:
    return make_case(
        np.random.default_rng(seed),
        lengths,
        kv_heads=kv_heads,
        per_group=per_group,
        dim=dim,
        block_size=block_size,
    )
