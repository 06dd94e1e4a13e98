"""The table that a layer program is: the operations, their fields, and the buffers they work on.

An operation is a NamedTuple. In the table it is a row of int64: its code, then its fields as
tuples.py lays them out. Kernels get the address of the fields, ask `is_op` for the operation and
read it with `load_row`. Operands are numbers of buffers, whose addresses come with each call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types
from numba.core.types.containers import BaseTuple

from kvboost_edge.kernels.jit import intrinsic, kernel
from kvboost_edge.kernels.tuples import Float32, num_numbers, numbers_of
from kvboost_edge.kernels.vectors import I64, address_of, emit_load, load_i64

__all__ = [
    "COUNTERS_PER_OP",
    "ENTRY_OF",
    "JOB_TYPE",
    "OPERATIONS",
    "RENORMS",
    "RULES",
    "SCORES",
    "ActivateOp",
    "AddNormOp",
    "AddSharedOp",
    "AttendOp",
    "BufferRows",
    "CapOp",
    "CloseOp",
    "ContinueOp",
    "ConvInputs",
    "ConvOp",
    "DispatchOp",
    "EmbedOp",
    "ExpertCounts",
    "ExpertsDownOp",
    "ExpertsGatedOp",
    "GateOp",
    "GatedOp",
    "InnerChannels",
    "KeepConvOp",
    "LinearOp",
    "NormOp",
    "Operation",
    "PackedMatrix",
    "PanelTarget",
    "PerLayerOp",
    "ProgramJob",
    "QuantizeOp",
    "RopeOp",
    "RouteOp",
    "ScanInputsOp",
    "ScanOp",
    "SpreadOp",
    "StateHeads",
    "entry_at",
    "is_op",
    "op_at",
    "row_at",
    "table_of",
]

SCORES = {"softmax": 0, "sigmoid": 1, "chosen": 2}
"""Scores of a router -> `RouteOp.score`; see `reference.experts.Routing`."""
RENORMS = {"": 0, "add": 1, "least": 2}
"""What shares are divided by -> `RouteOp.renorm`."""
RULES = {"delta": 0, "ssd": 1}
"""What tokens do to a state -> `StateHeads.rule`; see states/scan.py."""


class BufferRows(NamedTuple):
    """Rows of float32, one for each token.

    Attributes:
        buffer: its number.
        step: floats from a row to the next.
        first: the first float of a row that counts.
    """

    buffer: int = 0
    step: int = 0
    first: int = 0


class PackedMatrix(NamedTuple):
    """A matrix of packed weights, and how it is read.

    Attributes:
        kind: of the weights.
        inputs: columns.
        weights: address of the codes, or of the floats.
        scales: address.
        minima: address of minima, of blocks' numbers, or of tables, see linear/weight_formats.py.
        bias: address of float32, or 0.
        unit: tiles, of gated operations groups, in a unit of work.
        panel: buffer of the quantized rows that it multiplies.
        fine: whether their codes have two planes.
    """

    kind: int
    inputs: int
    weights: int
    scales: int = 0
    minima: int = 0
    bias: int = 0
    unit: int = 1
    panel: int = 0
    fine: int = 0


class PanelTarget(NamedTuple):
    """The panel that a result is quantized into.

    Attributes:
        kind: of the weights that read it; 0: the result stays float32.
        buffer: of the panel.
        fine: whether its codes have two planes.
    """

    kind: int = 0
    buffer: int = 0
    fine: int = 0


class InnerChannels(NamedTuple):
    """The inner channels of an MLP.

    Attributes:
        size: how many.
        act: the activation.
        kind: of the weights that read them quantized; 0: they stay float32.
    """

    size: int
    act: int
    kind: int


class ExpertCounts(NamedTuple):
    """Experts of a layer, and of a token."""

    total: int
    used: int


class ConvInputs(NamedTuple):
    """A short convolution along a sequence, and where its last inputs are kept.

    Attributes:
        rows: the inputs.
        channels: of a row.
        width: inputs before a token's own that it reads.
        state: the first byte of the last inputs in a slot.
        weights: address of float32 [width + 1, channels].
        bias: address of float32 [channels], or 0.
        gated: whether a row is [B | C | x] and the input B * x.
        draft: the first byte in a row of drafts.
        draft_step: bytes of such a row.
    """

    rows: BufferRows
    channels: int
    width: int
    state: int
    weights: int
    bias: int = 0
    gated: int = 0
    draft: int = 0
    draft_step: int = 0


class StateHeads(NamedTuple):
    """Heads of layers with a matrix as their state.

    Attributes:
        key_heads, key_dim: of keys and queries.
        heads, dim: of values.
        tiled: whether value head h reads key head h mod key_heads.
        rule: one of `RULES`.
    """

    key_heads: int
    key_dim: int
    heads: int
    dim: int
    tiled: int = 0
    rule: int = 0


class EmbedOp(NamedTuple):
    """Rows of the embedding, times `factor`."""

    out: BufferRows
    matrix: PackedMatrix
    factor: Float32 = 1.0


class NormOp(NamedTuple):
    """The RMS norm of the first `size` floats of a row; weight: address of float32."""

    source: BufferRows
    out: BufferRows
    size: int
    weight: int
    eps: Float32
    panel: PanelTarget = PanelTarget()


class AddNormOp(NamedTuple):
    """out = (out + factor * norm(source)) * sum_factor."""

    source: BufferRows
    out: BufferRows
    size: int
    weight: int
    eps: Float32
    factor: Float32 = 1.0
    sum_factor: Float32 = 1.0


class PerLayerOp(NamedTuple):
    """Every layer's piece of `size` floats: (norm(piece) + factor * piece of `by`) * sum_factor,
    in place.
    """

    out: BufferRows
    by: BufferRows
    size: int
    weight: int
    eps: Float32
    factor: Float32 = 1.0
    sum_factor: Float32 = 1.0


class QuantizeOp(NamedTuple):
    """Rows of `size` floats into a panel."""

    source: BufferRows
    size: int
    panel: PanelTarget


class ActivateOp(NamedTuple):
    """act(source) * by; of no buffer: the second half of the source's row. Then quantized."""

    source: BufferRows
    out: BufferRows
    size: int
    act: int
    by: BufferRows = BufferRows()
    panel: PanelTarget = PanelTarget()


class RopeOp(NamedTuple):
    """Queries, keys and values of a row: normed, rotated, and written to their buffers, keys and
    values to the pool where attention runs in the program.

    Attributes:
        kv_heads: 0: the layer attends to another's keys and values.
        half: pairs that are rotated.
        q_norm, k_norm: addresses of weights.
        v_norm: address of ones, or 0 for no norm of values.
        keys_twice: whether values are the keys before their norm.
        norm_all: 0: no norm of queries and keys, 1: of each head, 2: of all as one row.
        late_norm: whether these norms come after the rotation.
        table: buffer of cosines; that of sines is the next.
        query_scale: buffer with a factor for the queries of each position, or 0.
        layer: whose attention row is used.
    """

    source: BufferRows
    heads: int
    kv_heads: int
    dim: int
    half: int
    table: int
    q_norm: int = 0
    k_norm: int = 0
    v_norm: int = 0
    keys_twice: int = 0
    norm_all: int = 0
    late_norm: int = 0
    query_scale: int = 0
    layer: int = 0
    eps: Float32 = 0.0


class LinearOp(NamedTuple):
    """A matrix times rows, of integer weights times a panel: out = (product + bias) * factor.

    Attributes:
        out: its `first` is a multiple of 16.
        size: rows of the matrix.
        add: whether the result is added to `out`.
    """

    source: BufferRows
    out: BufferRows
    matrix: PackedMatrix
    size: int
    add: int = 0
    factor: Float32 = 1.0


class GatedOp(NamedTuple):
    """Gate and up matrices, or up alone, activation and quantization into buffer `out` in one."""

    matrix: PackedMatrix
    inner: InnerChannels
    out: int


class CapOp(NamedTuple):
    """x -> cap * tanh(x / cap), in place."""

    rows: BufferRows
    size: int
    cap: Float32


class ContinueOp(NamedTuple):
    """Of a quantized pool: blocks that this pass fills, copied before keys and values are
    written.
    """

    layer: int


class CloseOp(NamedTuple):
    """Of a quantized pool: blocks that are full, quantized after keys and values were written."""

    layer: int


class AttendOp(NamedTuple):
    """Attention of a layer."""

    layer: int


class RouteOp(NamedTuple):
    """A token's experts and shares from its row of logits.

    Attributes:
        step: floats of a row.
        score: one of `SCORES`.
        renorm: one of `RENORMS`.
        bias: address of what is added to scores for the choice, or 0.
        factors: address of each expert's factor of its share, or 0.
    """

    experts: ExpertCounts
    step: int
    score: int
    renorm: int
    bias: int = 0
    factors: int = 0
    eps: Float32 = 0.0
    factor: Float32 = 1.0


class DispatchOp(NamedTuple):
    """Each expert's tokens."""

    experts: ExpertCounts


class SpreadOp(NamedTuple):
    """The rows of each expert's tokens, one after another: as panels for weights of a `kind`, or as
    float32 where that is 0.
    """

    experts: ExpertCounts
    source: BufferRows
    size: int
    kind: int = 0


class ExpertsGatedOp(NamedTuple):
    """`GatedOp` of every expert and its tokens; step: floats of a row of float32."""

    experts: ExpertCounts
    matrix: PackedMatrix
    inner: InnerChannels
    step: int


class ExpertsDownOp(NamedTuple):
    """The matrices back of all experts, and the sums of what they give times the shares."""

    experts: ExpertCounts
    matrix: PackedMatrix
    out: BufferRows
    size: int
    add: int = 0
    factor: Float32 = 1.0


class AddSharedOp(NamedTuple):
    """out += factor * sigmoid(the first number of `by`) * source."""

    source: BufferRows
    out: BufferRows
    by: BufferRows
    size: int
    factor: Float32 = 1.0


class ConvOp(NamedTuple):
    """A gated short convolution."""

    conv: ConvInputs
    out: BufferRows


class KeepConvOp(NamedTuple):
    """The last inputs of a convolution, kept for the next pass."""

    conv: ConvInputs


class ScanInputsOp(NamedTuple):
    """Queries, keys, values and gates of each token for `ScanOp`.

    gates          rows of what decays and shares (Mamba2: dt) are made of
    decay          address of float32 [heads]
    dt_bias        address of float32 [heads]
    q_norm, k_norm addresses of weights, or 0
    least, most    limits of dt
    """

    conv: ConvInputs
    heads: StateHeads
    gates: BufferRows
    decay: int
    dt_bias: int
    q_norm: int = 0
    k_norm: int = 0
    eps: Float32 = 0.0
    least: Float32 = 0.0
    most: Float32 = 0.0


class ScanOp(NamedTuple):
    """The matrices of a layer advanced by the tokens of a pass.

    Attributes:
        state: the first byte of the matrices in a slot.
        skip: address of how much of a value is added to its result; Mamba2 only.
    """

    heads: StateHeads
    state: int
    skip: int = 0


class GateOp(NamedTuple):
    """Results of `ScanOp`, normed and gated.

    Attributes:
        source: the gates.
        weight: address of the norm's weights.
        groups: that are normed, each for itself; 0: none.
        weight_step: floats from the weights of one group to those of the next.
        gate_first: whether the gates come before the norm.
    """

    source: BufferRows
    out: BufferRows
    heads: StateHeads
    weight: int = 0
    groups: int = 0
    weight_step: int = 0
    gate_first: int = 0
    eps: Float32 = 0.0


Operation = tuple[Any, ...]
"""Any of the operations."""

# Buffers that have a fixed meaning; tables of rope follow as pairs (cos, sin), then the factors of
# queries. B_PANEL and B_INNER hold quantized rows. B_ROWS: attention rows of all layers, see
# attention_calls.py; without them rope leaves keys and values in their buffers. B_PER_LAYER: each
# token's input of every layer; B_TABLE_ROWS: what a table of tokens gives to it. Experts: B_ROUTED
# the router's logits; B_CHOSEN, B_SHARES each token's experts and shares; B_DISPATCH each expert's
# tokens, see expert_routing.py; B_SPREAD and B_EXPERTS_INNER rows or panels of one expert behind
# another's; B_BESIDE what an MLP beside them leaves. B_MIXED: what a mixer with a state leaves
# where its layer attends as well; else that is in B_QUERY. B_STATES: which states the pass reads
# and writes, see states/sequences.py; B_SEQUENCES is no address, but their number. B_DRAFTS: what
# drafts brought to them.
(
    B_TOKENS,
    B_POSITIONS,
    B_HIDDEN,
    B_NORMED,
    B_PANEL,
    B_INNER,
    B_WIDE,
    B_QUERY,
    B_KEY,
    B_VALUE,
    B_ATTENDED,
    B_LOGITS,
    B_ROWS,
    B_PER_LAYER,
    B_TABLE_ROWS,
    B_ROUTED,
    B_CHOSEN,
    B_SHARES,
    B_DISPATCH,
    B_SPREAD,
    B_EXPERTS_INNER,
    B_BESIDE,
    B_MIXED,
    B_STATES,
    B_SEQUENCES,
    B_DRAFTS,
    B_TABLES,
) = range(27)

# Addresses of entries (see kernels/entry.py) in a job: first that of each kind of weights, by its
# number; those after K_CLOSE run operations that few models have, see run.py. K_PROGRAM is no
# address: what runs the program itself.
K_PROGRAM = -1
K_ATTEND, K_CLOSE, K_EXPERTS, K_CONV, K_TAILS, K_SCAN, NUM_KERNELS = range(16, 23)
OPERATIONS: dict[int, tuple[type[Operation], ...]] = {
    K_PROGRAM: (
        EmbedOp,
        NormOp,
        AddNormOp,
        PerLayerOp,
        QuantizeOp,
        ActivateOp,
        RopeOp,
        LinearOp,
        GatedOp,
        CapOp,
        ContinueOp,
        CloseOp,
        AttendOp,
    ),
    K_EXPERTS: (RouteOp, DispatchOp, SpreadOp, ExpertsGatedOp, ExpertsDownOp, AddSharedOp),
    K_CONV: (ConvOp,),
    K_TAILS: (KeepConvOp,),
    K_SCAN: (ScanInputsOp, ScanOp, GateOp),
}
"""Entry -> the operations it knows. Each has one entry; a program with an operation that has none
is refused.
"""
_KINDS = [kind for kinds in OPERATIONS.values() for kind in kinds]  # by code
ENTRY_OF = np.array([entry for entry, kinds in OPERATIONS.items() for _ in kinds])
"""int64, of the code of each operation its entry."""

OP_NUMBERS = -(-max(1 + num_numbers(kind) for kind in _KINDS) // 8) * 8  # whole cache lines
COUNTERS_PER_OP = 16  # two counters on cache lines of their own


def table_of(operations: Sequence[Operation]) -> npt.NDArray[np.int64]:
    """Return the table, int64 [num_ops, OP_NUMBERS]."""
    table = np.zeros((len(operations), OP_NUMBERS), dtype=np.int64)
    for row, operation in zip(table, operations, strict=True):
        numbers = numbers_of(type(operation), operation)
        row[0] = _KINDS.index(type(operation))
        row[1 : 1 + numbers.size] = numbers
    return table


class ProgramJob(NamedTuple):
    """What the threads of one call share.

    Attributes:
        ops: int64 [num_ops, OP_NUMBERS], run from `first` to before `last`.
        buffers: int64 [num_buffers], addresses.
        counters: int64, zeros: COUNTERS_PER_OP for each op from first on, then one for the whole.
        tokens: rows of this pass.
        kernels: int64 [NUM_KERNELS], addresses of entries, see entries.py; 0 where the program
            needs none.
        matrix: 1: panels are as large as tile registers take, where kernels are compiled with them;
            0: not.
    """

    ops: npt.NDArray[np.int64]
    buffers: npt.NDArray[np.int64]
    counters: npt.NDArray[np.int64]
    kernels: npt.NDArray[np.int64]
    first: int
    last: int
    tokens: int
    matrix: int


JOB_TYPE = BaseTuple.from_types(
    [
        types.Array(types.int64, 2, "C"),
        *[types.Array(types.int64, 1, "C")] * 3,
        *[types.int64] * 4,
    ],
    ProgramJob,
)
"""Numba's type of a job."""


@kernel
def op_at(job: ProgramJob, index: int) -> Any:
    """Address of the fields of an operation."""
    return address_of(job.ops) + 8 * (OP_NUMBERS * index + 1)


@kernel
def row_at(job: ProgramJob, rows: BufferRows, token: int) -> Any:
    """Address of a token's row."""
    return job.buffers[rows.buffer] + 4 * (token * rows.step + rows.first)


@intrinsic
def is_op(typing: Any, kind: Any, at: Any) -> Any:
    """Whether the fields at an address are those of an operation of class `kind`."""

    def codegen(context: Any, b: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        code = ir.Constant(I64, _KINDS.index(kind.instance_class))
        return b.icmp_signed(
            "==", emit_load(b, I64, b.sub(arguments[1], ir.Constant(I64, 8))), code
        )

    return types.boolean(kind, types.int64), codegen


@kernel
def entry_at(at: int) -> Any:
    """The entry that runs the operation whose fields are at an address."""
    return ENTRY_OF[load_i64(at - 8)]
