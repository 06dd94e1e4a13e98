"""From a model's spec and a weight format to the list of packed entries, and the bytes of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ConfigError, ModelFormatError
from kvboost_edge.kernels.quant_weights import KINDS, pack_rows, packed_sizes
from kvboost_edge.kernels.vectors import LANES
from kvboost_edge.models.families import ModelSpec
from kvboost_edge.models.weight_source import SafetensorsSource

__all__ = ["WEIGHT_FORMATS", "PackEntry", "check_tensors", "pack_entry", "pack_plan"]

WEIGHT_FORMATS = ("f32", "bf16", "int8", "int4")
VECTOR = "vector"
_CHUNK_BYTES = 8 << 20  # float32 bytes of rows that are quantized at once


@dataclasses.dataclass(frozen=True, slots=True)
class PackEntry:
    """One packed thing: a matrix made of `parts` one below the other, or a vector of float32 made of parts.

    parts   (tensor name, rows) each;  inputs: columns, 0 for a vector
    kind    "f32", "bf16", "int8", "int4", or "vector"
    offset  added to a vector's values
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
    def sizes(self) -> tuple[int, int]:
        """Bytes of the codes (or floats) and of the scales; a vector is padded to a multiple of 32 with zeros."""
        if self.kind == VECTOR:
            return -(-self.rows // 32) * 32 * 4, 0
        return packed_sizes(self.rows, self.inputs, KINDS[self.kind])


def pack_plan(spec: ModelSpec, weights: str) -> list[PackEntry]:
    """Entries of a model in the order of use. `weights` is one of WEIGHT_FORMATS; with int4 the head and the embedding
    are int8. A tied head is the entry "embed" itself."""
    if weights not in WEIGHT_FORMATS:
        raise ConfigError(f"weights={weights!r} is not one of {WEIGHT_FORMATS}")
    outer = "int8" if weights == "int4" else weights
    vocab = (("model.embed_tokens.weight", spec.vocab_size),)
    plan = [PackEntry("embed", outer, vocab, spec.hidden_size)]
    for index in range(len(spec.layers)):
        plan += _layer_plan(spec, weights, index)
    plan.append(_vector(spec, "norm", "model.norm.weight", spec.hidden_size))
    if not spec.tied:
        plan.append(PackEntry("head", outer, (("lm_head.weight", spec.vocab_size),), spec.hidden_size))
    return plan


def _vector(spec: ModelSpec, name: str, tensor: str, count: int) -> PackEntry:
    return PackEntry(name, VECTOR, ((tensor, count),), offset=spec.family.norm_offset)


def _layer_plan(spec: ModelSpec, weights: str, index: int) -> list[PackEntry]:
    source, to = f"model.layers.{index}.", f"layer{index}."
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    hidden, wide = spec.hidden_size, spec.intermediate_size
    qkv: tuple[tuple[str, int], ...]
    gate_up: tuple[tuple[str, int], ...]
    if spec.family.fused:
        qkv = (("self_attn.qkv_proj", q_rows + 2 * kv_rows),)
        gate_up = (("mlp.gate_up_proj", 2 * wide),)
    else:
        qkv = (("self_attn.q_proj", q_rows), ("self_attn.k_proj", kv_rows), ("self_attn.v_proj", kv_rows))
        gate_up = (("mlp.gate_proj", wide), ("mlp.up_proj", wide))
    matrices = [
        ("qkv", qkv, hidden, spec.qkv_bias),
        ("out", (("self_attn.o_proj", hidden),), q_rows, spec.output_bias),
        ("gate_up", gate_up, hidden, spec.mlp_bias),
        ("down", (("mlp.down_proj", hidden),), wide, spec.mlp_bias),
    ]
    plan = []
    for name, parts, inputs, has_bias in matrices:
        plan.append(PackEntry(to + name, weights, _named(source, parts, "weight"), inputs))
        if has_bias:
            plan.append(PackEntry(f"{to}{name}_bias", VECTOR, _named(source, parts, "bias")))
    for name, tensor in _norm_names(spec).items():
        plan.append(_vector(spec, to + name, f"{source}{tensor}.weight", hidden))
    if spec.family.head_norm:
        every = spec.family.head_norm == "all"
        for name, rows in (("q_norm", q_rows), ("k_norm", kv_rows)):
            tensor = f"{source}self_attn.{name}.weight"
            plan.append(_vector(spec, to + name, tensor, rows if every else spec.head_dim))
    return plan


def _named(source: str, parts: tuple[tuple[str, int], ...], what: str) -> tuple[tuple[str, int], ...]:
    return tuple((f"{source}{tensor}.{what}", rows) for tensor, rows in parts)


def _norm_names(spec: ModelSpec) -> dict[str, str]:
    """Norms of a layer: where they stand -> what the checkpoint calls them."""
    if spec.family.norms == "pre":
        return {"attn_in": "input_layernorm", "mlp_in": "post_attention_layernorm"}
    after = {"attn_out": "post_attention_layernorm", "mlp_out": "post_feedforward_layernorm"}
    if spec.family.norms == "post":
        return after
    return {"attn_in": "input_layernorm", "mlp_in": "pre_feedforward_layernorm", **after}


def check_tensors(plan: list[PackEntry], source: SafetensorsSource) -> None:
    """Every tensor of the plan is there with its shape, and the checkpoint has no weights the plan does not use."""
    used = set()
    for entry in plan:
        for tensor, rows in entry.parts:
            expected = (rows, entry.inputs) if entry.kind != VECTOR else (rows,)
            if source.shape(tensor) != expected:
                raise ModelFormatError(f"tensor {tensor!r} has shape {source.shape(tensor)}, expected {expected}")
            used.add(tensor)
    ignored = {"lm_head.weight"}  # a tied head that was saved all the same
    left = {name for name in source.names() - used - ignored if not name.endswith(".rotary_emb.inv_freq")}
    if left:
        raise ModelFormatError(f"tensor {min(left)!r} is not known to the native runner ({len(left)} such)")


def pack_entry(entry: PackEntry, source: SafetensorsSource) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    """The entry's bytes, piece by piece: (0 for codes or floats, 1 for scales; bytes). Pieces of each stream follow
    one another; rows are read a few megabytes at a time."""
    if entry.kind == VECTOR:
        yield 0, _pack_vector(entry, source)
        return
    step = max(LANES, _CHUNK_BYTES // (4 * entry.inputs) // LANES * LANES)
    for start in range(0, entry.rows, step):
        rows = _read_rows(entry, source, start, min(entry.rows, start + step))
        codes, scales = pack_rows(rows, KINDS[entry.kind])
        yield 0, codes
        if scales.size:
            yield 1, scales
    for tensor, _ in entry.parts:
        source.release(tensor)


def _pack_vector(entry: PackEntry, source: SafetensorsSource) -> npt.NDArray[np.uint8]:
    padded = np.zeros(entry.sizes[0] // 4, dtype=np.float32)
    values = np.concatenate([source.rows(tensor) for tensor, _ in entry.parts])
    padded[: entry.rows] = values + np.float32(entry.offset)
    return padded.view(np.uint8)


def _read_rows(entry: PackEntry, source: SafetensorsSource, start: int, stop: int) -> npt.NDArray[np.float32]:
    """Rows [start, stop) of the parts one below the other."""
    pieces, first = [], 0
    for tensor, rows in entry.parts:
        low, high = max(start, first), min(stop, first + rows)
        if low < high:
            pieces.append(source.rows(tensor, low - first, high - first))
        first += rows
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
