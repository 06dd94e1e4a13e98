"""A slow and simple implementation of a whole tiny model in float64 NumPy, computed from the
entries of its packed plan.

It covers recurrent layers (token by token, from zeros), gated attention and experts. Weights are
the float values of the plan's entries, by their names in the plan, regardless of the file format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvboost_edge.kernels.linear.weights import pack_rows
from kvboost_edge.kernels.reference.experts import Routing, route_rows
from kvboost_edge.kernels.reference.weights import unpack_rows
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.config.mtp_spec import MtpSpec
from kvboost_edge.models.config.spec import ModelSpec, describe_model
from kvboost_edge.models.families.mixers import Mixer
from kvboost_edge.models.packed.pack_plan import VECTOR, PackEntry, check_tensors, pack_plan
from kvboost_edge.models.packed.stream import EntryRows, read_rows
from kvboost_edge.models.weights.weight_source import WeightSource

Doubles = npt.NDArray[np.float64]
Weights = Mapping[str, Doubles]


def plan_floats(model: Path) -> tuple[ModelSpec, dict[str, Doubles]]:
    """Return the spec of a model, and every entry of its plan: matrices [rows, inputs] and vectors
    [rows].
    """
    checkpoint = Checkpoint.open(model)
    spec = describe_model(checkpoint.config)
    plan = pack_plan(spec, "f32")
    with checkpoint.open_source() as source:
        check_tensors(plan, source)
        return spec, _floats(plan, source)


def packed_floats(model: Path, weights: str) -> tuple[ModelSpec, dict[str, Doubles]]:
    """Return what `plan_floats` does, with each matrix as the weight format represents it."""
    spec, found = plan_floats(model)
    for entry in pack_plan(spec, weights):
        if entry.kind not in (VECTOR, "f32"):
            packed = pack_rows(found[entry.name].astype(np.float32), entry.kind)
            rows = unpack_rows(packed, entry.rows, entry.inputs, entry.kind)
            found[entry.name] = rows.astype(np.float64)
    return spec, found


def mtp_floats(model: Path) -> tuple[MtpSpec, dict[str, Doubles]]:
    """Return the spec of a model's MTP head, and every entry of its plan as `plan_floats` does."""
    checkpoint = Checkpoint.open(model)
    assert checkpoint.mtp is not None
    with checkpoint.open_mtp_source() as source:
        return checkpoint.mtp, _floats(checkpoint.mtp_plan("f32"), source)


def mtp_model(model: Path) -> tuple[MtpSpec, dict[str, Doubles], Doubles]:
    """Return a model's MTP head, its weights including the shared ones, and the LM head."""
    _, weights = plan_floats(model)
    head, own = mtp_floats(model)
    shared = {name: weights[name] for name in head.shared if name in weights}
    found = {**shared, **own}
    return head, found, found["head"] if "head" in found else weights["embed"]


def _floats(plan: Sequence[PackEntry], source: WeightSource) -> dict[str, Doubles]:
    return {
        entry.name: read_rows(EntryRows(entry, 0, entry.rows), source) + _offset(entry)
        for entry in plan
    }


def _offset(entry: PackEntry) -> np.float64:
    return np.float64(entry.offset if entry.kind == VECTOR else 0.0)


def hybrid_logits(spec: ModelSpec, weights: Weights, token_ids: Sequence[int]) -> Doubles:
    """Return logits, float64 [tokens, vocab]."""
    head = weights["embed" if spec.tied else "head"]
    return last_states(spec, weights, token_ids) @ head.T * spec.logit_factor


def last_states(spec: ModelSpec, weights: Weights, token_ids: Sequence[int]) -> Doubles:
    """Return hidden states after the last norm, float64 [tokens, hidden]."""
    hidden = weights["embed"][np.asarray(token_ids)].astype(np.float64) * spec.embedding_factor
    for index in range(len(spec.layers)):
        hidden = _after_layer(spec, weights, index, hidden)
    return _norm(hidden, weights["norm"], spec.eps)


def mtp_states(
    head: MtpSpec, weights: Weights, states: Doubles, token_ids: Sequence[int]
) -> Doubles:
    """Return the states of an MTP head after its last norm, float64 [tokens, hidden].

    Args:
        head: spec of the head.
        weights: entries of the head's plan, and the model's entries that it shares.
        states: last states of the model, then the head's own for each draft token.
        token_ids: token after each state.
    """
    spec = head.model
    tokens = weights["embed"][np.asarray(token_ids)].astype(np.float64) * spec.embedding_factor
    rows = np.concatenate(
        [
            _norm(tokens, weights["embedding_norm"], spec.eps),
            _norm(states, weights["hidden_norm"], spec.eps),
        ],
        axis=1,
    )
    hidden = _after_layer(spec, weights, 0, rows @ weights["projection"].T)
    return _norm(hidden, weights["norm"], spec.eps)


def _after_layer(spec: ModelSpec, weights: Weights, index: int, hidden: Doubles) -> Doubles:
    layer = spec.layers[index]
    own = {
        name.partition(".")[2]: value
        for name, value in weights.items()
        if name.startswith(f"layer{index}.")
    }
    if layer.attends or layer.keeps_state:
        normed = _norm(hidden, own["attn_in"], spec.eps)
    if layer.attends:
        attended = _attention(spec, own, normed, layer.rope) @ own["out"].T
        hidden = hidden + spec.residual_factor * spec.factors.attention_out * attended
    if layer.keeps_state:
        assert spec.mixer is not None
        mixed = (
            _MIXERS[spec.mixer.kind](spec.mixer, _multiplied(spec, own), normed, spec.eps)
            @ own["mixer_out"].T
        )
        hidden = hidden + spec.residual_factor * spec.factors.mixer_out * mixed
    if "mlp_in" in own:
        normed = spec.factors.mlp * _norm(hidden, own["mlp_in"], spec.eps)
        hidden = hidden + spec.residual_factor * spec.factors.mlp_out * _mlp(
            spec, index, own, normed
        )
    return hidden


def _multiplied(spec: ModelSpec, own: Weights) -> Weights:
    """Return a mixer's weights multiplied by the factors of their results."""
    factors = spec.factors
    mixer = spec.mixer
    assert mixer is not None
    if mixer.kind != "ssd":
        return own
    keys = mixer.key_heads * mixer.key_dim
    taps = np.repeat(factors.mixer_conv, (mixer.channels - 2 * keys, keys, keys))
    return {
        **own,
        "mixer_in": factors.mixer * own["mixer_in"],
        "mixer_gates": factors.mixer_gates * own["mixer_gates"],
        "conv": (own["conv"].reshape(mixer.taps + 1, -1) * taps).reshape(-1),
    }


def _norm(rows: Doubles, weight: Doubles, eps: float) -> Doubles:
    return rows / np.sqrt(np.square(rows).mean(axis=-1, keepdims=True) + eps) * weight


def _sigmoid(values: Doubles) -> Doubles:
    return 1 / (1 + np.exp(-values))


def _silu(values: Doubles) -> Doubles:
    return values * _sigmoid(values)


# -- token mixers --


def _attention(spec: ModelSpec, own: Weights, normed: Doubles, rope: int) -> Doubles:
    heads = spec.num_heads
    kv_heads = spec.num_kv_heads
    dim = spec.head_dim
    rows = spec.factors.attention * normed @ own["qkv"].T
    rows = rows + own.get("qkv_bias", 0.0)
    query, key, value, gate = np.split(
        rows, np.cumsum([heads * dim, kv_heads * dim, kv_heads * dim]), axis=1
    )
    query, key, value = (part.reshape(len(rows), -1, dim) for part in (query, key, value))
    frequencies = np.array(spec.ropes[rope].frequencies if rope >= 0 else [], dtype=np.float64)
    if "q_norm" in own:
        query = _norm(query, own["q_norm"], spec.eps)
        key = _norm(key, own["k_norm"], spec.eps)
    query, key = (_turned(part, frequencies) for part in (query, key))
    key, value = (np.repeat(part, heads // kv_heads, axis=1) for part in (key, value))
    scores = np.einsum("ihd,jhd->hij", query, key) * spec.softmax_scale
    scores = np.where(np.tri(len(rows), dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(axis=2, keepdims=True))
    out = np.einsum("hij,jhd->ihd", shares / shares.sum(axis=2, keepdims=True), value).reshape(
        len(rows), -1
    )
    return out * _sigmoid(gate) if spec.family.output_gate else out


def _turned(rows: Doubles, frequencies: Doubles) -> Doubles:
    """Rotate the pairs (i, i + half) of [tokens, heads, dim] by their positions."""
    angles = np.arange(len(rows))[:, None, None] * frequencies
    half = len(frequencies)
    first = rows[..., :half]
    second = rows[..., half : 2 * half]
    rest = rows[..., 2 * half :]
    turned = (
        first * np.cos(angles) - second * np.sin(angles),
        second * np.cos(angles) + first * np.sin(angles),
        rest,
    )
    return np.concatenate(turned, axis=-1)


def _convolved(mixer: Mixer, taps: Doubles, rows: Doubles) -> Doubles:
    """Convolve each channel. The first tap multiplies the oldest input; inputs before the text are
    zeros.
    """
    taps = taps.reshape(mixer.taps + 1, mixer.channels)
    before = np.concatenate([np.zeros((mixer.taps, mixer.channels)), rows])
    return np.array(
        [(before[at : at + mixer.taps + 1] * taps).sum(axis=0) for at in range(len(rows))]
    )


def _ssd(mixer: Mixer, own: Weights, normed: Doubles, eps: float) -> Doubles:
    """Compute Mamba2. Each head's state has the rows of B and C and the columns of x."""
    rows = normed @ own["mixer_in"].T
    width = mixer.value_heads * mixer.value_dim
    mixed, z = np.split(rows, [mixer.channels], axis=1)
    mixed = _silu(_convolved(mixer, own["conv"], mixed) + own.get("conv_bias", 0.0))
    x, b, c = np.split(mixed, [width, width + mixer.key_heads * mixer.key_dim], axis=1)
    x = x.reshape(len(rows), mixer.value_heads, mixer.value_dim)
    every = mixer.value_heads // mixer.key_heads
    b, c = (np.repeat(part.reshape(len(rows), -1, mixer.key_dim), every, axis=1) for part in (b, c))
    times = np.logaddexp(0, normed @ own["mixer_gates"].T + own["dt_bias"]).clip(*mixer.time_limit)
    state = np.zeros((mixer.value_heads, mixer.key_dim, mixer.value_dim))
    out = np.empty_like(x)
    for at in range(len(rows)):
        taken = np.einsum("hk,hv->hkv", b[at], times[at][:, None] * x[at])
        state = state * np.exp(own["decay"] * times[at])[:, None, None] + taken
        out[at] = np.einsum("hkv,hk->hv", state, c[at]) + own["skip"][:, None] * x[at]
    flat = out.reshape(len(rows), width)
    if mixer.norm == "none":
        return flat * _silu(z)
    gated = flat * _silu(z) if mixer.norm == "gated_before" else flat
    groups = gated.reshape(len(rows), mixer.norm_groups, -1)
    flat = _norm(groups, own["mixer_norm"].reshape(mixer.norm_groups, -1), eps).reshape(
        len(rows), width
    )
    return flat if mixer.norm == "gated_before" else flat * _silu(z)


def _short_conv(mixer: Mixer, own: Weights, normed: Doubles, eps: float) -> Doubles:
    before, after, rows = np.split(normed @ own["mixer_in"].T, 3, axis=1)
    return after * _convolved(mixer, own["conv"], before * rows)


def _delta(mixer: Mixer, own: Weights, normed: Doubles, eps: float) -> Doubles:
    rows = normed @ own["mixer_in"].T
    gates = normed @ own["mixer_gates"].T
    mixed, z = np.split(rows, [mixer.channels], axis=1)
    keys = mixer.key_heads * mixer.key_dim
    query, key, value = np.split(
        _silu(_convolved(mixer, own["conv"], mixed)), [keys, 2 * keys], axis=1
    )
    of_value = np.arange(mixer.value_heads)
    of_key = (
        of_value % mixer.key_heads
        if mixer.tiled_heads
        else of_value // (mixer.value_heads // mixer.key_heads)
    )
    query, key = (
        _unit(part.reshape(len(rows), -1, mixer.key_dim))[:, of_key] for part in (query, key)
    )
    value = value.reshape(len(rows), -1, mixer.value_dim)
    share, step = np.split(gates, 2, axis=1)
    decay = np.exp(own["decay"] * np.log1p(np.exp(step + own["dt_bias"])))
    state = np.zeros((mixer.value_heads, mixer.key_dim, mixer.value_dim))
    out = []
    for at in range(len(rows)):
        state = state * decay[at][:, None, None]
        known = np.einsum("hkv,hk->hv", state, key[at])
        state = state + np.einsum(
            "hk,hv->hkv", key[at], _sigmoid(share[at])[:, None] * (value[at] - known)
        )
        out.append(np.einsum("hkv,hk->hv", state, query[at]) / np.sqrt(mixer.key_dim))
    gated = _norm(np.array(out), own["mixer_norm"], eps) * _silu(
        z.reshape(len(rows), -1, mixer.value_dim)
    )
    return gated.reshape(len(rows), -1)


def _unit(rows: Doubles) -> Doubles:
    return rows / np.sqrt(np.square(rows).sum(axis=-1, keepdims=True) + 1e-6)


_MIXERS = {"conv": _short_conv, "delta": _delta, "ssd": _ssd}


# -- feed-forward layers --


def _mlp(spec: ModelSpec, index: int, own: Weights, rows: Doubles) -> Doubles:
    experts = spec.experts
    way_in = spec.family.way_in
    activate = _gated if spec.family.gated else _squared
    if experts is None or not experts.sparse[index]:
        return activate(rows @ own[way_in].T) @ own["down"].T
    routed = rows @ own["router"].T
    routing = Routing(
        experts.used,
        experts.score,
        experts.renorm,
        experts.eps,
        experts.scale,
        experts.groups,
        experts.used_groups,
    )
    chosen, shares = route_rows(routed[:, : experts.count], routing, own.get("choice"))
    ways_in = own[f"experts_{way_in}"].reshape(experts.count, -1, rows.shape[1])
    down = own["experts_down"].reshape(experts.count, -1, experts.width)
    out = np.zeros_like(rows)
    for at, row in enumerate(rows):
        for expert, share in zip(chosen[at], shares[at], strict=True):
            out[at] += share * (activate(row @ ways_in[expert].T) @ down[expert].T)
    if experts.shared:
        share = _sigmoid(routed[:, experts.count :]) if experts.names.shared_gate else 1.0
        out += share * (activate(rows @ own[way_in].T) @ own["down"].T)
    return out


def _gated(rows: Doubles) -> Doubles:
    gate, up = np.split(rows, 2, axis=-1)
    return _silu(gate) * up


def _squared(rows: Doubles) -> Doubles:
    return np.square(np.maximum(rows, 0))
