"""A model's spec and packed weights as a program of operations for the linear kernels."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from kvboost_edge.kernels import linear_program as lp
from kvboost_edge.kernels.linear_tiles import GROUP
from kvboost_edge.kernels.norms import ACT_GELU_TANH, ACT_SILU
from kvboost_edge.kernels.quant_weights import KINDS
from kvboost_edge.kernels.vectors import LANES
from kvboost_edge.models.families import ModelSpec
from kvboost_edge.models.packed_file import PackedWeights
from kvboost_edge.models.quantize import PackEntry

__all__ = ["LayerProgram", "Sizes", "build_program"]

_UNITS_PER_THREAD = 8
_MAX_TILES = 16
_ACTIVATIONS = {"silu": ACT_SILU, "gelu_tanh": ACT_GELU_TANH}


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """Floats in a row of each buffer, padded so that vectors and groups may run over the end of what counts."""

    hidden: int
    normed: int
    wide: int
    attended: int
    logits: int
    groups: int

    @classmethod
    def of(cls, spec: ModelSpec) -> Sizes:
        q_rows = spec.num_heads * spec.head_dim
        hidden, inner, attended = (_up(n, GROUP) for n in (spec.hidden_size, spec.intermediate_size, q_rows))
        qkv = q_rows + 2 * spec.num_kv_heads * spec.head_dim
        wide = _up(max(qkv, 2 * spec.intermediate_size, spec.hidden_size), GROUP) + 2 * GROUP
        groups = max(hidden, inner, attended) // GROUP
        return cls(hidden, max(hidden, inner), wide, attended, _up(spec.vocab_size, LANES), groups)


@dataclasses.dataclass(frozen=True, slots=True)
class LayerProgram:
    """ops int64 [num_ops, NUM_FIELDS] and params float32 [num_ops, NUM_PARAMS].

    `parts[i]` = (first, end): part 0 embeds and prepares layer 0's attention; part i > 0 finishes layer i - 1 and
    prepares layer i; the part after the last layer's finishes it. `head` works on the rows whose logits are wanted.
    """

    ops: npt.NDArray[np.int64]
    params: npt.NDArray[np.float32]
    parts: tuple[tuple[int, int], ...]
    head: tuple[int, int]


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class _Builder:
    def __init__(self, spec: ModelSpec, plan: list[PackEntry], packed: PackedWeights, num_threads: int) -> None:
        self.spec, self.packed, self.num_threads = spec, packed, num_threads
        self.entries = {entry.name: entry for entry in plan}
        self.sizes = Sizes.of(spec)
        self.rows: list[dict[int, int]] = []
        self.floats: list[dict[int, float]] = []

    def add(self, op: int, fields: dict[int, int], **params: float) -> None:
        names = {"factor": lp.P_FACTOR, "eps": lp.P_EPS, "cap": lp.P_CAP}
        self.rows.append({lp.F_OP: op, lp.F_GATHER: -1, **fields})
        self.floats.append({lp.P_FACTOR: 1.0, **{names[name]: value for name, value in params.items()}})

    def kind(self, name: str) -> int:
        return KINDS[self.entries[name].kind]

    def is_quantized(self, name: str) -> bool:
        return self.entries[name].kind in ("int8", "int4")

    def embed(self) -> None:
        fields = {lp.F_DST: lp.B_HIDDEN, lp.F_DST_STEP: self.sizes.hidden, lp.F_COUNT: self.spec.hidden_size}
        weights = {lp.F_KIND: self.kind("embed"), lp.F_WEIGHT: self.packed.address("embed")}
        scale = {lp.F_SCALE: self.packed.address("embed.scales")}
        self.add(lp.OP_EMBED, {**fields, **weights, **scale}, factor=self.spec.embedding_factor)

    def norm(self, weight: str, reader: str, *, gather: int = -1) -> None:
        """Norm of the hidden state for the matrix `reader`."""
        self.add(
            lp.OP_NORM,
            {
                lp.F_SRC: lp.B_HIDDEN,
                lp.F_SRC_STEP: self.sizes.hidden,
                lp.F_DST: lp.B_NORMED,
                lp.F_DST_STEP: self.sizes.hidden,
                lp.F_COUNT: self.spec.hidden_size,
                lp.F_WEIGHT: self.packed.address(weight),
                lp.F_QUANT: int(self.is_quantized(reader)),
                lp.F_GATHER: gather,
            },
            eps=self.spec.eps,
        )

    def quantize(self, source: int, step: int, count: int, reader: str) -> None:
        if self.is_quantized(reader):
            fields = {lp.F_SRC: source, lp.F_SRC_STEP: step, lp.F_COUNT: count, lp.F_QUANT: 1}
            self.add(lp.OP_QUANT, fields)

    def linear(self, name: str, source: tuple[int, int], out: tuple[int, int], *, add: bool, factor: float) -> None:
        """source, out: (buffer, floats in a row)."""
        entry = self.entries[name]
        tiles = -(-entry.rows // LANES)
        fields = {
            lp.F_SRC: source[0],
            lp.F_SRC_STEP: source[1],
            lp.F_DST: out[0],
            lp.F_DST_STEP: out[1],
            lp.F_COUNT: entry.rows,
            lp.F_INPUTS: entry.inputs,
            lp.F_KIND: self.kind(name),
            lp.F_WEIGHT: self.packed.address(name),
            lp.F_SCALE: self.packed.address(f"{name}.scales"),
            lp.F_BIAS: self.packed.address(f"{name}_bias"),
            lp.F_UNIT: max(1, min(_MAX_TILES, tiles // (_UNITS_PER_THREAD * self.num_threads))),
            lp.F_ADD: int(add),
        }
        self.add(lp.OP_LINEAR, fields, factor=factor)

    def before_attention(self, index: int) -> None:
        spec, layer, sizes = self.spec, f"layer{index}.", self.sizes
        source = (lp.B_NORMED, sizes.hidden)
        if spec.family.norms == "post":
            source = (lp.B_HIDDEN, sizes.hidden)
            self.quantize(*source, spec.hidden_size, f"{layer}qkv")
        else:
            self.norm(f"{layer}attn_in", f"{layer}qkv")
        self.linear(f"{layer}qkv", source, (lp.B_WIDE, sizes.wide), add=False, factor=1.0)
        rope = spec.layers[index].rope
        fields = {
            lp.F_SRC: lp.B_WIDE,
            lp.F_SRC_STEP: sizes.wide,
            lp.F_HEADS: spec.num_heads,
            lp.F_KV_HEADS: spec.num_kv_heads,
            lp.F_DIM: spec.head_dim,
            lp.F_HALF: spec.ropes[rope].half if rope >= 0 else 0,
            lp.F_Q_NORM: self.packed.address(f"{layer}q_norm"),
            lp.F_K_NORM: self.packed.address(f"{layer}k_norm"),
            lp.F_NORM_ALL: {"": 0, "head": 1, "all": 2}[spec.family.head_norm],
            lp.F_TABLE: lp.B_TABLES + 2 * max(rope, 0),
        }
        self.add(lp.OP_ROPE, fields, eps=spec.eps)

    def after_attention(self, index: int) -> None:
        spec, layer, sizes = self.spec, f"layer{index}.", self.sizes
        attended = (lp.B_ATTENDED, sizes.attended)
        self.quantize(*attended, spec.num_heads * spec.head_dim, f"{layer}out")
        self.into_hidden(f"{layer}out", attended, f"{layer}attn_out")
        source = (lp.B_NORMED, sizes.hidden)
        if spec.family.norms == "post":
            source = (lp.B_HIDDEN, sizes.hidden)
            self.quantize(*source, spec.hidden_size, f"{layer}gate_up")
        else:
            self.norm(f"{layer}mlp_in", f"{layer}gate_up")
        self.linear(f"{layer}gate_up", source, (lp.B_WIDE, sizes.wide), add=False, factor=1.0)
        inner = (lp.B_NORMED, _up(spec.intermediate_size, GROUP))
        fields = {
            lp.F_SRC: lp.B_WIDE,
            lp.F_SRC_STEP: sizes.wide,
            lp.F_DST: inner[0],
            lp.F_DST_STEP: inner[1],
            lp.F_COUNT: spec.intermediate_size,
            lp.F_KIND: _ACTIVATIONS[spec.activation],
            lp.F_QUANT: int(self.is_quantized(f"{layer}down")),
        }
        self.add(lp.OP_ACT, fields)
        self.into_hidden(f"{layer}down", inner, f"{layer}mlp_out")

    def into_hidden(self, name: str, source: tuple[int, int], norm: str) -> None:
        """Add a matrix's result to the hidden state, through a norm where the family has one behind."""
        spec, hidden, wide = self.spec, (lp.B_HIDDEN, self.sizes.hidden), (lp.B_WIDE, self.sizes.wide)
        if spec.family.norms == "pre":
            self.linear(name, source, hidden, add=True, factor=spec.residual_factor)
            return
        self.linear(name, source, wide, add=False, factor=1.0)
        fields = {lp.F_SRC: wide[0], lp.F_SRC_STEP: wide[1], lp.F_DST: hidden[0], lp.F_DST_STEP: hidden[1]}
        count = {lp.F_COUNT: spec.hidden_size, lp.F_WEIGHT: self.packed.address(norm)}
        self.add(lp.OP_ADD_NORM, {**fields, **count}, eps=spec.eps, factor=spec.residual_factor)

    def head(self) -> None:
        spec, sizes = self.spec, self.sizes
        name = "embed" if spec.tied else "head"
        self.norm("norm", name, gather=lp.B_ROWS)
        logits = (lp.B_LOGITS, sizes.logits)
        self.linear(name, (lp.B_NORMED, sizes.hidden), logits, add=False, factor=spec.logit_factor)
        if spec.logit_cap > 0:
            fields = {lp.F_SRC: lp.B_LOGITS, lp.F_SRC_STEP: sizes.logits, lp.F_COUNT: spec.vocab_size}
            self.add(lp.OP_CAP, fields, cap=spec.logit_cap)


def build_program(spec: ModelSpec, plan: list[PackEntry], packed: PackedWeights, num_threads: int) -> LayerProgram:
    """The program of a model; it holds addresses of `packed`, which must outlive it."""
    builder = _Builder(spec, plan, packed, num_threads)
    parts, first = [], 0
    builder.embed()
    for index in range(len(spec.layers)):
        builder.before_attention(index)
        parts.append((first, len(builder.rows)))
        first = len(builder.rows)
        builder.after_attention(index)
    parts.append((first, len(builder.rows)))
    first = len(builder.rows)
    builder.head()
    ops = np.zeros((len(builder.rows), lp.NUM_FIELDS), dtype=np.int64)
    params = np.zeros((len(builder.rows), lp.NUM_PARAMS), dtype=np.float32)
    for index, (fields, floats) in enumerate(zip(builder.rows, builder.floats, strict=True)):
        ops[index, list(fields)] = list(fields.values())
        params[index, list(floats)] = list(floats.values())
    return LayerProgram(ops, params, tuple(parts), (first, len(ops)))
