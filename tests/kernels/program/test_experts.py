"""Experts against their NumPy specification: the routing is exact, the results differ at most by
the FMA.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from helpers.kernels.linear_driver import PLAIN, Extra, Program, run_linear
from helpers.kernels.weight_formats import FORMATS, PACKED, in_blocks, kind_of, random_weights
from helpers.pairwise import pairwise
from kvboost_edge.kernels.linear.panel import LARGEST_CELL
from kvboost_edge.kernels.linear.weights import PackedRows, pack_rows
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.activations import ACT_CLAMPED_SWIGLU, ACT_RELU2, ACT_SILU
from kvboost_edge.kernels.program.expert_routing import dispatch_numbers
from kvboost_edge.kernels.reference.experts import (
    ExpertWeights,
    Routing,
    expert_rows,
    mixed_rows,
    route_rows,
    slots_of,
)
from kvboost_edge.kernels.reference.linear import activate_rows, squared_rows
from kvboost_edge.kernels.reference.weights import unpack_rows

Floats = npt.NDArray[np.float32]
Longs = npt.NDArray[np.int64]


class Routed(NamedTuple):
    """The results of the router's operations."""

    chosen: Longs
    shares: Floats
    slots: list[tuple[int, list[int]]]


def _route(program, logits, routing, bias=None, factors=None):
    """Add the operations of the router. The returned arrays are filled when the program has run."""
    tokens, experts = logits.shape
    padded = -(-experts // 16) * 16
    wide = np.full((tokens, padded), np.nan, np.float32)
    wide[:, :experts] = logits
    chosen = np.full((tokens, routing.used), -1, np.int64)
    shares = np.full((tokens, routing.used), np.nan, np.float32)
    numbers = np.full(dispatch_numbers(experts) + chosen.size, -1, np.int64)
    arrays = {lt.B_ROUTED: wide, lt.B_CHOSEN: chosen, lt.B_SHARES: shares, lt.B_DISPATCH: numbers}
    for number, array in arrays.items():
        program.buffer(number, array)
    counts = lt.ExpertCounts(experts, routing.used)
    how = (lt.SCORES[routing.score], lt.RENORMS[routing.renorm])
    given = (_address(program, array) for array in (bias, factors))
    program.ops += [
        lt.RouteOp(counts, padded, *how, *given, *routing[3:]),
        lt.DispatchOp(counts),
    ]
    return Routed(chosen, shares, [(experts, numbers)])


def _address(program, array):
    """Return the address of an array that the program keeps alive, or 0 for None."""
    if array is None:
        return 0
    program.arrays.append(np.ascontiguousarray(array))
    return program.arrays[-1].ctypes.data


def _slots(routed):
    """Return (expert, its slots) pairs from the results of a program that has run."""
    experts, numbers = routed.slots[0]
    numbers = np.asarray(numbers)
    active = int(numbers[0])
    first = numbers[1 + experts :]
    slots = numbers[dispatch_numbers(experts) :]
    return [(int(numbers[1 + i]), slots[first[i] : first[i + 1]].tolist()) for i in range(active)]


def _routed(
    logits,
    routing,
    bias=None,
    factors=None,
    threads=1,
):
    program = Program(len(logits))
    routed = _route(program, logits, routing, bias, factors)
    program.run(threads)
    return routed


ROUTINGS = {
    "qwen": Routing(8, renorm="add"),
    "olmoe": Routing(8),
    "granite": Routing(4, score="chosen"),
    "ernie": Routing(6, renorm="least", eps=1e-12),
    "lfm": Routing(4, score="sigmoid", renorm="add", eps=1e-6, scale=2.5),
    "groups": Routing(5, score="sigmoid", renorm="add", eps=1e-20, groups=4, used_groups=2),
    "pairs": Routing(2, groups=10, used_groups=1),
    "one": Routing(1, renorm="add"),
    "all": Routing(20),
    # Sums of shares are on both sides of the threshold.
    "at least": Routing(2, renorm="least", eps=0.5),
    "and more": Routing(4, score="sigmoid", renorm="add", eps=0.5),
}


@pytest.mark.parametrize(
    ("name", "biased", "scaled"), pairwise(ROUTINGS, (False, True), (False, True))
)
def test_routing_equals_the_reference(name, biased, scaled):
    rng = np.random.default_rng(3)
    routing = ROUTINGS[name]
    logits = (3 * rng.standard_normal((37, 20))).astype(np.float32)
    bias = rng.standard_normal(20).astype(np.float32) if biased else None
    factors = rng.standard_normal(20).astype(np.float32) if scaled else None
    routed = _routed(logits, routing, bias, factors, threads=2)
    for dtype in (np.float32, np.float64):
        chosen, shares = route_rows(logits.astype(dtype), routing, bias, factors)
        np.testing.assert_array_equal(routed.chosen, chosen)
        np.testing.assert_allclose(routed.shares, shares, rtol=3e-6)
    expected = [(expert, slots.tolist()) for expert, slots in slots_of(chosen, 20)]
    assert _slots(routed) == expected


@pytest.mark.parametrize("score", ["softmax", "chosen"])
def test_extreme_router_logits_have_finite_shares(score):
    """The exponential of 200 overflows float32."""
    logits = np.array(
        [[200, 199, -200, 198], [-200, -199, -400, -201], [200, 200, 200, 200]], np.float32
    )
    routing = Routing(2, score=score)
    routed = _routed(logits, routing)
    chosen, shares = route_rows(logits.astype(np.float64), routing)
    np.testing.assert_array_equal(routed.chosen, chosen)
    np.testing.assert_allclose(routed.shares, shares, rtol=3e-6)
    assert shares.min() > 0.2


def test_the_bias_affects_selection_but_not_the_share():
    logits = np.zeros((1, 4), np.float32)
    bias = np.array([0, 0, 0, 9], np.float32)
    routed = _routed(logits, Routing(1), bias)
    assert routed.chosen.tolist() == [[3]]
    assert routed.shares.tolist() == [[0.25]]


@pytest.mark.parametrize("score", lt.SCORES)
def test_ties_choose_the_lower_expert(score):
    logits = np.array([[1, 2, 2, 2, 0, 2], [5, 5, 5, 5, 5, 5], [0, 0, 1, 0, 0, 1]], np.float32)
    routed = _routed(logits, Routing(3, score=score))
    assert routed.chosen.tolist() == [[1, 2, 3], [0, 1, 2], [0, 2, 5]]
    chosen, _ = route_rows(logits, Routing(3, score=score))
    np.testing.assert_array_equal(routed.chosen, chosen)


def test_ties_choose_the_lower_group():
    logits = np.array([[0, 3, 3, 0, 1, 1], [4, 0, 9, 0, 0, 4], [1, 1, 2, 0, 9, 0]], np.float32)
    routing = Routing(2, score="chosen", groups=3, used_groups=1)
    routed = _routed(logits, routing)
    assert routed.chosen.tolist() == [[0, 1], [2, 3], [4, 5]]
    chosen, _ = route_rows(logits, routing)
    np.testing.assert_array_equal(routed.chosen, chosen)


@pytest.mark.parametrize("score", lt.SCORES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_token_with_nan_gets_valid_experts_and_nan_output(score, bad):
    """Expert numbers stay within the tables for any router output. Other tokens are unaffected."""
    logits = np.random.default_rng(1).standard_normal((9, 6)).astype(np.float32)
    clean = _routed(logits, Routing(2, score=score))
    logits[4] = bad
    routed = _routed(logits, Routing(2, score=score))
    assert routed.chosen.min() >= 0
    assert routed.chosen.max() < 6
    assert (np.diff(routed.chosen, axis=1) > 0).all()
    if np.isnan(bad):
        assert np.isnan(routed.shares[4]).all()
    np.testing.assert_array_equal(np.delete(routed.shares, 4, 0), np.delete(clean.shares, 4, 0))


class Layer(NamedTuple):
    """Experts of one layer: the packed matrices of each expert, and all of them packed as one."""

    kind: str
    experts: int
    hidden: int
    inner: int
    gate_up: list[PackedRows]
    down: list[PackedRows]
    all_gate_up: PackedRows
    all_down: PackedRows
    act: int = ACT_SILU
    biases: tuple[Floats, Floats] | None = None  # [experts, 2 * inner] and [experts, hidden]

    def bias(self, which, expert):
        return None if self.biases is None else self.biases[which][expert]


def _packed(kind, rows, inputs, seed):
    """Return random matrices of all experts, packed as one and separately."""
    alone = [
        random_weights(kind, rows, inputs, seed + expert, inputs**-0.5) for expert in range(EXPERTS)
    ]
    return PackedRows(*(np.concatenate([one[index] for one in alone]) for index in range(3))), alone


EXPERTS = 6


HOWS = {"silu": {}, "swiglu": {"biased": True}, "relu2": {"gated": False}}
"""Kinds of experts -> what `_layer` takes for them."""


def _layer(kind, *, biased=False, gated=True):
    """Make a layer.

    Args:
        biased: with biases as in gpt-oss, and gates from about -20 to 20.
        gated: with a gate; without one it is like Nemotron's.
    """
    hidden = in_blocks(kind, 80)
    inner = in_blocks(kind, 96)
    all_gate_up, gate_up = _packed(kind, (1 + gated) * inner, hidden, seed=0)
    all_down, down = _packed(kind, hidden, inner, seed=10)
    layer = Layer(kind, EXPERTS, hidden, inner, gate_up, down, all_gate_up, all_down)
    if not biased:
        return layer if gated else layer._replace(act=ACT_RELU2)
    rng = np.random.default_rng(5)
    biases = tuple(
        (6 * rng.standard_normal((EXPERTS, rows))).astype(np.float32)
        for rows in (2 * inner, hidden)
    )
    return layer._replace(act=ACT_CLAMPED_SWIGLU, biases=(biases[0], biases[1]))


def _run(layer, x, logits, before, extra=PLAIN, *, add=True):
    """Run a layer's operations. Return `before` plus the experts' output, or with add=False only
    the output.
    """
    tokens = len(x)
    used = ROUTING.used
    program = Program(tokens, extra.matrix)
    routed = _route(program, logits, ROUTING)
    slots = tokens * used
    row = -(-layer.hidden // 32) * 32
    source = np.zeros((tokens, row), np.float32)
    source[:, : layer.hidden] = x
    out = np.zeros((tokens, row), np.float32)
    out[:, : layer.hidden] = before
    program.buffer(lt.B_NORMED, source)
    program.buffer(lt.B_HIDDEN, out)
    program.buffer(lt.B_SPREAD, np.full(slots * row * LARGEST_CELL // 8 + 64, np.nan, np.float32))
    program.buffer(
        lt.B_EXPERTS_INNER,
        np.full(slots * layer.inner * LARGEST_CELL // 8 + 64, np.nan, np.float32),
    )
    counts = lt.ExpertCounts(layer.experts, used)
    read_by = 0 if layer.kind in ("f32", "bf16") else kind_of(layer.kind)
    biases = [_address(program, bias) for bias in layer.biases or (None, None)]
    way_in = program.matrix(layer.kind, layer.hidden, layer.all_gate_up, bias=biases[0])
    down = program.matrix(layer.kind, layer.inner, layer.all_down, bias=biases[1])
    inner = lt.InnerChannels(layer.inner, layer.act, read_by)
    to = lt.BufferRows(lt.B_HIDDEN, row)
    program.ops += [
        lt.SpreadOp(counts, lt.BufferRows(lt.B_NORMED, row), layer.hidden, read_by),
        lt.ExpertsGatedOp(counts, way_in, inner, row),
        lt.ExpertsDownOp(counts, down, to, layer.hidden, int(add), extra.factor),
    ]
    program.run(extra.threads)
    return out[:, : layer.hidden], routed


ROUTING = Routing(3, renorm="add")


def _data(layer, tokens):
    rng = np.random.default_rng(tokens)
    shapes = ((tokens, layer.hidden), (tokens, layer.experts), (tokens, layer.hidden))
    x, logits, before = (rng.standard_normal(shape, dtype=np.float32) for shape in shapes)
    # Weights of random blocks are large.
    return np.float32(1 if layer.kind in PACKED else 0.01) * x, 2 * logits, before


@pytest.mark.parametrize(("kind", "tokens", "how"), pairwise(FORMATS, (1, 4, 23), HOWS))
def test_experts_equal_the_reference(kind, tokens, how):
    """The expectation uses the linear kernels for each expert's matrices, which are tested row by
    row elsewhere, and walks over the experts in NumPy.
    """
    layer = _layer(kind, **HOWS[how])
    x, logits, before = _data(layer, tokens)

    def mlp(expert, rows):
        biases = [Extra(bias=layer.bias(which, expert)) for which in range(2)]
        if how == "relu2":
            inner = squared_rows(
                run_linear(kind, rows, layer.gate_up[expert], layer.inner, PLAIN)[0]
            )
        else:
            wide = run_linear(kind, rows, layer.gate_up[expert], 2 * layer.inner, biases[0])[0]
            inner = activate_rows(
                wide[:, : layer.inner], wide[:, layer.inner :], clamped=how == "swiglu"
            )
        return run_linear(kind, inner, layer.down[expert], layer.hidden, biases[1])[0]

    out, routed = _run(layer, x, logits, before, Extra(factor=0.5))
    chosen, shares = route_rows(logits, ROUTING)
    np.testing.assert_array_equal(routed.chosen, chosen)
    expected = mixed_rows(x, before, chosen, shares * np.float32(0.5), mlp, layer.experts)
    # An inner value between two codes may round to either one: the oracle's activation is in
    # float64.
    size = 1 if how == "silu" else 16  # inner values reach 56
    np.testing.assert_allclose(
        out, expected, rtol=1e-5, atol=size * (2e-6 if kind in ("f32", "bf16") else 2e-3)
    )
    assert np.linalg.norm(out - expected) <= 2e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("tokens", [1, 23])
@pytest.mark.parametrize("kind", ["f32", "int4"])
def test_expert_output_does_not_depend_on_previous_memory(kind, tokens, threads):
    layer = _layer(kind)
    x, logits, before = _data(layer, tokens)
    extra = Extra(threads=threads)
    out, _ = _run(layer, x, logits, np.full_like(before, np.nan), extra, add=False)
    np.testing.assert_array_equal(out, _run(layer, x, logits, np.zeros_like(before), extra)[0])
    assert np.count_nonzero(out) > 0.9 * out.size


@pytest.mark.parametrize("tokens", [1, 23])
def test_biased_experts_equal_plain_numpy(tokens):
    """The expectation does not use the kernels. Biases precede the share, gates are clipped on one
    side and up projections on both.
    """
    layer = _layer("f32", biased=True)
    x, logits, before = _data(layer, tokens)
    shapes = (2 * layer.inner, layer.hidden), (layer.hidden, layer.inner)
    experts = [
        ExpertWeights(
            *(
                unpack_rows(matrix[expert], *shape, "f32")
                for matrix, shape in zip((layer.gate_up, layer.down), shapes, strict=True)
            ),
            layer.bias(0, expert),
            layer.bias(1, expert),
        )
        for expert in range(EXPERTS)
    ]

    def swiglu(gate, up):
        gate = np.minimum(gate, 7)
        up = np.clip(up, -7, 7)
        return (up + 1) * gate / (1 + np.exp(-1.702 * gate))

    chosen, shares = route_rows(logits.astype(np.float64), ROUTING)
    wide = x.astype(np.float64)
    expected = mixed_rows(
        wide,
        before.astype(np.float64),
        chosen,
        shares,
        lambda expert, rows: expert_rows(rows, experts[expert], swiglu),
        EXPERTS,
    )
    out, _ = _run(layer, x, logits, before)
    assert np.linalg.norm(out - expected) <= 1e-6 * np.linalg.norm(expected)


@pytest.mark.parametrize(("kind", "matrix", "how"), pairwise(FORMATS, (0, 1), HOWS))
@pytest.mark.some(3)
def test_tokens_do_not_depend_on_batch_and_threads(kind, matrix, how):
    layer = _layer(kind, **HOWS[how])
    x, logits, before = _data(layer, 150)
    logits[40:] += np.array([9, 0, 0, 0, 0, 0], np.float32)  # one expert gets nearly all tokens
    alone = np.concatenate(
        [_run(layer, *(a[i : i + 1] for a in (x, logits, before)))[0] for i in range(150)]
    )
    for threads in (1, 2):
        out, _ = _run(layer, x, logits, before, Extra(threads=threads, matrix=matrix))
        np.testing.assert_array_equal(out, alone)
    for start, stop in ((0, 9), (9, 47), (47, 150)):
        part = [a[start:stop] for a in (x, logits, before)]
        np.testing.assert_array_equal(
            _run(layer, *part, Extra(matrix=matrix))[0], alone[start:stop]
        )


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kind", ["f32", "int4"])
def test_non_finite_values_affect_only_their_token(kind, how):
    layer = _layer(kind, **HOWS[how])
    x, logits, before = _data(layer, 30)
    clean, _ = _run(layer, x, logits, before)
    x[11] = np.nan
    logits[11] = np.nan
    out, _ = _run(layer, x, logits, before)
    assert np.isnan(out[11]).all()
    np.testing.assert_array_equal(np.delete(out, 11, 0), np.delete(clean, 11, 0))


def test_experts_are_summed_in_ascending_order(monkeypatch):
    """The first two cancel exactly. In any other order, rounding would lose the third."""
    layer = _layer("f32")
    rng = np.random.default_rng(2)
    wide, down = (rng.standard_normal(s, dtype=np.float32) for s in ((2 * 96, 80), (80, 96)))
    factors = np.array([2.0**30, -(2.0**30), 1, 0, 0, 0], np.float32)
    gate_up = pack_rows(np.concatenate([wide] * EXPERTS), "f32")
    layer = layer._replace(
        all_gate_up=gate_up,
        all_down=pack_rows(np.concatenate([down * f for f in factors]), "f32"),
    )
    monkeypatch.setitem(
        globals(), "ROUTING", Routing(3, score="sigmoid")
    )  # shares of exactly a half
    logits = np.zeros((1, 6), np.float32)
    x = rng.standard_normal((1, 80), dtype=np.float32)
    before = np.zeros((1, 80), np.float32)
    out, _ = _run(layer, x, logits, before)
    lone = layer._replace(
        all_down=pack_rows(np.concatenate([down * f for f in (0, 0, 1, 0, 0, 0)]), "f32")
    )
    np.testing.assert_array_equal(out, _run(lone, x, logits, before)[0])
    assert np.count_nonzero(out) > 70, out
