"""Format of a layer program: its operations, their fields, and the buffers.

Each operation is a NamedTuple. The table stores it as a row of int64: the operation's code, then
its fields as described in tuples.py. Kernels get the address of the fields, test the class of the
operation with `is_op` and read the fields with `load_row`. Operands are buffer numbers, and each
call passes the addresses of the buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir

from kvboost_edge.kernels.jit import intrinsic, kernel
from kvboost_edge.kernels.lazy import types
from kvboost_edge.kernels.linear.weight_formats import MAX_KINDS
from kvboost_edge.kernels.signature import INT64, Tuple, array
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
    "WideGatedOp",
    "WideLinearOp",
    "WidePanelOp",
    "entry_at",
    "is_op",
    "op_at",
    "row_at",
    "table_of",
]

SCORES = {"softmax": 0, "sigmoid": 1, "chosen": 2}
"""Router scores -> `RouteOp.score`; see `reference.experts.Routing`."""
RENORMS = {"": 0, "add": 1, "least": 2}
"""Normalization of shares -> `RouteOp.renorm`."""
RULES = {"delta": 0, "ssd": 1}
"""Update rule of a recurrent state -> `StateHeads.rule`; see states/scan.py."""


class BufferRows(NamedTuple):
    """Rows of float32 in a buffer, one per token.

    Attributes:
        buffer: number of the buffer.
        step: floats from one row to the next.
        first: index of the first float in a row that is used.
    """

    buffer: int = 0
    step: int = 0
    first: int = 0


class PackedMatrix(NamedTuple):
    """A matrix of packed weights and the panel that it is multiplied by.

    Attributes:
        kind: number of the weight format.
        inputs: number of columns.
        weights: address of the codes or floats.
        scales: address of the scales.
        minima: address of minima, block scales or tables; see linear/weight_formats.py.
        bias: address of float32, or 0.
        unit: tiles per unit of work; for gated operations, groups.
        panel: buffer of the quantized input rows.
        fine: 1 if the codes of the panel have two planes.
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
    """The panel into which a result is quantized.

    Attributes:
        kind: number of the weight format that reads the panel, or 0 to keep the result in float32.
        buffer: number of the buffer.
        fine: 1 if codes have two planes.
    """

    kind: int = 0
    buffer: int = 0
    fine: int = 0


class InnerChannels(NamedTuple):
    """The inner channels of an MLP.

    Attributes:
        size: number of channels.
        act: the activation, an ACT_* number.
        kind: number of the weight format that reads the channels, or 0 if they stay in float32.
    """

    size: int
    act: int
    kind: int


class ExpertCounts(NamedTuple):
    """Number of experts per layer and per token.

    Attributes:
        total: number of experts in the layer.
        used: number of experts per token.
    """

    total: int
    used: int


class ConvInputs(NamedTuple):
    """A short causal convolution along a sequence, and the location of its conv state.

    Attributes:
        rows: the inputs.
        channels: channels per row, a multiple of 16.
        width: number of earlier inputs that a token reads.
        state: byte offset of the conv state in a slot.
        weights: address of float32 [width + 1, channels].
        bias: address of float32 [channels], or 0.
        gated: 1 if a row is [B | C | x] and the input is B * x.
        draft: byte offset in a row of draft inputs.
        draft_step: bytes per row of draft inputs.
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
    """Heads of a layer whose recurrent state is one matrix per head.

    Attributes:
        key_heads: number of key and query heads.
        key_dim: channels per key.
        heads: number of value heads.
        dim: channels per value.
        tiled: 1 if value head h reads key head h mod key_heads, 0 if it reads h // (heads /
            key_heads).
        rule: number in `RULES`.
    """

    key_heads: int
    key_dim: int
    heads: int
    dim: int
    tiled: int = 0
    rule: int = 0


class EmbedOp(NamedTuple):
    """Embedding rows of the tokens, multiplied by `factor`."""

    out: BufferRows
    matrix: PackedMatrix
    factor: Float32 = 1.0


class NormOp(NamedTuple):
    """RMS norm of the first `size` floats of each row; `weight` is an address of float32."""

    source: BufferRows
    out: BufferRows
    size: int
    weight: int
    eps: Float32
    panel: PanelTarget = PanelTarget()


class AddNormOp(NamedTuple):
    """Norm and residual: out = (out + factor * norm(source)) * sum_factor."""

    source: BufferRows
    out: BufferRows
    size: int
    weight: int
    eps: Float32
    factor: Float32 = 1.0
    sum_factor: Float32 = 1.0


class PerLayerOp(NamedTuple):
    """Per-layer inputs, in place: (norm(piece) + factor * piece of `by`) * sum_factor.

    A piece is the `size` floats of a row that belong to one layer.
    """

    out: BufferRows
    by: BufferRows
    size: int
    weight: int
    eps: Float32
    factor: Float32 = 1.0
    sum_factor: Float32 = 1.0


class QuantizeOp(NamedTuple):
    """Quantization of the first `size` floats of each row into a panel."""

    source: BufferRows
    size: int
    panel: PanelTarget


class ActivateOp(NamedTuple):
    """act(source) * by, quantized into `panel`.

    If `by` has no buffer, the second half of the source row takes its place.
    """

    source: BufferRows
    out: BufferRows
    size: int
    act: int
    by: BufferRows = BufferRows()
    panel: PanelTarget = PanelTarget()


class RopeOp(NamedTuple):
    """Norms and RoPE of queries, keys and values; stores KV in the pool or in buffers.

    Attributes:
        source: rows [queries | keys | values].
        heads: number of query heads.
        kv_heads: number of KV heads, or 0 if the layer attends to another layer's KV.
        dim: channels per head.
        half: rotary pairs per head.
        table: buffer of cosines; the next buffer holds the sines.
        q_norm: address of the queries' norm weights.
        k_norm: address of the keys' norm weights.
        v_norm: address of ones, or 0 if values are not normed.
        keys_twice: 1 if the values are the keys before their norm.
        norm_all: norm of queries and keys: 0 for none, 1 for each head, 2 for all heads as one row.
        late_norm: 1 if these norms come after the rotation.
        query_scale: buffer that holds a factor of queries for each position, or 0.
        layer: index of the attention row.
        eps: epsilon of the norms.
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
    """Linear layer: out = (matrix @ source + bias) * factor.

    Integer weights read a panel instead of `source`.

    Attributes:
        source: input rows for float weights.
        out: output rows; `first` is a multiple of 16.
        matrix: the weights.
        size: number of rows of the matrix.
        add: 1 to add the result to `out`.
        factor: factor applied to the result.
    """

    source: BufferRows
    out: BufferRows
    matrix: PackedMatrix
    size: int
    add: int = 0
    factor: Float32 = 1.0


class GatedOp(NamedTuple):
    """Fused gate and up matrices (or only up), activation, and quantization into buffer `out`."""

    matrix: PackedMatrix
    inner: InnerChannels
    out: int


class CapOp(NamedTuple):
    """Softcap of logits in place: x -> cap * tanh(x / cap)."""

    rows: BufferRows
    size: int
    cap: Float32


class ContinueOp(NamedTuple):
    """Copy of partial blocks of a quantized pool into new buffers, before KV is written.

    These are the blocks that earlier passes began and this pass continues.
    """

    layer: int


class CloseOp(NamedTuple):
    """Quantization of the completed blocks of a quantized pool, after KV is written."""

    layer: int


class AttendOp(NamedTuple):
    """Attention of one layer."""

    layer: int


class RouteOp(NamedTuple):
    """Router: computes each token's experts and shares from its row of logits.

    Attributes:
        experts: number of experts.
        step: floats per row.
        score: number in `SCORES`.
        renorm: number in `RENORMS`.
        bias: address of float32 that is added to scores for the selection only, or 0.
        factors: address of a float32 factor for each expert's share, or 0.
        eps: added to the sum of shares, or its lower limit, depending on `renorm`.
        factor: factor applied to all shares.
        groups: number of groups that the experts are divided into.
        used_groups: number of groups that a token may use.
    """

    experts: ExpertCounts
    step: int
    score: int
    renorm: int
    bias: int = 0
    factors: int = 0
    eps: Float32 = 0.0
    factor: Float32 = 1.0
    groups: int = 1
    used_groups: int = 1


class DispatchOp(NamedTuple):
    """Lists of the tokens of each expert."""

    experts: ExpertCounts


class SpreadOp(NamedTuple):
    """Rows of each expert's tokens, stored one after another.

    They are panels for weight format `kind`, or float32 if `kind` is 0.
    """

    experts: ExpertCounts
    source: BufferRows
    size: int
    kind: int = 0


class ExpertsGatedOp(NamedTuple):
    """`GatedOp` for every expert and its tokens; `step` is the number of floats per float32 row."""

    experts: ExpertCounts
    matrix: PackedMatrix
    inner: InnerChannels
    step: int


class ExpertsDownOp(NamedTuple):
    """Down projection of all experts, summed with the tokens' shares as weights."""

    experts: ExpertCounts
    matrix: PackedMatrix
    out: BufferRows
    size: int
    add: int = 0
    factor: Float32 = 1.0


class AddSharedOp(NamedTuple):
    """Shared expert: out += factor * sigmoid(first number of `by`) * source."""

    source: BufferRows
    out: BufferRows
    by: BufferRows
    size: int
    factor: Float32 = 1.0


class ConvOp(NamedTuple):
    """Gated short convolution of each token; see `ConvInputs`."""

    conv: ConvInputs
    out: BufferRows


class KeepConvOp(NamedTuple):
    """Conv state that the next pass needs."""

    conv: ConvInputs


class ScanInputsOp(NamedTuple):
    """Queries, keys, values and gates of each token for `ScanOp`.

    Attributes:
        conv: the short convolution of queries, keys and values.
        heads: the heads.
        gates: rows from which decays and shares (Mamba2: dt) are computed.
        decay: address of float32 [heads].
        dt_bias: address of float32 [heads].
        q_norm: address of the queries' norm weights, or 0.
        k_norm: address of the keys' norm weights, or 0.
        eps: epsilon of the norms.
        least: lower limit of dt.
        most: upper limit of dt.
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
    """Update of a layer's recurrent state with the tokens of a pass.

    Attributes:
        heads: the heads.
        state: byte offset of the matrices in a slot.
        skip: address of float32 [heads]; each value times this factor is added to its result
            (Mamba2's D).
    """

    heads: StateHeads
    state: int
    skip: int = 0


class GateOp(NamedTuple):
    """Norm and gate of the results of `ScanOp`.

    Attributes:
        source: the gates.
        out: output rows.
        heads: the heads.
        weight: address of the norm's weights.
        groups: number of groups of channels with a separate norm, or 0 for no norm.
        weight_step: floats from one group's weights to the next group's.
        gate_first: 1 if the gate comes before the norm.
        eps: epsilon of the norm.
    """

    source: BufferRows
    out: BufferRows
    heads: StateHeads
    weight: int = 0
    groups: int = 0
    weight_step: int = 0
    gate_first: int = 0
    eps: Float32 = 0.0


class WidePanelOp(NamedTuple):
    """`QuantizeOp` in wide arithmetic; see linear/wide.py. `panel.kind` is ignored."""

    source: BufferRows
    size: int
    panel: PanelTarget


class WideLinearOp(NamedTuple):
    """`LinearOp` in wide arithmetic, which reads a panel of `WidePanelOp` or `WideGatedOp`."""

    out: BufferRows
    matrix: PackedMatrix
    size: int
    add: int = 0
    factor: Float32 = 1.0


class WideGatedOp(NamedTuple):
    """`GatedOp` in wide arithmetic. The number of inner channels is a multiple of 32."""

    matrix: PackedMatrix
    inner: InnerChannels
    out: int


Operation = tuple[Any, ...]
"""Any of the operations above."""

# Numbers of the buffers with a fixed meaning. The buffers from B_TABLES on hold pairs of RoPE
# tables (cos, sin), followed by factors of queries. These names need an explanation:
#
#   B_PANEL, B_INNER          quantized rows
#   B_ROWS                    attention rows of all layers, see attention_calls.py; if it is 0,
#                             RopeOp leaves KV in B_KEY and B_VALUE
#   B_PER_LAYER               per-layer inputs of each token, for all layers
#   B_TABLE_ROWS              the part of these inputs that comes from a table of tokens
#   B_ROUTED                  router logits
#   B_CHOSEN, B_SHARES        experts and shares of each token
#   B_DISPATCH                tokens of each expert, see expert_routing.py
#   B_SPREAD, B_EXPERTS_INNER rows or panels of one expert after another
#   B_BESIDE                  result of an MLP that runs in parallel to the experts
#   B_MIXED                   result of a recurrent mixer if its layer also has attention; otherwise
#                             the result is in B_QUERY
#   B_STATES                  recurrent states of the pass, see states/sequences.py
#   B_SEQUENCES               number of sequences in B_STATES, not an address
#   B_DRAFTS                  inputs of recurrent states for draft tokens
(
    B_TOKENS,
    B_POSITIONS,
    B_HIDDEN,
    B_NORMED,
    B_PANEL,
    B_INNER,
    B_PROJECTED,
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

# Indices of entry addresses in a job. Indices below K_ATTEND are numbers of weight formats. Those
# from K_EXPERTS to K_WIDE run operations that few models need; see interpreter.py. K_REQUANTIZE
# plus the number of a weight format is an entry of linear/wide.py. K_PROGRAM is not an index but
# denotes the entry that runs the program.
K_PROGRAM = -1
K_ATTEND, K_CLOSE, K_EXPERTS, K_CONV, K_TAILS, K_SCAN, K_WIDE, K_REQUANTIZE = range(
    MAX_KINDS, MAX_KINDS + 8
)
NUM_KERNELS = K_REQUANTIZE + MAX_KINDS
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
    K_WIDE: (WidePanelOp, WideLinearOp, WideGatedOp),
}
"""Entry -> operations that it runs. Each operation has one entry; others are rejected."""
_KINDS = [kind for kinds in OPERATIONS.values() for kind in kinds]  # indexed by code
ENTRY_OF = np.array([entry for entry, kinds in OPERATIONS.items() for _ in kinds])
"""int64, the entry of each operation, indexed by the operation's code."""

# rounded up to whole cache lines
OP_NUMBERS = -(-max(1 + num_numbers(kind) for kind in _KINDS) // 8) * 8
COUNTERS_PER_OP = 16  # two counters on separate cache lines


def table_of(operations: Sequence[Operation]) -> npt.NDArray[np.int64]:
    """Return the table of the given operations, int64 [num_ops, OP_NUMBERS]."""
    table = np.zeros((len(operations), OP_NUMBERS), dtype=np.int64)
    for row, operation in zip(table, operations, strict=True):
        numbers = numbers_of(type(operation), operation)
        row[0] = _KINDS.index(type(operation))
        row[1 : 1 + numbers.size] = numbers
    return table


class ProgramJob(NamedTuple):
    """Arguments shared by all threads of one call.

    Attributes:
        ops: int64 [num_ops, OP_NUMBERS].
        buffers: int64 [num_buffers], addresses.
        counters: int64, zeros: COUNTERS_PER_OP for each operation from `first` on, then one for the
            whole call.
        kernels: int64 [NUM_KERNELS], addresses of entries, 0 if not needed; see entries.py.
        first: first operation to run.
        last: end of the operations to run.
        tokens: rows of this pass.
        matrix: 1 if panels have AMX sizes, else 0.
    """

    ops: npt.NDArray[np.int64]
    buffers: npt.NDArray[np.int64]
    counters: npt.NDArray[np.int64]
    kernels: npt.NDArray[np.int64]
    first: int
    last: int
    tokens: int
    matrix: int


JOB_TYPE = Tuple(ProgramJob, (array("int64", 2), *[array("int64")] * 3, *[INT64] * 4))
"""Type of a job."""


@kernel
def op_at(job: ProgramJob, index: int) -> Any:
    """Return the address of an operation's fields."""
    return address_of(job.ops) + 8 * (OP_NUMBERS * index + 1)


@kernel
def row_at(job: ProgramJob, rows: BufferRows, token: int) -> Any:
    """Return the address of a token's row in a buffer."""
    return job.buffers[rows.buffer] + 4 * (token * rows.step + rows.first)


@intrinsic
def is_op(typing: Any, kind: Any, at: Any) -> Any:
    """Return whether the fields at an address belong to an operation of class `kind`."""

    def codegen(context: Any, b: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        code = ir.Constant(I64, _KINDS.index(kind.instance_class))
        return b.icmp_signed(
            "==", emit_load(b, I64, b.sub(arguments[1], ir.Constant(I64, 8))), code
        )

    return types.boolean(kind, types.int64), codegen


@kernel
def entry_at(at: int) -> Any:
    """Return the entry that runs the operation whose fields are at an address."""
    return ENTRY_OF[load_i64(at - 8)]
