"""Recognition of a decoder in an ONNX graph.

Each operator on the path from the token ids to the logits must match, or the graph is refused.
Graphs have the form that onnxruntime-genai's builder writes, or are fused to the same operators:

    graph   embedding -> layers -> norm -> head
    layer   norm -> q, k, v -> GroupQueryAttention -> o -> add
            norm -> gate, up -> act(gate) * up -> down -> add

Recognition depends on the operators of the graph, not on the names of nodes or tensors.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.onnx.file import OnnxModel, OnnxNode, OnnxTensor
from kvboost_edge.models.onnx.graph import Graph, Linear, Norm, Rows
from kvboost_edge.models.onnx.tensors import FLOATS, OnnxMatrix, bit_matrix, float_matrix

__all__ = ["Decoder", "DecoderLayer", "recognise"]

_MAX_LAYERS = 10_000
_LENGTHS = (
    "ReduceSum",
    "Sub",
    "Cast",
    "Shape",
    "Gather",
    "Constant",
    "Squeeze",
    "Unsqueeze",
    "ReduceMax",
    "Add",
)
_INPUTS = ("attention_mask", "input_ids", "position_ids")
_MATRICES = ("MatMulNBits", "MatMul")
# Indices of GroupQueryAttention's inputs.
_PAST_KEY, _PAST_VALUE, _LENGTH, _TOTAL, _COS, _SIN, _POSITIONS, _BIAS, _SINK = range(3, 12)


@dataclasses.dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Computation of one layer.

    Attributes:
        weights: rows of each matrix, by transformers' name inside a layer, such as
            "self_attn.q_proj".
        vectors: biases and norm weights, by name, such as "self_attn.q_proj.bias" and
            "input_layernorm.weight".
        window: number of tokens that a query sees, including its own; 0 for all earlier tokens.
        rope: tables of cosines and sines, each [positions, pairs].
    """

    weights: dict[str, Rows]
    vectors: dict[str, Rows]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int
    softcap: float
    rope: tuple[OnnxTensor, OnnxTensor]
    activation: str
    has_outer_norms: bool
    residual_factor: float
    eps: tuple[float, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Decoder:
    """Computation of a whole graph. `head` is None if it is tied to the embedding."""

    layers: tuple[DecoderLayer, ...]
    embedding: OnnxMatrix
    embedding_factor: float
    norm: Norm
    head: OnnxMatrix | None
    logit_factor: float
    logit_cap: float


class _Branch(NamedTuple):
    """Summand of the residual stream, factor * norm(linear).

    Attributes:
        before: value of the residual stream to which the summand is added.
    """

    linear: Linear
    norm: Norm | None
    factor: float
    before: str


def recognise(model: OnnxModel) -> Decoder:
    """Return the decoder that a graph computes.

    Raises:
        ModelFormatError: a node is not supported; the message names it.
    """
    for node in model.nodes:
        if node.has_graph:
            raise ModelFormatError(
                f"{model.path}: {node} contains a subgraph, which is not supported"
            )
    return _Search(model).decoder()


class _Search:
    def __init__(self, model: OnnxModel) -> None:
        self.graph = Graph(model)
        self.model = model

    def decoder(self) -> Decoder:
        graph = self.graph
        if "logits" not in self.model.outputs:
            raise graph.error(
                f"no output is named 'logits'; outputs: {sorted(self.model.outputs)[:5]}"
            )
        value, cap, factor = self._logits("logits")
        head = graph.linear(value)
        if head.bias is not None or head.size != head.matrix.shape[0]:
            raise graph.error(
                "the head has a bias or is sliced, which the native runner does not support"
            )
        norm = graph.norm(head.source)
        layers: list[DecoderLayer] = []
        stream = norm.source
        while graph.summands(stream) is not None:
            layer, stream = self._layer(stream)
            layers.append(layer)
            if len(layers) > _MAX_LAYERS:
                raise graph.error(f"the graph has more than {_MAX_LAYERS} layers")
        if not layers:
            raise graph.error("no layer was found between the embedding and the head")
        layers.reverse()
        embedding, scale = self._embedding(stream)
        graph.check_all_seen()
        self._check_past(layers)
        tied = embedding.weight == head.matrix.weight and embedding.bits == head.matrix.bits
        return Decoder(
            tuple(layers), embedding, scale, norm, None if tied else head.matrix, factor, cap
        )

    def _logits(self, value: str) -> tuple[str, float, float]:
        """Return the output of the head, the softcap on logits (0 for none) and the factor on
        logits.
        """
        graph = self.graph
        inner, factor = graph.scaled(value)
        found = graph.maker(inner)
        if found is None or found[0].op != "Tanh":
            return inner, 0.0, factor
        graph.seen.add(found[0].index)
        source, divided = graph.scaled(graph.input(found[0], 0))
        if abs(factor * divided - 1) > 1e-6:
            raise graph.error(
                f"{found[0]} is not a softcap of logits: they are divided by {1 / divided:g} "
                f"before it and multiplied by {factor:g} after it"
            )
        return source, factor, 1.0

    def _layer(self, stream: str) -> tuple[DecoderLayer, str]:
        graph = self.graph
        mlp = self._branch(stream)
        attention = self._branch(mlp.before)
        product = graph.expect(mlp.linear.source, "Mul")
        gate, up, activation = self._gated(product)
        if gate.source != up.source:
            raise graph.error(f"{product}: gate and up have different inputs")
        mlp_norm = self._norm_of(gate.source, mlp.before)
        node, queries, keys, values = self._attention(attention.linear.source)
        if not queries.linear.source == keys.linear.source == values.linear.source:
            raise graph.error(f"{node}: queries, keys and values have different inputs")
        attn_norm = self._norm_of(queries.linear.source, attention.before)
        linears = {
            "self_attn.q_proj": queries.linear,
            "self_attn.k_proj": keys.linear,
            "self_attn.v_proj": values.linear,
            "self_attn.o_proj": attention.linear,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": mlp.linear,
        }
        outer = attention.norm is not None
        if outer != (mlp.norm is not None) or attention.factor != mlp.factor:
            raise graph.error(
                f"{node}: attention and MLP must have the same norms and factors at their outputs"
            )
        norms = {
            "input_layernorm": attn_norm,
            "self_attn.q_norm": queries.norm,
            "self_attn.k_norm": keys.norm,
        }
        if outer:
            norms |= {
                "post_attention_layernorm": attention.norm,
                "pre_feedforward_layernorm": mlp_norm,
                "post_feedforward_layernorm": mlp.norm,
            }
        else:
            norms["post_attention_layernorm"] = mlp_norm
        vectors = {
            f"{name}.weight": _all_of(norm.weight)
            for name, norm in norms.items()
            if norm is not None
        }
        for name, linear in linears.items():
            if linear.bias is not None:
                vectors[f"{name}.bias"] = Rows(linear.bias, linear.start, linear.stop)
        num_heads = graph.integer(node, "num_heads", 0)
        layer = DecoderLayer(
            weights={name: linear.weight for name, linear in linears.items()},
            vectors=vectors,
            num_heads=num_heads,
            num_kv_heads=graph.integer(node, "kv_num_heads", 0),
            head_dim=queries.linear.size // num_heads,
            scale=graph.number(node, "scale", 0.0),
            window=max(graph.integer(node, "local_window_size", -1), 0),
            softcap=graph.number(node, "softcap", 0.0),
            rope=self._rope(node, queries, keys),
            activation=activation,
            has_outer_norms=outer,
            residual_factor=attention.factor,
            eps=tuple(norm.eps for norm in norms.values() if norm is not None),
        )
        self._check_sizes(node, layer)
        return layer, attention.before

    def _branch(self, stream: str) -> _Branch:
        """Return the summand that a block adds to the residual stream, which is the output of a
        matrix.
        """
        graph = self.graph
        found = graph.summands(stream)
        if found is None:
            raise graph.error(
                f"value {stream!r} must be a sum, because it is the residual stream after a layer"
            )
        for older, younger in (found, found[::-1]):
            seen = set(graph.seen)
            inner, factor = graph.scaled(younger)
            norm = graph.norm(inner) if graph.is_norm(inner) else None
            made = graph.maker(inner if norm is None else norm.source)
            if made is not None and (made[0].op in _MATRICES or self._is_biased(made[0])):
                return _Branch(
                    graph.linear(inner if norm is None else norm.source),
                    norm,
                    factor,
                    graph.stream(older),
                )
            graph.seen = seen
        raise graph.error(
            f"value {found[0]!r} or {found[1]!r} must be the output of a matrix multiplication"
        )

    def _is_biased(self, node: OnnxNode) -> bool:
        return node.op == "Add" and any(self.graph.tensor(name) is not None for name in node.inputs)

    def _norm_of(self, value: str, stream: str) -> Norm:
        """Return the norm whose output is `value`. It must read the residual stream `stream`."""
        norm = self.graph.norm(value)
        if norm.source != stream:
            raise self.graph.error(
                f"the norm that computes {value!r} must read the residual stream before its layer"
            )
        return norm

    def _gated(self, product: OnnxNode) -> tuple[Linear, Linear, str]:
        """Return the linear layers gate and up, and the activation, of act(gate) * up."""
        graph = self.graph
        for first, second in ((0, 1), (1, 0)):
            found = graph.maker(graph.input(product, first))
            if found is None:
                continue
            known = self._activation(found[0])
            if known is not None:
                gate, name = known
                return graph.linear(gate), graph.linear(graph.input(product, second)), name
        raise graph.error(f"{product} is not the product of an activation and a matrix's output")

    def _activation(self, node: OnnxNode) -> tuple[str, str] | None:
        """Return the input and the name of an activation, or None for another node."""
        graph = self.graph
        kind = {"FastGelu": "gelu_tanh", "Swish": "silu"}.get(node.op, "")
        if node.op == "Gelu":
            kind = "gelu_tanh" if node.attributes.get("approximate") == "tanh" else "gelu"
        elif node.op == "QuickGelu" or (node.op == "Swish" and "alpha" in node.attributes):
            alpha = graph.number(node, "alpha", 1.702)
            kind = "silu" if alpha == 1 else f"{node.op} with alpha={alpha:g}"
        if kind:
            if graph.optional(node, 1):
                raise graph.error(f"{node} has a bias, which is not supported")
            graph.seen.add(node.index)
            return graph.input(node, 0), kind
        if node.op != "Mul":
            return None
        for first, second in ((0, 1), (1, 0)):
            found = graph.maker(graph.input(node, first))
            if found is not None and found[0].op == "Sigmoid":
                gate = graph.input(found[0], 0)
                if graph.input(node, second) == gate:
                    graph.seen |= {node.index, found[0].index}
                    return gate, "silu"
        return None

    def _attention(self, value: str) -> tuple[OnnxNode, _Heads, _Heads, _Heads]:
        graph = self.graph
        node = graph.expect(value, "GroupQueryAttention")
        for index, what in ((_BIAS, "an attention bias"), (_SINK, "attention sinks")):
            if graph.optional(node, index):
                raise graph.error(f"{node} has {what}, which the native runner does not support")
        for name in ("smooth_softmax", "rotary_interleaved", "qk_output"):
            if graph.integer(node, name, 0) > 0:
                raise graph.error(
                    f"{node} has {name}={node.attributes[name]}, which the native runner does not "
                    "support"
                )
        if any(
            str(node.attributes.get(name) or "NONE") != "NONE"
            for name in ("k_quant_type", "v_quant_type")
        ):
            raise graph.error(
                f"{node} uses a quantized KV cache, which the native runner does not support"
            )
        for index in (_LENGTH, _TOTAL, _POSITIONS):
            if graph.optional(node, index):
                graph.mark_ancestors(node.inputs[index], _LENGTHS, _INPUTS)
        heads = graph.integer(node, "num_heads", 0)
        kv_heads = graph.integer(node, "kv_num_heads", 0)
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise graph.error(
                f"{node}: num_heads={heads} must be a multiple of kv_num_heads={kv_heads}"
            )
        if graph.optional(node, 1) or graph.optional(node, 2):
            parts = [self._heads(graph.input(node, index)) for index in range(3)]
            return node, parts[0], parts[1], parts[2]
        whole = graph.linear(graph.input(node, 0))
        dim, rest = divmod(whole.size, heads + 2 * kv_heads)
        if rest:
            raise graph.error(
                f"{node} has {whole.size} packed rows, which do not divide into {heads} query "
                f"heads and 2 x {kv_heads} KV heads"
            )
        ends = (0, heads * dim, (heads + kv_heads) * dim, whole.size)
        cut = [
            _Heads(whole._replace(start=whole.start + start, stop=whole.start + stop), None, None)
            for start, stop in itertools.pairwise(ends)
        ]
        return node, cut[0], cut[1], cut[2]

    def _heads(self, value: str) -> _Heads:
        """Return the queries, keys or values, which are a matrix, an optional norm and optional
        RoPE.
        """
        graph = self.graph
        rope: OnnxNode | None = None
        found = graph.maker(value)
        if found is not None and found[0].op == "RotaryEmbedding":
            rope = graph.expect(value, "RotaryEmbedding")
            value = graph.input(rope, 0)
        norm: Norm | None = None
        found = graph.maker(value)
        if found is not None and found[0].op == "Reshape":
            outer = graph.expect(value, "Reshape")
            norm = graph.norm(graph.input(outer, 0))
            inner = graph.expect(norm.source, "Reshape")
            sizes = graph.sizes(graph.input(inner, 1))
            if not sizes or sizes[-1] != norm.weight.shape[0]:
                raise graph.error(
                    f"{inner} makes heads of size {sizes[-1:]}, but their norm has "
                    f"{norm.weight.shape[0]} weights"
                )
            value = graph.input(inner, 0)
        return _Heads(graph.linear(value), norm, rope)

    def _rope(self, node: OnnxNode, queries: _Heads, keys: _Heads) -> tuple[OnnxTensor, OnnxTensor]:
        """Return the tables of cosines and sines.

        RoPE is applied by the attention operator itself, or by operators before it.
        """
        graph = self.graph
        if graph.integer(node, "do_rotary", 0):
            if queries.rope is not None or keys.rope is not None:
                raise graph.error(f"{node} applies RoPE to queries and keys a second time")
            return self._table(node, _COS), self._table(node, _SIN)
        if queries.rope is None or keys.rope is None:
            raise graph.error(
                f"{node} must apply RoPE to both queries and keys, as the native runner requires"
            )
        tables = set()
        for rope in (queries.rope, keys.rope):
            if graph.integer(rope, "interleaved", 0) or graph.number(rope, "scale", 1.0) != 1:
                raise graph.error(
                    f"{rope} is interleaved or scaled, which the native runner does not support"
                )
            graph.mark_ancestors(graph.input(rope, 1), _LENGTHS, _INPUTS)
            tables.add((self._table(rope, 2), self._table(rope, 3)))
        if len(tables) != 1:
            raise graph.error(f"{node}: queries and keys use different RoPE tables")
        return tables.pop()

    def _table(self, node: OnnxNode, index: int) -> OnnxTensor:
        table = self.graph.weight(node, index)
        if table.dtype not in FLOATS or len(table.shape) != 2 or not table.count:
            raise self.graph.error(
                f"{node}: table {table.name!r} is {table.dtype} {table.shape}, expected "
                "floats with two axes"
            )
        return table

    def _check_sizes(self, node: OnnxNode, layer: DecoderLayer) -> None:
        """Raise ModelFormatError unless head counts and channels of a layer are consistent."""
        rows = {name: part.stop - part.start for name, part in layer.weights.items()}
        q, k, v = (rows[f"self_attn.{name}_proj"] for name in "qkv")
        dim, rest = divmod(q, layer.num_heads)
        if rest or k != v or k != dim * layer.num_kv_heads or not dim:
            raise self.graph.error(
                f"{node}: {q} query, {k} key and {v} value channels do not fit {layer.num_heads} "
                f"query heads and {layer.num_kv_heads} KV heads"
            )
        for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
            if name in layer.vectors and layer.vectors[name].stop != dim:
                raise self.graph.error(
                    f"{node}: a head norm has {layer.vectors[name].stop} weights, expected {dim}"
                )

    def _embedding(self, value: str) -> tuple[OnnxMatrix, float]:
        graph = self.graph
        value, factor = graph.scaled(value)
        node = graph.expect(value, "Gather", "GatherBlockQuantized")
        if graph.input(node, 1) != "input_ids" or graph.integer(node, "axis", 0):
            raise graph.error(f"{node} does not look up 'input_ids' in the rows of a matrix")
        where = f"{self.model.path}: {node}"
        if node.op == "Gather":
            return float_matrix(where, graph.weight(node, 0), transposed=False), factor
        if graph.integer(node, "gather_axis", 0) or graph.integer(node, "quantize_axis", 1) not in (
            1,
            -1,
        ):
            raise graph.error(f"{node} must gather along axis 0 and be quantized along axis 1")
        source = graph.input(node, 0)
        if graph.tensor(source) is None:  # blocks reshaped to rows of bytes
            source = graph.input(graph.expect(source, "Reshape"), 0)
        data = graph.tensor(source)
        scales = graph.weight(node, 2)
        if data is None or not data.shape or not scales.shape:
            raise graph.error(
                f"{node} reads rows of the computed value {source!r}, expected a weight"
            )
        bits = graph.integer(node, "bits", 4)
        block = graph.integer(node, "block_size", 128)
        rows = data.shape[0]
        inputs = data.count // max(rows, 1) * (1 if data.dtype == "U4" else 8 // max(bits, 1))
        zeros = graph.weight(node, 3) if graph.optional(node, 3) else None
        if data.dtype == "U4" and zeros is None:
            raise graph.error(
                f"{node} contains 4-bit codes with zero point 0, which is not supported"
            )
        return bit_matrix(where, (rows, inputs, bits, block), data, scales, zeros), factor

    def _check_past(self, layers: list[DecoderLayer]) -> None:
        inputs = [name for name in self.model.inputs if name not in _INPUTS]
        if len(inputs) != 2 * len(layers):
            raise self.graph.error(
                f"the graph has {len(inputs)} past KV inputs for {len(layers)} attention layers, "
                "expected two per layer"
            )


class _Heads(NamedTuple):
    """Queries, keys or values, as computed before attention."""

    linear: Linear
    norm: Norm | None
    rope: OnnxNode | None


def _all_of(matrix: OnnxMatrix) -> Rows:
    return Rows(matrix, 0, matrix.shape[0])
