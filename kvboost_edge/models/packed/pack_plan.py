"""Pack plan: the list of entries to pack for a model's spec and a weight format.

An entry is a matrix or vector of the packed file. It gives its tensors, its format and its size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kvboost_edge.errors import ConfigError, ModelFormatError
from kvboost_edge.kernels.linear.weight_formats import FORMATS
from kvboost_edge.kernels.linear.weights import packed_sizes
from kvboost_edge.kernels.vectors import LANES
from kvboost_edge.models.config.mtp_spec import MtpSpec
from kvboost_edge.models.config.spec import ModelSpec
from kvboost_edge.models.families.moe import Experts
from kvboost_edge.models.families.mtp import (
    EMBEDDING_NORM,
    HIDDEN_NORM,
    POST_PROJECTION,
    PROJECTION,
)
from kvboost_edge.models.families.ssm import OUTPUT_GATE
from kvboost_edge.models.weights.split_experts import expert_number
from kvboost_edge.models.weights.weight_source import WeightSource

__all__ = [
    "STORED",
    "VECTOR",
    "WEIGHT_FORMATS",
    "PackEntry",
    "check_tensors",
    "holds_exactly",
    "is_quantized",
    "kinds_of",
    "mtp_plan",
    "pack_plan",
    "plan_bytes",
    "plan_label",
    "row_tables",
    "run_name",
]

WEIGHT_FORMATS = tuple(
    sorted(
        (name for name, form in FORMATS.items() if form.packs_floats),
        key=lambda name: -FORMATS[name].bits,
    )
)
"""Formats that can be requested for the matrices of layers, widest first."""
STORED = "auto"
"""Weight format that keeps the stored format of each tensor in a quantized checkpoint."""
VECTOR = "vector"
ROUTER_KIND = "f32"
"""Format of router matrices, in full precision because selecting a wrong expert is costly."""
# Ordered from narrow to wide. int8 serves tensors that no other format represents, and float
# matrices of a quantized checkpoint.
_WIDENING = tuple(name for name, form in FORMATS.items() if not form.is_float)


@dataclasses.dataclass(frozen=True, slots=True)
class PackEntry:
    """Entry of a pack plan: a matrix of stacked tensors, or a float32 vector of concatenated
    tensors.

    Attributes:
        parts: the tensors, as pairs (tensor name, rows).
        inputs: number of columns; 0 for a vector.
        kind: one of `FORMATS`, or "vector".
        offset: number added to each value of a vector.
    """

    name: str
    kind: str
    parts: tuple[tuple[str, int], ...]
    inputs: int = 0
    offset: float = 0.0

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.parts)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Bytes of the codes (or floats), of the scales and of the minima.

        Vectors are zero-padded to a multiple of 32 values.
        """
        if self.kind == VECTOR:
            return -(-self.rows // 32) * 32 * 4, 0, 0
        return packed_sizes(self.rows, self.inputs, self.kind)

    @property
    def sections(self) -> tuple[tuple[str, int], ...]:
        """Name and size of each section that the entry has in a packed file."""
        names = (self.name, f"{self.name}.scales", f"{self.name}.minima")
        return tuple((name, size) for name, size in zip(names, self.sizes, strict=True) if size)


def pack_plan(spec: ModelSpec, weights: str, source: WeightSource | None = None) -> list[PackEntry]:
    """Return the pack plan of a model, in the order of use. A tied head uses the entry "embed".

    With STORED, a matrix of tensors in several formats takes the widest of them. QKV in formats
    that can share a panel becomes several entries instead, see `run_name`.

    Args:
        spec: spec of the model.
        weights: one of WEIGHT_FORMATS, or STORED to keep the formats of a quantized `source`. With
            int4 and int4-asym, the head and the embedding are int8.
        source: the tensors, required for STORED.
    """
    if weights == STORED:
        if source is None or not is_quantized(source):
            raise ConfigError(
                f"weights={STORED!r} keeps the formats of a quantized checkpoint, but this "
                f"checkpoint is not quantized; give one of {WEIGHT_FORMATS}"
            )
        return [run for entry in _entries(spec, "int8") for run in _as_stored(entry, source)]
    if weights not in WEIGHT_FORMATS:
        raise ConfigError(f"weights={weights!r} is not one of {WEIGHT_FORMATS}")
    return _entries(spec, weights)


def mtp_plan(head: MtpSpec, weights: str, source: WeightSource) -> list[PackEntry]:
    """Return the pack plan of an MTP head, in the order of use.

    The names are those of a model with the head's layers, with "embedding_norm", "hidden_norm" and
    "projection" in addition. An assistant has "projection" and "post_projection" instead. The plan
    lacks the entries that the head shares with the model.

    Args:
        head: spec of the head.
        weights: one of WEIGHT_FORMATS, or STORED to keep the formats of the tensors. Float matrices
            then become int8.
        source: the tensors of the head.

    Raises:
        ModelFormatError: the tensors do not match the plan.
    """
    if weights != STORED and weights not in WEIGHT_FORMATS:
        raise ConfigError(f"weights={weights!r} is not one of {WEIGHT_FORMATS}")
    spec = head.model
    size = spec.hidden_size
    kind = "int8" if weights == STORED else weights
    own = dataclasses.replace(spec, tied="head" in head.shared)
    embed, *rest = _entries(own, kind)
    projection = PackEntry(
        "projection", kind, ((f"{PROJECTION}.weight", size),), 2 * spec.state_size
    )
    if spec.backbone_size:
        joined = [projection]
        post = ((f"{POST_PROJECTION}.weight", spec.backbone_size),)
        rest.append(PackEntry("post_projection", kind, post, size))
    else:
        joined = [
            _vector(spec, "embedding_norm", f"{EMBEDDING_NORM}.weight", size),
            _vector(spec, "hidden_norm", f"{HIDDEN_NORM}.weight", size),
            projection,
        ]
    plan = [one for one in (embed, *joined, *rest) if one.name not in head.shared]
    if weights == STORED:
        plan = [run for entry in plan for run in _as_stored(entry, source)]
    check_tensors(plan, source)
    return plan


def _entries(spec: ModelSpec, weights: str) -> list[PackEntry]:
    """Return the entries for a weight format other than STORED."""
    outer = "int8" if FORMATS[weights].bits < 8 else weights
    vocab = (("model.embed_tokens.weight", spec.vocab_size),)
    plan = [PackEntry("embed", outer, vocab, spec.hidden_size)]
    if spec.per_layer is not None:
        rows = (
            ("model.per_layer_model_projection.weight", len(spec.layers) * spec.per_layer.width),
        )
        plan.append(PackEntry("ple_in", outer, rows, spec.hidden_size))
        plan.append(
            _vector(
                spec, "ple_in_norm", "model.per_layer_projection_norm.weight", spec.per_layer.width
            )
        )
    for index in range(len(spec.layers)):
        plan += _layer_plan(spec, weights, index)
    plan.append(_vector(spec, "norm", f"{spec.family.last_norm}.weight", spec.hidden_size))
    if not spec.tied:
        plan.append(
            PackEntry("head", outer, (("lm_head.weight", spec.vocab_size),), spec.hidden_size)
        )
    return plan


def is_quantized(source: WeightSource) -> bool:
    """Return whether the checkpoint has any quantized tensor."""
    return any(source.kind(name) is not None for name in source.names())


def holds_exactly(kind: str, stored: str | None) -> bool:
    """Return whether the packed format `kind` represents a stored format exactly.

    Args:
        kind: packed format.
        stored: format of the tensor; None for floats.
    """
    return stored is not None and kind in (stored, *FORMATS[stored].exact_in)


def plan_bytes(plan: Sequence[PackEntry]) -> int:
    """Return the total size of all sections in bytes, which is the memory that the weights take."""
    return sum(size for entry in plan for size in entry.sizes)


def kinds_of(plan: Sequence[PackEntry]) -> set[int]:
    """Return the formats of all matrices as numbers, as the kernels use them."""
    return {FORMATS[entry.kind].kind for entry in plan if entry.kind != VECTOR}


def plan_label(plan: Sequence[PackEntry], weights: str) -> str:
    """Return a label for a plan's weight format, such as "int8", or "int4+int8" for STORED."""
    if weights != STORED:
        return weights
    return "+".join(
        sorted({entry.kind for entry in plan if entry.kind not in (VECTOR, ROUTER_KIND)})
    )


def run_name(name: str, index: int) -> str:
    """Return the name of entry `index` of a matrix that is split because its tensors differ in
    format.
    """
    return name if index == 0 else f"{name}+{index}"


def _as_stored(entry: PackEntry, source: WeightSource) -> list[PackEntry]:
    if entry.kind in (VECTOR, ROUTER_KIND):
        return [entry]
    kinds = [source.kind(tensor) or "int8" for tensor, _ in entry.parts]
    unknown = set(kinds) - set(_WIDENING)
    if unknown:
        raise ModelFormatError(
            f"{entry.name}: the source contains unknown formats {sorted(unknown)}; supported: "
            f"{_WIDENING}"
        )
    # Tensors may have different tables, but a tile can only have one.
    in_tiles = all(rows % LANES == 0 for _, rows in entry.parts[:-1])
    alike = all(FORMATS[kind].shares_panel for kind in kinds)
    if alike and entry.name.endswith((".qkv", ".mixer_in")):
        runs = _runs(entry, kinds)
        has_table = any(FORMATS[kind].table for kind in kinds)
        if all(run.rows % LANES == 0 for run in runs[:-1]) and (in_tiles or not has_table):
            return runs
    return [dataclasses.replace(entry, kind=_widest(set(kinds), in_tiles=in_tiles))]


def _runs(entry: PackEntry, kinds: Sequence[str]) -> list[PackEntry]:
    """Split a matrix into one entry for each run of neighbouring tensors in the same format.

    The entries read the same inputs, so their formats must share an input layout.
    """
    runs: list[PackEntry] = []
    for kind, part in zip(kinds, entry.parts, strict=True):
        if runs and runs[-1].kind == kind:
            runs[-1] = dataclasses.replace(runs[-1], parts=(*runs[-1].parts, part))
        else:
            name = run_name(entry.name, len(runs))
            runs.append(dataclasses.replace(entry, name=name, kind=kind, parts=(part,)))
    return runs


def _widest(kinds: set[str], *, in_tiles: bool) -> str:
    """Return the narrowest format that represents all formats exactly, or int8 (inexact) if none
    does.

    Args:
        kinds: formats to represent.
        in_tiles: True if every tensor starts at a tile boundary.
    """
    formats = [kind for kind in _WIDENING if in_tiles or not FORMATS[kind].table]
    holding = (wide for wide in formats if all(holds_exactly(wide, kind) for kind in kinds))
    return next(holding, "int8")


def _vector(spec: ModelSpec, name: str, tensor: str, count: int) -> PackEntry:
    return PackEntry(name, VECTOR, ((tensor, count),), offset=spec.family.norm_offset)


def row_tables(spec: ModelSpec) -> list[PackEntry]:
    """Return the tables whose rows are read from the checkpoint and never packed.

    The `kind` of these entries is not used.
    """
    if spec.per_layer is None:
        return []
    rows = (("model.embed_tokens_per_layer.weight", spec.per_layer.rows),)
    return [PackEntry("ple_table", "f32", rows, len(spec.layers) * spec.per_layer.width)]


def _layer_plan(spec: ModelSpec, kind: str, index: int) -> list[PackEntry]:
    source = f"model.layers.{index}."
    to = f"layer{index}."
    layer = spec.layers[index]
    q_rows = spec.num_heads * layer.head_dim
    hidden = spec.hidden_size
    wide = layer.intermediate_size
    *first, down = spec.family.mlp or ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    experts = spec.experts if spec.experts is not None and spec.experts.sparse[index] else None
    if experts is not None and experts.shared:
        *first, down = experts.names.shared
    way_in = tuple((name, (1 + spec.family.gated) * wide // len(first)) for name in first)
    matrices = _mixer_matrices(spec) if layer.keeps_state else []
    if layer.attends:
        matrices.append(("qkv", _qkv(spec, index), hidden, spec.qkv_bias))
        matrices.append(("out", ((spec.family.out, hidden),), q_rows, spec.output_bias))
    if wide:  # in layers with experts, the shared expert
        matrices.append((spec.family.way_in, way_in, hidden, spec.mlp_bias))
        matrices.append(("down", ((down, hidden),), wide, spec.mlp_bias))
    norms = _norm_names(
        spec, mixes=layer.attends or layer.keeps_state, mlp=bool(wide) or experts is not None
    )
    if experts is not None and experts.beside:
        norms |= dict(
            zip(("beside_out", "experts_in", "experts_out"), experts.names.norms, strict=True)
        )
    if spec.per_layer is not None:
        width = spec.per_layer.width
        matrices.append(("ple_gate", (("per_layer_input_gate", width),), hidden, False))
        matrices.append(("ple_out", (("per_layer_projection", hidden),), width, False))
        norms["ple_norm"] = "post_per_layer_input_norm"
    plan = []
    for name, parts, inputs, has_bias in matrices:
        plan.append(PackEntry(to + name, kind, _named(source, parts, "weight"), inputs))
        if has_bias:
            plan.append(PackEntry(f"{to}{name}_bias", VECTOR, _named(source, parts, "bias")))
    if layer.keeps_state:
        plan += _mixer_rest(spec, source, to)
    if experts is not None:
        plan += _experts_plan(spec, experts, kind, source, to)
    for name, tensor in norms.items():
        plan.append(_vector(spec, to + name, f"{source}{tensor}.weight", hidden))
    if spec.family.sub_norms:
        rows_of = zip(("attn_sub", "mlp_sub"), spec.family.sub_norms, (q_rows, wide), strict=True)
        for name, tensor, rows in rows_of:
            plan.append(_vector(spec, to + name, f"{source}{tensor}.weight", rows))
    if spec.family.sinks and layer.attends:
        plan.append(
            PackEntry(f"{to}sinks", VECTOR, ((f"{source}self_attn.sinks", spec.num_heads),))
        )
    if spec.head_norm and layer.attends:
        every = spec.head_norm == "all"
        kv_rows = layer.num_kv_heads * layer.head_dim
        called = zip(("q_norm", "k_norm"), spec.family.head_norms, (q_rows, kv_rows), strict=True)
        for name, tensor, rows in list(called)[: 2 if layer.owns_kv else 1]:
            norm = f"{source}self_attn.{tensor}.weight"
            plan.append(_vector(spec, to + name, norm, rows if every else layer.head_dim))
    if spec.family.layer_scalar:
        plan.append(PackEntry(f"{to}scalar", VECTOR, ((f"{source}layer_scalar", 1),)))
    return plan


def _experts_plan(
    spec: ModelSpec, experts: Experts, kind: str, source: str, to: str
) -> list[PackEntry]:
    """Return the entries for the router and the experts of a layer.

    For each projection, one matrix contains the rows of all experts in order.
    """
    names = experts.names
    hidden = spec.hidden_size
    way_in = f"{to}experts_{spec.family.way_in}"
    rows: tuple[tuple[str, int], ...] = ((names.router, experts.count),)
    if names.shared_gate:
        rows = (*rows, (names.shared_gate, 1))
    plan = [PackEntry(f"{to}router", ROUTER_KIND, _named(source, rows, "weight"), hidden)]
    if names.bias:
        plan.append(PackEntry(f"{to}choice", VECTOR, ((f"{source}{names.bias}", experts.count),)))
    if names.scales:
        sizes = zip(("router_in", "shares"), names.scales, (hidden, experts.count), strict=True)
        plan += [
            PackEntry(to + name, VECTOR, ((source + tensor, size),)) for name, tensor, size in sizes
        ]
    *first, down = names.parts
    every = [f"{names.experts}{expert}." for expert in range(experts.count)]
    both = tuple((f"{one}{part}", experts.width) for one in every for part in first)
    plan.append(PackEntry(way_in, kind, _named(source, both, "weight"), hidden))
    last = tuple((f"{one}{down}", hidden) for one in every)
    plan.append(PackEntry(f"{to}experts_down", kind, _named(source, last, "weight"), experts.width))
    if experts.biased:
        biases = (
            (f"{to}router", ((names.router, experts.count),)),
            (way_in, both),
            (f"{to}experts_down", last),
        )
        plan += [
            PackEntry(f"{name}_bias", VECTOR, _named(source, parts, "bias"))
            for name, parts in biases
        ]
    return plan


def _mixer_matrices(spec: ModelSpec) -> list[tuple[str, tuple[tuple[str, int], ...], int, bool]]:
    """Return the projections of a recurrent layer, which it has instead of "qkv" and "out".

    The input projections are stacked into one matrix, because they read the same inputs.
    """
    (mixer, names) = spec.named_mixer
    hidden = spec.hidden_size
    values = mixer.value_heads * mixer.value_dim or mixer.channels
    rows = (3 * mixer.channels,) if mixer.kind == "conv" else (mixer.channels, values)
    inputs = tuple(zip(names.inputs, rows, strict=True))
    return [
        ("mixer_in", inputs, hidden, False),
        ("mixer_out", ((names.out, hidden),), values, False),
    ]


def _mixer_rest(spec: ModelSpec, source: str, to: str) -> list[PackEntry]:
    """Return the entries for the small tensors of a mixer.

    They are the gates (floats, like routers), the convolution and vectors. The weights of the
    convolution are [taps + 1, channels], with the oldest input first.
    """
    mixer, names = spec.named_mixer
    normed = mixer.value_dim * (mixer.value_heads if mixer.norm_groups else 1)
    vectors = {
        "conv": (names.conv, (mixer.taps + 1) * mixer.channels),
        "conv_bias": (names.conv_bias, mixer.channels),
        "decay": (names.decay, mixer.value_heads),
        "dt_bias": (names.dt_bias, mixer.value_heads),
        "skip": (names.skip, mixer.value_heads),
        "mixer_norm": (names.norm, normed),
    }
    gates = tuple((name, mixer.value_heads) for name in names.gates)
    plan = [
        PackEntry(
            f"{to}mixer_gates", ROUTER_KIND, _named(source, gates, "weight"), spec.hidden_size
        )
    ]
    vectors_of = [
        (to + name, source + tensor, count) for name, (tensor, count) in vectors.items() if tensor
    ]
    return plan[: len(gates)] + [
        PackEntry(name, VECTOR, ((tensor, count),)) for name, tensor, count in vectors_of
    ]


def _qkv(spec: ModelSpec, index: int) -> tuple[tuple[str, int], ...]:
    """Return the QKV tensors of a layer with their rows.

    A layer that shares the KV of another layer has only queries."""
    layer = spec.layers[index]
    q_rows = spec.num_heads * layer.head_dim
    kv_rows = layer.num_kv_heads * layer.head_dim
    if spec.family.fused:
        return (("self_attn.qkv_proj", q_rows + 2 * kv_rows),)
    parts = (
        ("self_attn.q_proj", q_rows),
        ("self_attn.k_proj", kv_rows),
        ("self_attn.v_proj", kv_rows),
    )
    if spec.family.output_gate:
        return (*parts, (OUTPUT_GATE, q_rows))
    return parts[: (3 if layer.has_values else 2) if layer.owns_kv else 1]


def _named(
    source: str, parts: tuple[tuple[str, int], ...], what: str
) -> tuple[tuple[str, int], ...]:
    return tuple((f"{source}{tensor}.{what}", rows) for tensor, rows in parts)


def _norm_names(spec: ModelSpec, *, mixes: bool, mlp: bool) -> dict[str, str]:
    """Return the tensor names of a layer's norms by their position.

    Args:
        spec: spec of the model.
        mixes: True if the layer mixes tokens.
        mlp: True if the layer has an MLP.
    """
    found = _all_norm_names(spec)
    return {to: name for to, name in found.items() if (mixes if to.startswith("attn_") else mlp)}


def _all_norm_names(spec: ModelSpec) -> dict[str, str]:
    if spec.family.norm_names:
        places = {
            "pre": ("attn_in", "mlp_in"),
            "both": ("attn_in", "attn_out", "mlp_in", "mlp_out"),
        }
        return dict(zip(places[spec.family.norms], spec.family.norm_names, strict=True))
    if spec.family.norms == "pre":
        return {"attn_in": "input_layernorm", "mlp_in": "post_attention_layernorm"}
    after = {"attn_out": "post_attention_layernorm", "mlp_out": "post_feedforward_layernorm"}
    if spec.family.norms == "post":
        return after
    return {"attn_in": "input_layernorm", "mlp_in": "pre_feedforward_layernorm", **after}


def check_tensors(
    plan: Sequence[PackEntry], source: WeightSource, tables: Sequence[PackEntry] = ()
) -> None:
    """Check that the checkpoint has exactly the tensors of a plan and of tables, in their shapes.

    Raises:
        ModelFormatError: a tensor is missing, has another shape, or would be unused, or single rows
            of a table cannot be read.
    """
    used = set()
    for entry in (*plan, *tables):
        for tensor, rows in entry.parts:
            expected = (rows, entry.inputs) if entry.kind != VECTOR else (rows,)
            if source.shape(tensor) != expected:
                raise ModelFormatError(
                    f"{source.file_of(tensor)}: tensor {tensor!r} has shape "
                    f"{source.shape(tensor)}, expected {expected} according to the config"
                )
            used.add(tensor)
    for table in tables:
        for tensor, _ in table.parts:
            source.stored_rows(tensor)
    ignored = {"lm_head.weight"}  # tied, but saved anyway
    left = {
        name
        for name in source.names() - used - ignored
        if not name.endswith(".rotary_emb.inv_freq")
    }
    left -= {name for name in left if _is_of_sharing_layer(name, used)}
    surplus = min(left, default="")
    number = expert_number(surplus)
    if (
        number is not None
        and f".experts.{number - 1}.".join(surplus.split(f".experts.{number}.")) in used
    ):
        raise ModelFormatError(
            f"tensor {surplus!r} belongs to expert {number}, but the layers have experts 0 to "
            f"{number - 1}"
        )
    if left:
        raise ModelFormatError(
            f"tensor {min(left)!r} is not supported by the native runner ({len(left)} such tensors)"
        )


def _is_of_sharing_layer(name: str, used: set[str]) -> bool:
    """Return whether a tensor is a KV projection or norm of a layer that uses KV from another
    layer.

    Files contain these tensors although they are unused.
    """
    layer, _, rest = name.partition(".self_attn.")
    return (
        rest in ("k_proj.weight", "v_proj.weight", "k_norm.weight", "v_norm.weight")
        and f"{layer}.self_attn.q_proj.weight" in used
        and f"{layer}.self_attn.k_proj.weight" not in used
    )
