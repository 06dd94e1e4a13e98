"""A model's spec and packed weights as a program of operations for the linear kernels."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from kvboost_edge.backends.base import AttentionParams
from kvboost_edge.kernels.linear.weight_tiles import GROUP
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.activations import ACT_SIGMOID
from kvboost_edge.kernels.program.entries import entries_of
from kvboost_edge.models.config.spec import ModelSpec
from kvboost_edge.models.packed.file import PackedWeights
from kvboost_edge.models.packed.plan import PackEntry
from kvboost_edge.runners.native.emitter import ACTIVATIONS, Emitter, Rows
from kvboost_edge.runners.native.mixture import emit_mixture, emit_mixture_beside
from kvboost_edge.runners.native.sizes import padded
from kvboost_edge.runners.native.states import StateOperations

__all__ = ["LayerProgram", "attention_params", "build_program", "possible_operations"]


@dataclasses.dataclass(frozen=True, slots=True)
class LayerProgram:
    """ops int64 [num_ops, NUM_FIELDS] and params float32 [num_ops, NUM_PARAMS].

    `parts[i]` = (first, end): part 0 embeds and prepares layer 0's attention; part i > 0 finishes
    layer i - 1 and prepares layer i. The last one finishes the last layer and computes logits; run
    up to `normed` it leaves the hidden state behind the last norm in B_NORMED. Between two parts
    stand the layer's OP_CLOSE, where it has keys and values of its own, and OP_ATTEND, for passes
    that run it in the program; nothing behind a layer that does not attend.

    From part `narrow` on no keys, values and states are computed: it and all behind it need the
    rows of logits only. border: the buffer that it reads beside the hidden state, what attention
    returned and B_PER_LAYER; None: no other accept: (first, end) of what lets states take in rows
    of drafts; empty where there are no states held: weights of norms that have none, to which
    operations point
    """

    ops: npt.NDArray[np.int64]
    params: npt.NDArray[np.float32]
    parts: tuple[tuple[int, int], ...]
    narrow: int
    normed: int
    border: Rows | None
    accept: tuple[int, int]
    held: list[npt.NDArray[np.float32]]

    @property
    def operations(self) -> set[int]:
        """Which ones there are."""
        return set(self.ops[:, lt.F_OP].tolist())


class _Builder(Emitter):
    def __init__(
        self, spec: ModelSpec, plan: list[PackEntry], packed: PackedWeights, num_threads: int
    ) -> None:
        super().__init__(spec, plan, packed, num_threads)
        self.ones = np.ones(max(layer.head_dim for layer in spec.layers), dtype=np.float32)
        self.states = None if spec.mixer is None else StateOperations(self, spec.mixer)

    def embed(self) -> None:
        fields = {
            lt.F_DST: lt.B_HIDDEN,
            lt.F_DST_STEP: self.sizes.hidden,
            lt.F_COUNT: self.spec.hidden_size,
        }
        weights = {lt.F_KIND: self.kind("embed"), lt.F_WEIGHT: self.packed.address("embed")}
        scale = {
            lt.F_SCALE: self.packed.address("embed.scales"),
            lt.F_MINIMA: self.packed.address("embed.minima"),
        }
        self.add(lt.OP_EMBED, {**fields, **weights, **scale}, factor=self.spec.embedding_factor)
        if self.spec.per_layer is not None:
            self.per_layer_inputs(self.spec.per_layer.width)

    def per_layer_inputs(self, width: int) -> None:
        """Of the embedding and of the rows of the table, which have a scale of their own:
        B_PER_LAYER.
        """
        spec = self.spec
        hidden = (lt.B_HIDDEN, self.sizes.hidden)
        self.quantize(*hidden, spec.hidden_size, "ple_in")
        self.linear(
            "ple_in", hidden, (lt.B_PER_LAYER, self.sizes.per_layer), factor=spec.hidden_size**-0.5
        )
        fields = {lt.F_DST: lt.B_PER_LAYER, lt.F_DST_STEP: self.sizes.per_layer, lt.F_COUNT: width}
        fields |= {lt.F_BY: lt.B_TABLE_ROWS, lt.F_BY_STEP: len(spec.layers) * width}
        fields |= {lt.F_WEIGHT: self.packed.address("ple_in_norm")}
        self.add(lt.OP_PER_LAYER, fields, eps=spec.eps, factor=width**0.5, sum_factor=2**-0.5)

    def before_attention(self, index: int) -> None:
        spec = self.spec
        layer = f"layer{index}."
        sizes = self.sizes
        source = (lt.B_NORMED, sizes.hidden)
        if spec.family.norms == "post":
            source = (lt.B_HIDDEN, sizes.hidden)
            self.quantize(*source, spec.hidden_size, f"{layer}qkv")
        else:
            self.norm(f"{layer}attn_in", f"{layer}qkv")
        self.linear(f"{layer}qkv", source, (lt.B_WIDE, sizes.wide), factor=spec.factors.attention)
        own = spec.layers[index]
        if own.owns_kv:
            self.add(lt.OP_CONTINUE, {lt.F_LAYER: index})
        rope = own.rope
        fields = {
            lt.F_SRC: lt.B_WIDE,
            lt.F_SRC_STEP: sizes.wide,
            lt.F_HEADS: spec.num_heads,
            lt.F_KV_HEADS: own.num_kv_heads if own.owns_kv else 0,
            lt.F_DIM: own.head_dim,
            lt.F_HALF: spec.ropes[rope].half if rope >= 0 else 0,
            lt.F_Q_NORM: self.packed.address(f"{layer}q_norm"),
            lt.F_K_NORM: self.packed.address(f"{layer}k_norm"),
            lt.F_V_NORM: self.ones.ctypes.data if spec.family.value_norm else 0,
            lt.F_KEYS_TWICE: int(own.owns_kv and not own.has_values),
            lt.F_NORM_ALL: {"": 0, "head": 1, "all": 2}[spec.family.head_norm],
            lt.F_TABLE: lt.B_TABLES + 2 * max(rope, 0),
            lt.F_QUERY_SCALE: lt.B_TABLES + 2 * len(spec.ropes) if spec.query_scale else 0,
            lt.F_LATE_NORM: int(spec.family.late_norm),
            lt.F_LAYER: index,
        }
        self.add(lt.OP_ROPE, fields, eps=spec.eps)

    def gate(self, index: int, rows: Rows) -> None:
        """What attention returned times the sigmoid of gates, in place, for the layer's output
        projection.
        """
        own = self.spec.layers[index]
        count = self.spec.num_heads * self.spec.layers[index].head_dim
        gates = {lt.F_SRC: lt.B_WIDE, lt.F_SRC_STEP: self.sizes.wide}
        gates[lt.F_SRC_FIRST] = count + 2 * own.num_kv_heads * own.head_dim
        steps = {lt.F_BY: rows[0], lt.F_BY_STEP: rows[1], lt.F_DST: rows[0], lt.F_DST_STEP: rows[1]}
        act = {lt.F_COUNT: count, lt.F_ACT: ACT_SIGMOID, **self.panel(f"layer{index}.out")}
        self.add(lt.OP_ACT, {**gates, **steps, **act})

    def before_mixing(self, index: int) -> None:
        """What a layer does before its attention, where it attends; what has a state is done behind
        it.
        """
        layer = self.spec.layers[index]
        if layer.keeps_state:
            assert self.states is not None
            self.states.before(f"layer{index}.", layer.state)
        if layer.attends:
            self.before_attention(index)

    def accept_drafts(self) -> tuple[int, int]:
        """See `LayerProgram.accept`."""
        first = len(self.rows)
        for index, layer in enumerate(self.spec.layers):
            if layer.state >= 0:
                assert self.states is not None
                self.states.accept(f"layer{index}.", layer.state)
        return first, len(self.rows)

    def border(self, index: int) -> Rows | None:
        """See `LayerProgram.border`, of a part behind this layer."""
        if self.spec.layers[index].keeps_state:
            assert self.states is not None
            return self.states.mixed
        return (lt.B_WIDE, self.sizes.wide) if self.spec.family.output_gate else None

    def after_mixing(self, index: int) -> None:
        """The ways back of what mixed tokens into the hidden state, where a layer has something
        that does.
        """
        spec = self.spec
        layer = f"layer{index}."
        own = self.spec.layers[index]
        if own.attends:
            rows = (lt.B_ATTENDED, self.sizes.attended[index])
            if spec.family.output_gate:
                self.gate(index, rows)
            else:
                self.quantize(*rows, spec.num_heads * own.head_dim, f"{layer}out")
            self.into_hidden(
                f"{layer}out", rows, f"{layer}attn_out", factor=spec.factors.attention_out
            )
        if own.keeps_state:
            assert self.states is not None
            rows = self.states.mixed
            name = f"{layer}mixer_out"
            self.quantize(*rows, rows[1], name)
            self.into_hidden(name, rows, f"{layer}attn_out", factor=spec.factors.mixer_out)

    def behind_mixing(self, index: int) -> None:
        """The layer's MLP or experts, and what stands behind them."""
        spec = self.spec
        layer = f"layer{index}."
        sizes = self.sizes
        experts = spec.experts if spec.experts is not None and spec.experts.sparse[index] else None
        if experts is not None and not experts.beside:
            emit_mixture(self, layer, experts)
            return
        if not spec.layers[index].intermediate_size:
            return
        source = (lt.B_NORMED, sizes.hidden)
        inner = spec.layers[index].intermediate_size
        scalar = self.scalar(layer)
        sum_factor = 1.0 if spec.per_layer else scalar
        if experts is not None:
            emit_mixture_beside(self, layer, experts, inner, sum_factor)
        elif spec.family.norms == "post":
            source = (lt.B_HIDDEN, sizes.hidden)
            self.quantize(*source, spec.hidden_size, f"{layer}{spec.family.way_in}")
            self.gated(layer, source, inner, sum_factor)
        else:
            self.norm(f"{layer}mlp_in", f"{layer}{spec.family.way_in}", factor=spec.factors.mlp)
            self.gated(layer, source, inner, sum_factor)
        if spec.per_layer is not None:
            self.per_layer(layer, index, spec.per_layer.width, scalar)

    def scalar(self, layer: str) -> float:
        """What the layer's result is multiplied with."""
        if not self.spec.family.layer_scalar:
            return 1.0
        return float(self.packed.array(f"{layer}scalar").view(np.float32)[0])

    def per_layer(self, layer: str, index: int, width: int, scalar: float) -> None:
        """The layer's own input, gated by the hidden state, and the way back into it."""
        hidden = (lt.B_HIDDEN, self.sizes.hidden)
        wide = (lt.B_WIDE, self.sizes.wide)
        names = (f"{layer}ple_gate", f"{layer}ple_out")
        rows = (lt.B_NORMED, padded(width, GROUP))
        self.quantize(*hidden, self.spec.hidden_size, names[0])
        self.linear(names[0], hidden, wide)
        steps = {
            lt.F_SRC: wide[0],
            lt.F_SRC_STEP: wide[1],
            lt.F_DST: rows[0],
            lt.F_DST_STEP: rows[1],
        }
        by = {
            lt.F_BY: lt.B_PER_LAYER,
            lt.F_BY_STEP: self.sizes.per_layer,
            lt.F_BY_FIRST: index * width,
        }
        fields = {
            lt.F_COUNT: width,
            lt.F_ACT: ACTIVATIONS[self.spec.activation],
            **self.panel(names[1], lt.B_INNER),
        }
        self.add(lt.OP_ACT, {**steps, **by, **fields})
        self.into_hidden(names[1], rows, f"{layer}ple_norm", panel=lt.B_INNER, sum_factor=scalar)

    def head(self) -> int:
        """The last norm and the head; the number of the operation behind the norm."""
        spec = self.spec
        sizes = self.sizes
        name = "embed" if spec.tied else "head"
        self.norm("norm", name)
        normed = len(self.rows)
        logits = (lt.B_LOGITS, sizes.logits)
        self.linear(name, (lt.B_NORMED, sizes.hidden), logits, factor=spec.logit_factor)
        if spec.logit_cap > 0:
            fields = {
                lt.F_SRC: lt.B_LOGITS,
                lt.F_SRC_STEP: sizes.logits,
                lt.F_COUNT: spec.vocab_size,
            }
            self.add(lt.OP_CAP, fields, cap=spec.logit_cap)
        return normed


def build_program(
    spec: ModelSpec, plan: list[PackEntry], packed: PackedWeights, num_threads: int
) -> LayerProgram:
    """The program of a model; it holds addresses of `packed`, which must outlive it."""
    builder = _Builder(spec, plan, packed, num_threads)
    parts = []
    first = 0
    builder.embed()
    for index in range(len(spec.layers)):
        builder.before_mixing(index)
        parts.append((first, len(builder.rows)))
        if spec.layers[index].owns_kv:
            builder.add(lt.OP_CLOSE, {lt.F_LAYER: index})
        if spec.layers[index].attends:
            builder.add(lt.OP_ATTEND, {lt.F_LAYER: index})
        first = len(builder.rows)
        builder.after_mixing(index)
        builder.behind_mixing(index)
    normed = builder.head()
    parts.append((first, len(builder.rows)))
    accept = builder.accept_drafts()
    ops = np.zeros((len(builder.rows), lt.NUM_FIELDS), dtype=np.int64)
    params = np.zeros((len(builder.rows), lt.NUM_PARAMS), dtype=np.float32)
    for index, (fields, floats) in enumerate(zip(builder.rows, builder.floats, strict=True)):
        ops[index, list(fields)] = list(fields.values())
        params[index, list(floats)] = list(floats.values())
    border = builder.border(spec.first_shared - 1)
    entries_of(ops[:, lt.F_OP].tolist())  # raises where one has none
    held = [
        builder.ones,
        *builder.scaled_vectors.values(),
        *(() if builder.states is None else builder.states.held),
    ]
    return LayerProgram(ops, params, tuple(parts), spec.first_shared, normed, border, accept, held)


def possible_operations(spec: ModelSpec) -> list[int]:
    """All that a program of the model may have: before its weights are packed there is none to look
    at.
    """
    found = [lt.K_PROGRAM]
    if spec.experts is not None:
        found.append(lt.K_EXPERTS)
    if spec.mixer is not None:
        found += [lt.K_TAILS, lt.K_CONV if spec.mixer.kind == "conv" else lt.K_SCAN]
    return [operation for entry in found for operation in lt.OPERATIONS[entry]]


def attention_params(spec: ModelSpec, packed: PackedWeights) -> list[AttentionParams]:
    """The constants of attention of each layer; sinks are float32 [num_heads], views of
    `packed`.
    """

    def sinks(layer: int) -> npt.NDArray[np.float32] | None:
        if not spec.family.sinks:
            return None
        return packed.array(f"layer{layer}.sinks").view(np.float32)[: spec.num_heads]

    return [
        AttentionParams(spec.softmax_scale, layer.window, spec.softcap, sinks(index))
        for index, layer in enumerate(spec.layers)
    ]
