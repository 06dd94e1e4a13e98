"""A model's spec and packed weights as a program of operations for the linear kernels."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from kvboost_edge.backends.base import AttentionParams
from kvboost_edge.kernels.linear.tiles import GROUP
from kvboost_edge.kernels.linear.weights import NUMBERS
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.norms import ACT_GELU_TANH, ACT_SIGMOID, ACT_SILU
from kvboost_edge.kernels.vectors import LANES
from kvboost_edge.models.config.experts import Experts
from kvboost_edge.models.config.families import ModelSpec
from kvboost_edge.models.packed.file import PackedWeights
from kvboost_edge.models.packed.plan import PackEntry, run_name
from kvboost_edge.runners.native.mixture import expert_fields, route_fields
from kvboost_edge.runners.native.sizes import Sizes, padded
from kvboost_edge.runners.native.states import StateOperations

__all__ = ["LayerProgram", "attention_params", "build_program"]

# Where weights stream from memory long runs are best: 2 units a thread instead of 8 raise GB/s by a fifth to a half.
_UNITS_PER_THREAD = 2
_MAX_TILES = 256
# Matrices whose inputs are quantized to 16 bits: errors of queries, keys and logits show most, and the cost is least.
_FINE = ("qkv", "embed", "head")
Rows = tuple[int, int]
"""A buffer and the floats in a row of it."""
_ACTIVATIONS = {"silu": ACT_SILU, "gelu_tanh": ACT_GELU_TANH}


@dataclasses.dataclass(frozen=True, slots=True)
class LayerProgram:
    """ops int64 [num_ops, NUM_FIELDS] and params float32 [num_ops, NUM_PARAMS].

    `parts[i]` = (first, end): part 0 embeds and prepares layer 0's attention; part i > 0 finishes layer i - 1 and
    prepares layer i. The last one finishes the last layer and computes logits; run up to `normed` it leaves the hidden
    state behind the last norm in B_NORMED. Between two parts stand the layer's OP_CLOSE, where it has keys and values
    of its own, and OP_ATTEND, for passes that run it in the program; nothing behind a layer with a state.

    From part `narrow` on no keys, values and states are computed: it and all behind it need the rows of logits only.
    border: the buffer that it reads beside the hidden state, what attention returned and B_PER_LAYER; None: no other
    held: weights of norms that have none, to which operations point
    """

    ops: npt.NDArray[np.int64]
    params: npt.NDArray[np.float32]
    parts: tuple[tuple[int, int], ...]
    narrow: int
    normed: int
    border: Rows | None
    held: list[npt.NDArray[np.float32]]


def _is_fine(name: str) -> bool:
    """Whether the inputs of a matrix have 16-bit codes."""
    return name.rpartition(".")[2] in _FINE


class _Builder:
    def __init__(self, spec: ModelSpec, plan: list[PackEntry], packed: PackedWeights, num_threads: int) -> None:
        self.spec, self.packed, self.num_threads = spec, packed, num_threads
        self.entries = {entry.name: entry for entry in plan}
        self.sizes = Sizes.of(spec)
        self.ones = np.ones(max(layer.head_dim for layer in spec.layers), dtype=np.float32)
        self.states = None if spec.mixer is None else StateOperations(self, spec.mixer)
        self.rows: list[dict[int, int]] = []
        self.floats: list[dict[int, float]] = []

    def add(self, op: int, fields: dict[int, int], **params: float) -> None:
        names = {"factor": lt.P_FACTOR, "eps": lt.P_EPS, "cap": lt.P_CAP, "sum_factor": lt.P_SUM_FACTOR}
        self.rows.append({lt.F_OP: op, **fields})
        self.floats.append(
            {lt.P_FACTOR: 1.0, lt.P_SUM_FACTOR: 1.0, **{names[name]: value for name, value in params.items()}}
        )

    def kind(self, name: str) -> int:
        return NUMBERS[self.entries[name].kind]

    def is_quantized(self, name: str) -> bool:
        return self.entries[name].kind not in ("f32", "bf16")

    def panel(self, reader: str, buffer: int = lt.B_PANEL) -> dict[int, int]:
        """Fields of an operation whose result the matrix `reader` reads: quantized for it, or not."""
        if not self.is_quantized(reader):
            return {}
        return {lt.F_QUANT: self.kind(reader), lt.F_PANEL: buffer, lt.F_FINE: int(_is_fine(reader))}

    def embed(self) -> None:
        fields = {lt.F_DST: lt.B_HIDDEN, lt.F_DST_STEP: self.sizes.hidden, lt.F_COUNT: self.spec.hidden_size}
        weights = {lt.F_KIND: self.kind("embed"), lt.F_WEIGHT: self.packed.address("embed")}
        scale = {lt.F_SCALE: self.packed.address("embed.scales"), lt.F_MINIMA: self.packed.address("embed.minima")}
        self.add(lt.OP_EMBED, {**fields, **weights, **scale}, factor=self.spec.embedding_factor)
        if self.spec.per_layer is not None:
            self.per_layer_inputs(self.spec.per_layer.width)

    def per_layer_inputs(self, width: int) -> None:
        """Of the embedding and of the rows of the table, which have a scale of their own: B_PER_LAYER."""
        spec, hidden = self.spec, (lt.B_HIDDEN, self.sizes.hidden)
        self.quantize(*hidden, spec.hidden_size, "ple_in")
        self.linear("ple_in", hidden, (lt.B_PER_LAYER, self.sizes.per_layer), factor=spec.hidden_size**-0.5)
        fields = {lt.F_DST: lt.B_PER_LAYER, lt.F_DST_STEP: self.sizes.per_layer, lt.F_COUNT: width}
        fields |= {lt.F_BY: lt.B_TABLE_ROWS, lt.F_BY_STEP: len(spec.layers) * width}
        fields |= {lt.F_WEIGHT: self.packed.address("ple_in_norm")}
        self.add(lt.OP_PER_LAYER, fields, eps=spec.eps, factor=width**0.5, sum_factor=2**-0.5)

    def norm(self, weight: str, reader: str) -> None:
        """Norm of the hidden state for the matrix `reader`."""
        self.add(
            lt.OP_NORM,
            {
                lt.F_SRC: lt.B_HIDDEN,
                lt.F_SRC_STEP: self.sizes.hidden,
                lt.F_DST: lt.B_NORMED,
                lt.F_DST_STEP: self.sizes.hidden,
                lt.F_COUNT: self.spec.hidden_size,
                lt.F_WEIGHT: self.packed.address(weight),
                **self.panel(reader),
            },
            eps=self.spec.eps,
        )

    def quantize(self, source: int, step: int, count: int, reader: str) -> None:
        if self.is_quantized(reader):
            fields = {lt.F_SRC: source, lt.F_SRC_STEP: step, lt.F_COUNT: count}
            self.add(lt.OP_QUANT, {**fields, **self.panel(reader)})

    def weights(self, name: str, unit: int, num_units: int, panel: int) -> dict[int, int]:
        """Fields of an operation with the matrix `name`, without a bias, cut into runs of `unit` of its num_units tiles
        (or groups)."""
        return {
            lt.F_INPUTS: self.entries[name].inputs,
            lt.F_KIND: self.kind(name),
            lt.F_WEIGHT: self.packed.address(name),
            lt.F_SCALE: self.packed.address(f"{name}.scales"),
            lt.F_MINIMA: self.packed.address(f"{name}.minima"),
            lt.F_UNIT: max(1, min(unit, num_units // (_UNITS_PER_THREAD * self.num_threads))),
            lt.F_PANEL_IN: panel,
        }

    def linear(
        self,
        name: str,
        source: Rows,
        out: Rows,
        *,
        add: bool = False,
        factor: float = 1.0,
        panel: int = lt.B_PANEL,
        first: int = 0,
    ) -> None:
        """The matrix `name`, or its runs; it reads `source` where its weights are floats, and `panel` otherwise. first:
        the first float of a row of `out` that is written."""
        fields = {lt.F_SRC: source[0], lt.F_SRC_STEP: source[1], lt.F_DST: out[0], lt.F_DST_STEP: out[1]}
        bias, start, index = self.packed.address(f"{name}_bias"), first, 0
        while (run := run_name(name, index)) in self.entries:
            rows = self.entries[run].rows
            weights = self.weights(run, _MAX_TILES, -(-rows // LANES), panel)
            place = {lt.F_COUNT: rows, lt.F_DST_FIRST: first, lt.F_BIAS: bias + 4 * (first - start) if bias else 0}
            rest = {lt.F_ADD: int(add), lt.F_FINE_IN: int(_is_fine(name))}
            self.add(lt.OP_LINEAR, {**fields, **weights, **place, **rest}, factor=factor)
            first, index = first + rows, index + 1

    def before_attention(self, index: int) -> None:
        spec, layer, sizes = self.spec, f"layer{index}.", self.sizes
        source = (lt.B_NORMED, sizes.hidden)
        if spec.family.norms == "post":
            source = (lt.B_HIDDEN, sizes.hidden)
            self.quantize(*source, spec.hidden_size, f"{layer}qkv")
        else:
            self.norm(f"{layer}attn_in", f"{layer}qkv")
        self.linear(f"{layer}qkv", source, (lt.B_WIDE, sizes.wide))
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
        """What attention returned times the sigmoid of gates, in place, for the layer's output projection."""
        own, count = self.spec.layers[index], self.spec.num_heads * self.spec.layers[index].head_dim
        gates = {lt.F_SRC: lt.B_WIDE, lt.F_SRC_STEP: self.sizes.wide}
        gates[lt.F_SRC_FIRST] = count + 2 * own.num_kv_heads * own.head_dim
        steps = {lt.F_BY: rows[0], lt.F_BY_STEP: rows[1], lt.F_DST: rows[0], lt.F_DST_STEP: rows[1]}
        act = {lt.F_COUNT: count, lt.F_ACT: ACT_SIGMOID, **self.panel(f"layer{index}.out")}
        self.add(lt.OP_ACT, {**gates, **steps, **act})

    def before_mixing(self, index: int) -> Rows:
        """Up to the attention of a layer, or to the end of what has a state; the rows that are read behind it."""
        layer = self.spec.layers[index]
        if layer.kind != "attention":
            assert self.states is not None
            return self.states.before(f"layer{index}.", layer.state)
        self.before_attention(index)
        return lt.B_ATTENDED, self.sizes.attended[index]

    def border(self, index: int) -> Rows | None:
        """See `LayerProgram.border`, of a part behind this layer."""
        if self.spec.layers[index].kind != "attention":
            assert self.states is not None
            return self.states.mixed
        return (lt.B_WIDE, self.sizes.wide) if self.spec.family.output_gate else None

    def after_mixing(self, index: int, rows: Rows) -> None:
        spec, layer, sizes = self.spec, f"layer{index}.", self.sizes
        if spec.layers[index].kind == "attention" and spec.family.output_gate:
            self.gate(index, rows)
        else:
            count = spec.num_heads * spec.layers[index].head_dim if rows[0] == lt.B_ATTENDED else rows[1]
            self.quantize(*rows, count, f"{layer}out")
        self.into_hidden(f"{layer}out", rows, f"{layer}attn_out")
        if spec.experts is not None and spec.experts.sparse[index]:
            self.mixture(layer, spec.experts)
            return
        source = (lt.B_NORMED, sizes.hidden)
        if spec.family.norms == "post":
            source = (lt.B_HIDDEN, sizes.hidden)
            self.quantize(*source, spec.hidden_size, f"{layer}gate_up")
        else:
            self.norm(f"{layer}mlp_in", f"{layer}gate_up")
        scalar = self.scalar(layer)
        self.gated(layer, source, spec.layers[index].intermediate_size, 1.0 if spec.per_layer else scalar)
        if spec.per_layer is not None:
            self.per_layer(layer, index, spec.per_layer.width, scalar)

    def mixture(self, layer: str, experts: Experts) -> None:
        """Experts in the place of the MLP. Their norm stands before them alone."""
        spec, sizes, mixture = self.spec, self.sizes, self.sizes.mixture
        assert mixture is not None
        normed, hidden = (lt.B_NORMED, sizes.hidden), (lt.B_HIDDEN, sizes.hidden)
        router, gate_up, down = (f"{layer}{name}" for name in ("router", "experts_gate_up", "experts_down"))
        # Floats for the router, and codes for the expert that all share, where there is one.
        self.norm(f"{layer}mlp_in", f"{layer}gate_up" if experts.shared else router)
        self.linear(router, normed, (lt.B_ROUTED, mixture.routed))
        fields = route_fields(experts, mixture.routed, self.packed.address(f"{layer}choice"))
        self.add(lt.OP_ROUTE, fields, factor=experts.scale, eps=experts.eps)
        each, step = expert_fields(experts), {lt.F_SRC_STEP: sizes.hidden, lt.F_DST_STEP: experts.width}
        self.add(lt.OP_DISPATCH, each)
        quant = {lt.F_QUANT: self.kind(gate_up) if self.is_quantized(gate_up) else 0}
        spread = {lt.F_SRC: normed[0], lt.F_SRC_STEP: normed[1], lt.F_DST_STEP: sizes.hidden, **quant}
        self.add(lt.OP_SPREAD, {**each, **spread, lt.F_COUNT: spec.hidden_size})
        runs = experts.width // GROUP
        weights = self.weights(gate_up, runs, runs * experts.used, lt.B_SPREAD)
        act = {lt.F_COUNT: experts.width, lt.F_ACT: _ACTIVATIONS[spec.activation]}
        quant = {lt.F_QUANT: self.kind(down) if self.is_quantized(down) else 0}
        self.add(lt.OP_EXPERTS_GATED, {**each, **weights, **act, **step, **quant})
        weights = self.weights(down, _MAX_TILES, spec.hidden_size // LANES, lt.B_EXPERTS_INNER)
        out = {lt.F_DST: hidden[0], lt.F_DST_STEP: hidden[1], lt.F_SRC_STEP: experts.width}
        self.add(
            lt.OP_EXPERTS_DOWN,
            {**each, **weights, **out, lt.F_COUNT: spec.hidden_size},
            factor=spec.residual_factor,
        )
        if experts.shared and not experts.names.shared_gate:
            self.gated(layer, normed, experts.shared, 1.0)
        elif experts.shared:
            self.shared_by_gate(layer, experts, mixture.routed)

    def shared_by_gate(self, layer: str, experts: Experts, routed: int) -> None:
        """The shared expert times the sigmoid of the router's last number."""
        hidden, wide = (lt.B_HIDDEN, self.sizes.hidden), (lt.B_WIDE, self.sizes.wide)
        rows = self.inner(layer, (lt.B_NORMED, self.sizes.hidden), experts.shared)
        self.linear(f"{layer}down", rows, wide, panel=lt.B_INNER)
        steps = {lt.F_SRC: wide[0], lt.F_SRC_STEP: wide[1], lt.F_DST: hidden[0], lt.F_DST_STEP: hidden[1]}
        by = {lt.F_BY: lt.B_ROUTED, lt.F_BY_STEP: routed, lt.F_BY_FIRST: experts.count}
        count = {lt.F_COUNT: self.spec.hidden_size}
        self.add(lt.OP_ADD_SHARED, {**steps, **by, **count}, factor=self.spec.residual_factor)

    def scalar(self, layer: str) -> float:
        """What the layer's result is multiplied with."""
        if not self.spec.family.layer_scalar:
            return 1.0
        return float(self.packed.array(f"{layer}scalar").view(np.float32)[0])

    def per_layer(self, layer: str, index: int, width: int, scalar: float) -> None:
        """The layer's own input, gated by the hidden state, and the way back into it."""
        hidden, wide = (lt.B_HIDDEN, self.sizes.hidden), (lt.B_WIDE, self.sizes.wide)
        names, rows = (f"{layer}ple_gate", f"{layer}ple_out"), (lt.B_NORMED, padded(width, GROUP))
        self.quantize(*hidden, self.spec.hidden_size, names[0])
        self.linear(names[0], hidden, wide)
        steps = {lt.F_SRC: wide[0], lt.F_SRC_STEP: wide[1], lt.F_DST: rows[0], lt.F_DST_STEP: rows[1]}
        by = {lt.F_BY: lt.B_PER_LAYER, lt.F_BY_STEP: self.sizes.per_layer, lt.F_BY_FIRST: index * width}
        fields = {lt.F_COUNT: width, lt.F_ACT: _ACTIVATIONS[self.spec.activation], **self.panel(names[1], lt.B_INNER)}
        self.add(lt.OP_ACT, {**steps, **by, **fields})
        self.into_hidden(names[1], rows, f"{layer}ple_norm", panel=lt.B_INNER, sum_factor=scalar)

    def gated(self, layer: str, source: Rows, inner: int, scalar: float) -> None:
        """Gate and up, the activation, and down; the hidden state is then multiplied with `scalar`."""
        rows = self.inner(layer, source, inner)
        self.into_hidden(f"{layer}down", rows, f"{layer}mlp_out", panel=lt.B_INNER, sum_factor=scalar)

    def inner(self, layer: str, source: Rows, inner: int) -> Rows:
        """Gate and up and the activation: where they leave what the way down reads, beside B_INNER."""
        sizes, spec = self.sizes, self.spec
        names = (f"{layer}gate_up", f"{layer}down")
        rows = (lt.B_NORMED, padded(inner, GROUP))
        fields = {lt.F_COUNT: inner, lt.F_ACT: _ACTIVATIONS[spec.activation], **self.panel(names[1], lt.B_INNER)}
        if inner % GROUP == 0 and all(self.is_quantized(name) for name in names):
            weights = self.weights(names[0], _MAX_TILES // 4, inner // GROUP, lt.B_PANEL)
            self.add(lt.OP_GATED, {**weights, **fields, lt.F_BIAS: self.packed.address(f"{names[0]}_bias")})
        else:
            self.linear(names[0], source, (lt.B_WIDE, sizes.wide))
            steps = {lt.F_SRC: lt.B_WIDE, lt.F_SRC_STEP: sizes.wide, lt.F_DST: rows[0], lt.F_DST_STEP: rows[1]}
            self.add(lt.OP_ACT, {**steps, **fields})
        return rows

    def into_hidden(
        self, name: str, source: Rows, norm: str, *, panel: int = lt.B_PANEL, sum_factor: float = 1.0
    ) -> None:
        """Add a matrix's result to the hidden state, through a norm where the family has one behind. `sum_factor`:
        only with such a norm."""
        spec, hidden, wide = self.spec, (lt.B_HIDDEN, self.sizes.hidden), (lt.B_WIDE, self.sizes.wide)
        if spec.family.norms == "pre":
            self.linear(name, source, hidden, add=True, factor=spec.residual_factor, panel=panel)
            return
        self.linear(name, source, wide, panel=panel)
        fields = {lt.F_SRC: wide[0], lt.F_SRC_STEP: wide[1], lt.F_DST: hidden[0], lt.F_DST_STEP: hidden[1]}
        count = {lt.F_COUNT: spec.hidden_size, lt.F_WEIGHT: self.packed.address(norm)}
        factors = {"factor": spec.residual_factor, "sum_factor": sum_factor}
        self.add(lt.OP_ADD_NORM, {**fields, **count}, eps=spec.eps, **factors)

    def head(self) -> int:
        """The last norm and the head; the number of the operation behind the norm."""
        spec, sizes = self.spec, self.sizes
        name = "embed" if spec.tied else "head"
        self.norm("norm", name)
        normed = len(self.rows)
        logits = (lt.B_LOGITS, sizes.logits)
        self.linear(name, (lt.B_NORMED, sizes.hidden), logits, factor=spec.logit_factor)
        if spec.logit_cap > 0:
            fields = {lt.F_SRC: lt.B_LOGITS, lt.F_SRC_STEP: sizes.logits, lt.F_COUNT: spec.vocab_size}
            self.add(lt.OP_CAP, fields, cap=spec.logit_cap)
        return normed


def build_program(spec: ModelSpec, plan: list[PackEntry], packed: PackedWeights, num_threads: int) -> LayerProgram:
    """The program of a model; it holds addresses of `packed`, which must outlive it."""
    builder = _Builder(spec, plan, packed, num_threads)
    parts, first = [], 0
    builder.embed()
    for index in range(len(spec.layers)):
        rows = builder.before_mixing(index)
        parts.append((first, len(builder.rows)))
        if spec.layers[index].owns_kv:
            builder.add(lt.OP_CLOSE, {lt.F_LAYER: index})
        if spec.layers[index].kind == "attention":
            builder.add(lt.OP_ATTEND, {lt.F_LAYER: index})
        first = len(builder.rows)
        builder.after_mixing(index, rows)
    normed = builder.head()
    parts.append((first, len(builder.rows)))
    ops = np.zeros((len(builder.rows), lt.NUM_FIELDS), dtype=np.int64)
    params = np.zeros((len(builder.rows), lt.NUM_PARAMS), dtype=np.float32)
    for index, (fields, floats) in enumerate(zip(builder.rows, builder.floats, strict=True)):
        ops[index, list(fields)] = list(fields.values())
        params[index, list(floats)] = list(floats.values())
    border = builder.border(spec.first_shared - 1)
    held = [builder.ones, *(() if builder.states is None else builder.states.held)]
    return LayerProgram(ops, params, tuple(parts), spec.first_shared, normed, border, held)


def attention_params(spec: ModelSpec, packed: PackedWeights) -> list[AttentionParams]:
    """The constants of attention of each layer; sinks are float32 [num_heads], views of `packed`."""

    def sinks(layer: int) -> npt.NDArray[np.float32] | None:
        if not spec.family.sinks:
            return None
        return packed.array(f"layer{layer}.sinks").view(np.float32)[: spec.num_heads]

    return [
        AttentionParams(spec.softmax_scale, layer.window, spec.softcap, sinks(index))
        for index, layer in enumerate(spec.layers)
    ]
