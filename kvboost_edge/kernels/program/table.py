"""The table that a layer program is: fields of an operation, its parameters, and the buffers it
works on.

An operation is a row of int64 fields (the `F_*` constants) and a row of float32 parameters;
operands are numbers of buffers, whose addresses come with each call.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba.core import types
from numba.core.types.containers import BaseTuple

__all__ = [
    "COUNTERS_PER_OP",
    "ENTRY_OF",
    "JOB_TYPE",
    "NUM_FIELDS",
    "NUM_PARAMS",
    "OPERATIONS",
    "RENORMS",
    "RULES",
    "SCORES",
    "ProgramJob",
]

# Operations. OP_GATED: gate and up matrices (or up alone, as the activation says), activation and
# quantization in one. OP_CONTINUE, OP_CLOSE: what is done in a quantized pool before keys and
# values are written, and after it. OP_PER_LAYER: every layer's piece of a row is normed, and
# another row added. OP_ROUTE, OP_DISPATCH, OP_SPREAD, OP_EXPERTS_GATED, OP_EXPERTS_DOWN: experts,
# see expert_routing.py and experts.py. OP_ADD_SHARED: a row times the sigmoid of a number is added
# to another. OP_CONV, OP_TAILS, OP_STEPS, OP_SCAN, OP_GATE: layers with a state, see states/.
(
    OP_EMBED,
    OP_NORM,
    OP_ADD_NORM,
    OP_QUANT,
    OP_ACT,
    OP_ROPE,
    OP_LINEAR,
    OP_GATED,
    OP_CAP,
    OP_CONTINUE,
    OP_CLOSE,
    OP_ATTEND,
    OP_PER_LAYER,
    OP_ROUTE,
    OP_DISPATCH,
    OP_SPREAD,
    OP_EXPERTS_GATED,
    OP_EXPERTS_DOWN,
    OP_ADD_SHARED,
    OP_CONV,
    OP_TAILS,
    OP_STEPS,
    OP_SCAN,
    OP_GATE,
) = range(24)
# Fields of every operation: what it is, buffers read and written and their float32 a row (0: the
# operation's own).
F_OP, F_SRC, F_DST, F_SRC_STEP, F_DST_STEP = range(5)
# Sizes: outputs (or elements of a row) and inputs; kind of the weights; the activation.
F_COUNT, F_INPUTS, F_KIND, F_ACT = range(5, 9)
# Quantized rows: kind of the weights that will read what this writes, or 0 for no quantization; its
# panel; whether its codes have two planes. A matrix reads F_PANEL_IN, coarse or F_FINE_IN.
F_QUANT, F_PANEL, F_FINE, F_PANEL_IN, F_FINE_IN = range(9, 14)
# Addresses: weights, scales, minima (of block kinds: the blocks' numbers, of int4t its tables, see
# linear/weight_layout.py), bias; OP_ROUTE: of each expert's factor (F_SCALE) and of the bias of the
# choice. F_UNIT: tiles (OP_GATED: groups) in a unit; F_ADD: add to the destination.
F_WEIGHT, F_SCALE, F_MINIMA, F_BIAS, F_UNIT, F_ADD = range(14, 20)
# Rope: heads and dims, the norms' addresses, the table. F_LAYER: whose row of B_ROWS is used.
F_HEADS, F_KV_HEADS, F_DIM, F_HALF, F_Q_NORM, F_K_NORM, F_NORM_ALL, F_TABLE, F_LAYER = range(20, 29)
# OP_LINEAR: the first float of a destination's row that is written, a multiple of 16.
F_DST_FIRST = 29
# OP_ROPE: the address of ones that the norm of values has for weights, or 0; whether values are the
# keys before theirs.
F_V_NORM = 30
F_KEYS_TWICE = 31
# OP_ACT and OP_PER_LAYER: the buffer that the activation is multiplied with (0: the row's second
# half), or that is added; its floats a row and the first of them.
F_BY = 32
F_BY_STEP = 33
F_BY_FIRST = 34
# OP_ROPE: the buffer with a factor for the queries of each position, or 0; whether norms stand
# behind rope.
F_QUERY_SCALE = 35
F_LATE_NORM = 36
# Experts: how many there are, and of each token; OP_ROUTE: their scores, and what shares are
# divided by.
F_EXPERTS, F_USED, F_SCORE, F_RENORM = range(37, 41)
# Operations on pieces of a row, and those that read the inputs of a convolution: the first float of
# the source's row.
F_SRC_FIRST = 41
# Layers with a state: its first byte in a slot; inputs before a token that a convolution reads;
# heads of keys and their dim (F_HEADS, F_DIM are those of values); whether value head h reads key
# head h mod F_KEY_HEADS; OP_TAILS: whether inputs are products; addresses of what makes decays; its
# first byte in a row of drafts, and the bytes of such a row.
F_STATE, F_TAPS, F_KEY_HEADS, F_KEY_DIM, F_TILED, F_GATED, F_DECAY, F_DT_BIAS = range(42, 50)
F_DRAFT = 50
F_DRAFT_STEP = 51
# What tokens do to a state; the address of how much of a value is added to its result. OP_GATE:
# groups that are normed, floats from the weights of one to those of the next, and whether the gates
# come first.
F_RULE, F_SKIP, F_GROUPS, F_WEIGHT_STEP, F_GATE_FIRST = range(52, 57)
NUM_FIELDS = 64  # eight cache lines
SCORES = {"softmax": 0, "sigmoid": 1, "chosen": 2}
"""Scores of a router -> F_SCORE; see `reference.experts.Routing`."""
RENORMS = {"": 0, "add": 1, "least": 2}
"""What shares are divided by -> F_RENORM."""
RULES = {"delta": 0, "ssd": 1}
"""What tokens do to a state -> F_RULE; see states/scan.py."""
# Float parameters: factor of the result, eps of a norm (OP_ROUTE: of the sum of shares), the cap;
# OP_ADD_NORM: factor of the sum; OP_STEPS: limits of a step of time.
P_FACTOR, P_EPS, P_CAP, P_SUM_FACTOR, P_LEAST, P_MOST = range(6)
NUM_PARAMS = 8  # half a cache line

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
# number; those behind K_CLOSE run operations that few models have, see run.py. K_PROGRAM is no
# address: what runs the program itself.
K_PROGRAM = -1
K_ATTEND, K_CLOSE, K_EXPERTS, K_CONV, K_TAILS, K_SCAN, NUM_KERNELS = range(16, 23)
OPERATIONS = {
    K_PROGRAM: (
        OP_EMBED,
        OP_NORM,
        OP_ADD_NORM,
        OP_QUANT,
        OP_ACT,
        OP_ROPE,
        OP_LINEAR,
        OP_GATED,
        OP_CAP,
        OP_CONTINUE,
        OP_CLOSE,
        OP_ATTEND,
        OP_PER_LAYER,
    ),
    K_EXPERTS: (OP_ROUTE, OP_DISPATCH, OP_SPREAD, OP_EXPERTS_GATED, OP_EXPERTS_DOWN, OP_ADD_SHARED),
    K_CONV: (OP_CONV,),
    K_TAILS: (OP_TAILS,),
    K_SCAN: (OP_STEPS, OP_SCAN, OP_GATE),
}
"""Entry -> the operations it knows. Each has one entry; a program with an operation that has none
is refused.
"""
_ENTRIES = {op: entry for entry, ops in OPERATIONS.items() for op in ops}
ENTRY_OF = np.array([_ENTRIES[op] for op in range(len(_ENTRIES))])
"""int64, of each operation its entry."""

COUNTERS_PER_OP = 16  # two counters on cache lines of their own


class ProgramJob(NamedTuple):
    """What the threads of one call share.

    ops       int64 [num_ops, NUM_FIELDS], run from `first` to before `last`
    params    float32 [num_ops, NUM_PARAMS]
    buffers   int64 [num_buffers], addresses
    counters  int64, zeros: COUNTERS_PER_OP for each op from first on, then one for the whole
    tokens    rows of this pass
    kernels   int64 [NUM_KERNELS], addresses of entries, see entries.py; 0 where the program needs
              none
    matrix    1: panels are as large as tile registers take, where kernels are compiled with them;
              0: not
    """

    ops: npt.NDArray[np.int64]
    params: npt.NDArray[np.float32]
    buffers: npt.NDArray[np.int64]
    counters: npt.NDArray[np.int64]
    kernels: npt.NDArray[np.int64]
    first: int
    last: int
    tokens: int
    matrix: int


_TABLES = [types.Array(number, 2, "C") for number in (types.int64, types.float32)]
JOB_TYPE = BaseTuple.from_types(
    [*_TABLES, *[types.Array(types.int64, 1, "C")] * 3, *[types.int64] * 4], ProgramJob
)
"""Numba's type of a job."""
