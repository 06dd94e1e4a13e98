"""The contract of every backend for whole blocks as bytes: bytes that were read can be written to
any block, unchanged to the bit.
"""

import dataclasses

import numpy as np
import pytest

from helpers.backends.fake_mps import FakeMpsBackend
from helpers.backends.makers import into
from helpers.kernels.paged_cases import DTYPES, make_case
from helpers.raising import assert_raises
from kvboost_edge.backends.base import AttentionParams, KVSpec, LayerKVSpec
from kvboost_edge.backends.cpu import CPUBackend
from kvboost_edge.backends.reference import ReferenceBackend
from kvboost_edge.backends.torch_backend import TorchBackend
from kvboost_edge.errors import ConfigError
from kvboost_edge.kernels.quantized_kv.code_layout import BIT_PAIRS
from kvboost_edge.kvcache.block_table import CopyOp


def _as_on_a_device(spec, num_blocks):
    """Make a torch backend that moves bytes as if its pool were not in host memory."""
    backend = TorchBackend(spec, num_blocks)
    backend._in_host_memory = False
    return backend


MAKERS = {
    "reference": ReferenceBackend,
    "cpu": lambda spec, num_blocks: CPUBackend(spec, num_blocks, num_threads=1),
    "torch-cpu": TorchBackend,
    "torch-device": _as_on_a_device,
    "torch-mps": FakeMpsBackend,
}
PLAIN = (16, 16)
WIDTHS = [*((dtype, PLAIN) for dtype in DTYPES), *(("float16", bits) for bits in BIT_PAIRS)]
SHAPES = (LayerKVSpec(2, 24), LayerKVSpec(1, 64), LayerKVSpec(2, 24))
NUM_BLOCKS = 8
LENGTH = 48  # three full blocks of 16
PARAMS = AttentionParams(0.2)


def _kinds():
    for name in MAKERS:
        for dtype, bits in WIDTHS:
            if name == "torch-mps" and dtype != "float16":
                continue
            if not name.startswith("torch") or bits in (PLAIN, (8, 8)):
                yield pytest.param((name, dtype, bits), id=f"{name}-{dtype}-{bits[0]}-{bits[1]}")


def _fixture(request):
    """Function that creates poisoned pools of one kind.

    - shapes: those of the layers
    """
    name, dtype, bits = request.param
    made = []

    def call(shapes=SHAPES):
        made.append(MAKERS[name](KVSpec(shapes, 16, dtype, bits), NUM_BLOCKS))
        made[-1].poison_blocks(range(NUM_BLOCKS))
        return made[-1]

    yield call
    for backend in made:
        backend.close()


make = pytest.fixture(_fixture, params=_kinds(), name="make")
make_coded = pytest.fixture(
    _fixture, params=[kind for kind in _kinds() if kind.values[0][2] != PLAIN]
)


@pytest.fixture
def cases():
    """One sequence of full blocks for each layer, with other tokens in each."""
    rng = np.random.default_rng(0)
    lengths = ((1, LENGTH),)
    made = [
        make_case(
            rng,
            lengths,
            kv_heads=shape.num_kv_heads,
            per_group=3,
            dim=shape.head_dim,
            block_size=16,
        )
        for shape in SHAPES
    ]
    tables = np.array([[5, 0, 3, -1]], np.int32)
    return [dataclasses.replace(case, tables=tables) for case in made]


def write(backend, cases, start, stop):
    span = [(0, start, stop)]
    batch = backend.prepare(cases[0].layout(span))
    for layer, case in enumerate(cases):
        keys, values = (
            into(backend, case.rows(arrays, span)) for arrays in (case.keys, case.values)
        )
        backend.write_kv(layer, keys, values, batch)


def filled(make, cases):
    backend = make()
    write(backend, cases, 0, LENGTH)
    return backend


def attend(backend, cases, table):
    """Attend to the blocks of `table` in every layer. The KV of the query's own token is written to
    block 7.
    """
    moved = [
        dataclasses.replace(
            case,
            lengths=((1, LENGTH + 1),),
            tables=np.array([[*table, 7]], np.int32),
            queries=[np.concatenate([case.queries[0], case.queries[0][:1]])],
            keys=[np.concatenate([case.keys[0], case.keys[0][:1]])],
            values=[np.concatenate([case.values[0], case.values[0][:1]])],
        )
        for case in cases
    ]
    span = [(0, LENGTH, LENGTH + 1)]
    batch = backend.prepare(moved[0].layout(span))
    results = []
    for layer, case in enumerate(moved):
        keys, values = (
            into(backend, case.rows(arrays, span)) for arrays in (case.keys, case.values)
        )
        backend.write_kv(layer, keys, values, batch)
        out, lse = backend.attention(
            layer, into(backend, case.rows(case.queries, span)), batch, PARAMS
        )
        results += [np.asarray(out), np.asarray(lse)]
    backend.release_blocks([7])
    return results


def assert_same(got, wanted):
    for one, other in zip(got, wanted, strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_array_equal(one, other)


def test_blocks_moved_within_a_pool_are_bit_equal(make, cases):
    backend = filled(make, cases)
    before = attend(backend, cases, [5, 0, 3])
    data = backend.read_blocks([5, 0, 3])
    assert (data.shape, data.dtype) == ((3, backend.spec.bytes_per_block), np.uint8)
    sums = backend.checksum_blocks([5, 0, 3])
    backend.write_blocks([1, 6, 2], data)
    assert backend.checksum_blocks([1, 6, 2]) == sums
    backend.poison_blocks([5, 0, 3])
    assert_same(attend(backend, cases, [1, 6, 2]), before)
    np.testing.assert_array_equal(backend.read_blocks([2, 1]), data[[2, 0]])


def test_blocks_moved_to_another_pool_are_bit_equal(make, cases):
    first = filled(make, cases)
    second = make()
    data = np.frombuffer(first.read_blocks([5, 0, 3]).tobytes(), np.uint8).reshape(
        3, -1
    )  # as bytes from a file
    second.write_blocks([0, 1, 2], data)
    assert_same(attend(second, cases, [0, 1, 2]), attend(first, cases, [5, 0, 3]))


def test_block_bytes_are_ordered_by_layer_keys_first(make, cases):
    """Other tokens in one layer change only that layer's bytes. Other values do not change the
    bytes of the keys.
    """
    spec = make().spec
    sizes = [KVSpec((shape,), 16, spec.dtype, spec.bits).bytes_per_block for shape in SHAPES]
    rows = []
    for change in (None, "keys", "values"):
        changed = list(cases)
        if change:
            changed[1] = dataclasses.replace(cases[1], **{change: [-getattr(cases[1], change)[0]]})
        rows.append(filled(make, changed).read_blocks([5])[0])
    start = sizes[0]
    stop = sizes[0] + sizes[1]
    assert sum(sizes) == spec.bytes_per_block
    for other in rows[1:]:
        differs = np.flatnonzero(rows[0] != other)
        assert differs.size
        assert start <= differs.min() <= differs.max() < stop
    if spec.bits == PLAIN:
        middle = (start + stop) // 2
        assert np.flatnonzero(rows[0] != rows[1]).max() < middle
        assert np.flatnonzero(rows[0] != rows[2]).min() >= middle


def test_read_blocks_returns_a_copy(make, cases):
    backend = filled(make, cases)
    data = backend.read_blocks([5])
    held = data.copy()
    backend.poison_blocks([5])
    np.testing.assert_array_equal(data, held)
    assert backend.read_blocks([]).shape == (0, backend.spec.bytes_per_block)
    backend.write_blocks([], np.empty((0, backend.spec.bytes_per_block), np.uint8))
    one_layer = make(SHAPES[:1])
    one_layer.write_blocks([3], one_layer.read_blocks([2]))
    assert one_layer.checksum_blocks([3]) == one_layer.checksum_blocks([2])


def refuses(message, backend, read, written, data):
    """Check that these blocks can be neither read nor written."""
    assert_raises(ConfigError, message, backend.read_blocks, read)
    assert_raises(ConfigError, message, backend.write_blocks, written, data)


@pytest.mark.parametrize("wrong", [-1, NUM_BLOCKS])
def test_ids_outside_the_pool_are_refused(make, cases, wrong):
    backend = filled(make, cases)
    before = backend.checksum_blocks(range(NUM_BLOCKS))
    data = backend.read_blocks([5, 0])
    refuses(
        rf"block id {wrong} must be in the pool's 0\.\.7", backend, [5, wrong], [1, wrong], data
    )
    assert backend.checksum_blocks(range(NUM_BLOCKS)) == before


def test_data_of_another_size_is_refused(make, cases):
    backend = filled(make, cases)
    before = backend.checksum_blocks(range(NUM_BLOCKS))
    data = backend.read_blocks([5, 0])
    for wrong in (
        data[:1],
        data[:, :-1],
        data.reshape(-1),
        data.view(np.int8),
        np.zeros(data.shape),
    ):
        with pytest.raises(ConfigError, match=r"2 blocks need uint8 data of shape \(2, "):
            backend.write_blocks([1, 2], wrong)
    with pytest.raises(ConfigError, match="contain duplicates"):
        backend.write_blocks([1, 1], data)
    assert backend.checksum_blocks(range(NUM_BLOCKS)) == before


def test_a_closed_backend_has_no_blocks(make):
    backend = make()
    data = backend.read_blocks([1])
    backend.close()
    refuses("closed", backend, [1], [1], data)


def test_open_blocks_are_refused_by_name(make_coded, cases):
    backend = make_coded()
    write(backend, cases, 0, 40)
    before = backend.checksum_blocks(range(NUM_BLOCKS))
    data = backend.read_blocks([5, 0])
    refuses("block 3 is only partly written", backend, [5, 3], [1, 3], data)
    backend.copy_blocks([CopyOp(3, 4)])
    with pytest.raises(ConfigError, match="block 4 is only partly written"):
        backend.read_blocks([4])
    assert backend.checksum_blocks([*range(4), 5, 6, 7]) == [*before[:4], *before[5:]]
    backend.release_blocks([4])
    backend.write_blocks([4, 6], data)
    write(backend, cases, 40, LENGTH)
    assert backend.read_blocks([3, 4])[1].tobytes() == data[0].tobytes()
