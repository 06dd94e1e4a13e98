"""Construction of a program of operations from a model's spec and packed weights."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from kvboost_edge.backends.base import AttentionParams
from kvboost_edge.kernels.linear.weight_formats import GROUP
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.activations import ACT_SIGMOID
from kvboost_edge.kernels.program.entries import entries_of
from kvboost_edge.kernels.program.table import BufferRows
from kvboost_edge.models.config.spec import ModelSpec
from kvboost_edge.models.packed.pack_plan import PackEntry
from kvboost_edge.models.packed.weight_file import PackedWeights
from kvboost_edge.runners.native.buffer_sizes import padded
from kvboost_edge.runners.native.emitter import ACTIVATIONS, Emitter
from kvboost_edge.runners.native.moe_layers import emit_mixture, emit_mixture_beside
from kvboost_edge.runners.native.recurrent_layers import StateOperations

__all__ = ["LayerProgram", "attention_params", "build_program", "possible_operations"]


@dataclasses.dataclass(frozen=True, slots=True)
class LayerProgram:
    """Operations of a model, divided into parts.

    Part 0 computes the embedding and prepares the attention of layer 0. Part i > 0 finishes layer i
    - 1 and prepares layer i. The last part finishes the last layer and computes logits. Its
    operations up to `normed` leave the hidden state after the last norm in B_NORMED.

    Between two parts are the layer's `AttendOp` and, if the layer has its own KV, its `CloseOp`.
    They are used by passes that run attention inside the program. A layer without attention has
    neither.

    Attributes:
        operations: the operations in order.
        ops: table of the operations, described in program/table.py.
        parts: first and end index of each part.
        narrow: first part that computes no KV and no recurrent state. From there on, the program
            runs only on rows that need logits.
        normed: end index of the operations up to the last norm.
        border: buffer that part `narrow` reads in addition to the hidden state, the attention
            output and B_PER_LAYER, or None.
        short_head: first and end index of the operations that compute logits of the short
            vocabulary from the hidden state before the last norm. The range is empty without a
            short vocabulary.
        accept: first and end index of the operations that advance the recurrent state by accepted
            draft tokens. The range is empty without recurrent state.
        held: arrays whose addresses the operations contain.
    """

    operations: tuple[lt.Operation, ...]
    ops: npt.NDArray[np.int64]
    parts: tuple[tuple[int, int], ...]
    narrow: int
    normed: int
    border: BufferRows | None
    short_head: tuple[int, int]
    accept: tuple[int, int]
    held: list[npt.NDArray[np.float32]]

    @property
    def kinds(self) -> set[type[lt.Operation]]:
        """Classes of the operations."""
        return {type(operation) for operation in self.operations}


class _Builder(Emitter):
    """Builder for the operations of a decoder."""

    def __init__(
        self,
        spec: ModelSpec,
        plan: list[PackEntry],
        packed: PackedWeights,
        num_threads: int,
        *,
        is_wide: bool = False,
    ) -> None:
        super().__init__(spec, plan, packed, num_threads, is_wide=is_wide)
        self.ones = np.ones(max(layer.head_dim for layer in spec.layers), dtype=np.float32)
        self.states = None if spec.mixer is None else StateOperations(self, spec.mixer)

    def embed(self) -> None:
        """Emit the embedding and, if the model has them, the per-layer inputs."""
        spec = self.spec
        matrix = self.matrix("embed", 1, 1, 0)
        out = self.projected if spec.backbone_size else self.hidden
        self.ops.append(lt.EmbedOp(out, matrix, spec.embedding_factor))
        if spec.per_layer is not None:
            self.per_layer_inputs(spec.per_layer.width)

    def join_states(self) -> None:
        """Emit the input rows of an MTP head.

        The states are in B_NORMED, or for an assistant in B_PROJECTED, after the embedding.
        """
        spec = self.spec
        size = spec.state_size
        pairs = ((self.hidden, "embedding_norm", 0), (self.normed, "hidden_norm", size))
        for source, norm, first in pairs if not spec.backbone_size else ():
            out = self.projected._replace(first=first)
            self.ops.append(lt.NormOp(source, out, size, self.packed.address(norm), spec.eps))
        self.quantize(self.projected, 2 * size, "projection")
        self.linear("projection", self.projected, self.hidden)

    def per_layer_inputs(self, width: int) -> None:
        """Emit B_PER_LAYER from the embedding and the rows of the per-layer table."""
        spec = self.spec
        inputs = BufferRows(lt.B_PER_LAYER, self.sizes.per_layer)
        self.quantize(self.hidden, spec.hidden_size, "ple_in")
        self.linear("ple_in", self.hidden, inputs, factor=spec.hidden_size**-0.5)
        rows = BufferRows(lt.B_TABLE_ROWS, len(spec.layers) * width)
        norm = self.packed.address("ple_in_norm")
        self.ops.append(
            lt.PerLayerOp(
                inputs, rows, width, norm, spec.eps, factor=width**0.5, sum_factor=2**-0.5
            )
        )

    def before_attention(self, index: int) -> None:
        """Emit a layer's input norm, QKV projection and RoPE."""
        spec = self.spec
        layer = f"layer{index}."
        source = self.normed
        if spec.family.norms == "post":
            source = self.hidden
            self.quantize(source, spec.hidden_size, f"{layer}qkv")
        else:
            self.norm(f"{layer}attn_in", f"{layer}qkv")
        self.linear(f"{layer}qkv", source, self.projected, factor=spec.factors.attention)
        own = spec.layers[index]
        if own.owns_kv:
            self.ops.append(lt.ContinueOp(index))
        self.ops.append(
            lt.RopeOp(
                self.projected,
                spec.num_heads,
                own.num_kv_heads if own.owns_kv else 0,
                own.head_dim,
                spec.ropes[own.rope].half if own.rope >= 0 else 0,
                lt.B_TABLES + 2 * max(own.rope, 0),
                q_norm=self.packed.address(f"{layer}q_norm"),
                k_norm=self.packed.address(f"{layer}k_norm"),
                v_norm=self.ones.ctypes.data if spec.family.value_norm else 0,
                keys_twice=int(own.owns_kv and not own.has_values),
                norm_all={"": 0, "head": 1, "all": 2}[spec.head_norm],
                late_norm=int(spec.family.late_norm),
                query_scale=lt.B_TABLES + 2 * len(spec.ropes) if spec.query_scale else 0,
                layer=index,
                eps=spec.eps,
            )
        )

    def gate(self, index: int, rows: BufferRows) -> None:
        """Emit the output gate: attention output times sigmoid(gates), in place."""
        own = self.spec.layers[index]
        count = self.spec.num_heads * own.head_dim
        gates = self.projected._replace(first=count + 2 * own.num_kv_heads * own.head_dim)
        panel = self.panel(f"layer{index}.out")
        self.ops.append(lt.ActivateOp(gates, rows, count, ACT_SIGMOID, rows, panel))
        self.widen(rows, count, f"layer{index}.out")

    def before_mixing(self, index: int) -> None:
        """Emit a layer's recurrent mixer and the preparation of its attention, if it has them."""
        layer = self.spec.layers[index]
        if layer.keeps_state:
            assert self.states is not None
            self.states.emit_to_output_projection(f"layer{index}.", layer.state)
        if layer.attends:
            self.before_attention(index)

    def accept_drafts(self) -> tuple[int, int]:
        """Emit the operations that advance recurrent states by accepted draft tokens.

        Returns:
            Their first and end index.
        """
        first = len(self.ops)
        for index, layer in enumerate(self.spec.layers):
            if layer.state >= 0:
                assert self.states is not None
                self.states.accept(f"layer{index}.", layer.state)
        return first, len(self.ops)

    def border(self, index: int) -> BufferRows | None:
        """Return `LayerProgram.border` for a part that follows this layer."""
        if self.spec.layers[index].keeps_state:
            assert self.states is not None
            return self.states.mixed
        return self.projected if self.spec.family.output_gate else None

    def after_mixing(self, index: int) -> None:
        """Emit the output projections of attention and of the recurrent mixer."""
        spec = self.spec
        layer = f"layer{index}."
        own = self.spec.layers[index]
        if own.attends:
            rows = BufferRows(lt.B_ATTENDED, self.sizes.attended[index])
            if spec.family.output_gate:
                self.gate(index, rows)
            elif spec.family.sub_norms:
                count = spec.num_heads * own.head_dim
                self.sub_norm(f"{layer}attn_sub", rows, count, f"{layer}out")
            else:
                self.quantize(rows, spec.num_heads * own.head_dim, f"{layer}out")
            self.into_hidden(
                f"{layer}out", rows, f"{layer}attn_out", factor=spec.factors.attention_out
            )
        if own.keeps_state:
            assert self.states is not None
            rows = self.states.mixed
            name = f"{layer}mixer_out"
            self.quantize(rows, rows.step, name)
            self.into_hidden(name, rows, f"{layer}attn_out", factor=spec.factors.mixer_out)

    def behind_mixing(self, index: int) -> None:
        """Emit a layer's MLP or experts, and its per-layer input."""
        spec = self.spec
        layer = f"layer{index}."
        experts = spec.experts if spec.experts is not None and spec.experts.sparse[index] else None
        if experts is not None and not experts.beside:
            emit_mixture(self, layer, experts)
            return
        if not spec.layers[index].intermediate_size:
            return
        source = self.normed
        inner = spec.layers[index].intermediate_size
        scalar = self.scalar(layer)
        sum_factor = 1.0 if spec.per_layer else scalar
        if experts is not None:
            emit_mixture_beside(self, layer, experts, inner, sum_factor)
        elif spec.family.norms == "post":
            source = self.hidden
            self.quantize(source, spec.hidden_size, f"{layer}{spec.family.way_in}")
            self.gated(layer, source, inner, sum_factor)
        else:
            self.norm(f"{layer}mlp_in", f"{layer}{spec.family.way_in}", factor=spec.factors.mlp)
            self.gated(layer, source, inner, sum_factor)
        if spec.per_layer is not None:
            self.per_layer(layer, index, spec.per_layer.width, scalar)

    def scalar(self, layer: str) -> float:
        """Return the factor that the layer's output is multiplied by."""
        if not self.spec.family.layer_scalar:
            return 1.0
        return float(self.packed.array(f"{layer}scalar").view(np.float32)[0])

    def per_layer(self, layer: str, index: int, width: int, scalar: float) -> None:
        """Emit a layer's per-layer input, gated by the hidden state, and its projection."""
        names = (f"{layer}ple_gate", f"{layer}ple_out")
        rows = BufferRows(lt.B_NORMED, padded(width, GROUP))
        self.quantize(self.hidden, self.spec.hidden_size, names[0])
        self.linear(names[0], self.hidden, self.projected)
        by = BufferRows(lt.B_PER_LAYER, self.sizes.per_layer, index * width)
        act = ACTIVATIONS[self.spec.activation]
        panel = self.panel(names[1], lt.B_INNER)
        self.ops.append(lt.ActivateOp(self.projected, rows, width, act, by, panel))
        self.widen(rows, width, names[1], lt.B_INNER)
        self.into_hidden(names[1], rows, f"{layer}ple_norm", panel=lt.B_INNER, sum_factor=scalar)

    def head(self) -> int:
        """Emit the last norm and the LM head, and an assistant's next states in B_PROJECTED.

        Returns:
            The index of the operation after the norm.
        """
        self.norm("norm", self.head_name)
        normed = len(self.ops)
        self.logits(self.spec.vocab_size)
        if self.spec.backbone_size:
            self.quantize(self.normed, self.spec.hidden_size, "post_projection")
            self.linear("post_projection", self.normed, self.projected)
        return normed

    def short_head(self, count: int) -> tuple[int, int]:
        """Emit the last norm and the first `count` rows of the LM head, if `count` > 0.

        Returns:
            The first and end index of the operations.
        """
        first = len(self.ops)
        if count:
            self.norm("norm", self.head_name)
            self.logits(count)
        return first, len(self.ops)

    @property
    def head_name(self) -> str:
        """Name of the LM head's matrix."""
        return "embed" if self.spec.tied else "head"

    def logits(self, count: int) -> None:
        """Emit the first `count` rows of the LM head."""
        spec = self.spec
        logits = BufferRows(lt.B_LOGITS, self.sizes.logits)
        self.linear(self.head_name, self.normed, logits, factor=spec.logit_factor, most_rows=count)
        if spec.logit_cap > 0:
            self.ops.append(lt.CapOp(logits, count, spec.logit_cap))


def build_program(
    spec: ModelSpec,
    plan: list[PackEntry],
    packed: PackedWeights,
    num_threads: int,
    short_vocabulary: int = 0,
    *,
    is_wide: bool = False,
) -> LayerProgram:
    """Build a model's program.

    The program contains addresses in `packed`, which must outlive it.

    Args:
        spec: the model.
        plan: its pack plan.
        packed: its weights.
        num_threads: number of kernel threads.
        short_vocabulary: see `RunnerInfo`.
        is_wide: whether the matrices of layers are multiplied in wide arithmetic.
    """
    builder = _Builder(spec, plan, packed, num_threads, is_wide=is_wide)
    ops = builder.ops
    parts = []
    first = 0
    builder.embed()
    if spec.joins_hidden_states:
        builder.join_states()
    for index, layer in enumerate(spec.layers):
        builder.before_mixing(index)
        parts.append((first, len(ops)))
        if layer.owns_kv:
            ops.append(lt.CloseOp(index))
        if layer.attends:
            ops.append(lt.AttendOp(index))
        first = len(ops)
        builder.after_mixing(index)
        builder.behind_mixing(index)
    normed = builder.head()
    parts.append((first, len(ops)))
    short_head = builder.short_head(short_vocabulary)
    accept = builder.accept_drafts()
    border = builder.border(spec.first_shared - 1)
    held = [
        builder.ones,
        *builder.scaled_vectors.values(),
        *(() if builder.states is None else builder.states.held),
    ]
    program = LayerProgram(
        tuple(ops),
        lt.table_of(ops),
        tuple(parts),
        spec.first_shared,
        normed,
        border,
        short_head,
        accept,
        held,
    )
    entries_of(program.kinds)  # raises an error for an operation without an entry
    return program


def possible_operations(spec: ModelSpec, *, is_wide: bool = False) -> list[type[lt.Operation]]:
    """Return all operations that a model's programs may contain, before its weights are packed."""
    found = [lt.K_PROGRAM]
    if is_wide:
        found.append(lt.K_WIDE)
    if spec.experts is not None:
        found.append(lt.K_EXPERTS)
    if spec.mixer is not None:
        found += [lt.K_TAILS, lt.K_CONV if spec.mixer.kind == "conv" else lt.K_SCAN]
    return [operation for entry in found for operation in lt.OPERATIONS[entry]]


def attention_params(spec: ModelSpec, packed: PackedWeights) -> list[AttentionParams]:
    """Return the attention constants of each layer.

    Sinks are float32 [num_heads], as views of `packed`.
    """

    def sinks(layer: int) -> npt.NDArray[np.float32] | None:
        if not spec.family.sinks:
            return None
        return packed.array(f"layer{layer}.sinks").view(np.float32)[: spec.num_heads]

    return [
        AttentionParams(spec.softmax_scale, layer.window, spec.softcap, sinks(index))
        for index, layer in enumerate(spec.layers)
    ]
