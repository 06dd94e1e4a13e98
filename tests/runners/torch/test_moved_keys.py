"""Keys attended at other positions than those they were computed at, on the torch runner.

The KV of the first layer depends only on the token, so a model of one layer gives the same results
with and without reuse.
"""

import numpy as np
import pytest
import torch

from helpers.distance import distance
from helpers.kernels.shifted_cases import Pieces, blocks_from, layout_of, plain, with_deltas
from helpers.models.tiny_models import FAMILIES, build_tiny_model
from helpers.random_ids import random_ids
from kvboost_edge.backends.select import choose_backend, make_backend
from kvboost_edge.backends.torch_backend import TorchBackend
from kvboost_edge.errors import BackendUnavailable, ConfigError
from kvboost_edge.runners.base import ForwardBatch, StoredKeys
from kvboost_edge.runners.torch.runner import TorchRunner
from kvboost_edge.segments import deltas_of, entry_of

pytestmark = pytest.mark.usefixtures("one_torch_thread")

SIZE = 16
BLOCKS = 64
FULL = "full_attention"
SLIDING = "sliding_attention"
OTHER_ROPE = {
    "llama-llama3rope": "llama3",
    "llama-yarn": "yarn",
    "gemma4": "proportional",
    "gemma4-wide": "proportional",
    "gemma4-moe": "proportional",
    "gpt_oss": "yarn",
}
# Their RoPE rotates adjacent channels or is scaled, which is refused, see below.
OTHER_TURNS = ("ernie4_5", "ernie4_5_moe", "glm4", "ministral3", "hunyuan_v1_dense")
WINDOWED = ("olmo3", "exaone4", "granite_swa")
ONE_LAYER = {
    **{
        name: (name, {})
        for name in FAMILIES
        if name not in (*OTHER_ROPE, *OTHER_TURNS, *WINDOWED, "gemma2", "gemma3", "smollm3")
        and not name.startswith("granitemoehybrid")
    },
    **{
        f"{name}-window": (name, {"layer_types": [SLIDING]}) for name in WINDOWED if name != "olmo3"
    },
    "gemma2-window": ("gemma2", {"layer_types": [SLIDING]}),
    "gemma3-global": ("gemma3", {"layer_types": [FULL]}),
    "gemma3-local": ("gemma3", {"layer_types": [SLIDING]}),
    **{
        name: (name, {"layer_types": ["attention"]})
        for name in FAMILIES
        if name.startswith("granitemoehybrid")
    },
    "smollm3-rope": ("smollm3", {"no_rope_layers": [1]}),
    "smollm3-nope": ("smollm3", {"no_rope_layers": [0]}),
}
STORED = random_ids(96, 1, 2)


class Hand:
    """A runner whose passes are made by hand. Unwritten memory is NaN."""

    def __init__(self, model, backend="torch", *, bits=16):
        self.runner = TorchRunner(model, kv_bits=(bits, bits))
        self.backend = make_backend(
            choose_backend(backend), self.runner.info.kv_spec, BLOCKS, num_threads=1
        )
        self.backend.poison_blocks(range(BLOCKS))
        self.runner.bind(self.backend)
        self.take = blocks_from(0)

    def batch(self, rows, tokens):
        """Return a batch of rows of one sequence."""
        positions = np.concatenate([np.arange(row.start, row.stop) for row in rows])
        layout = layout_of(rows, SIZE)
        return ForwardBatch(
            np.array(tokens)[positions], positions, layout, np.arange(len(positions))
        )

    def forward(self, rows, tokens):
        return np.array(self.runner.forward(self.batch(rows, tokens)))


class Mixed:
    """A prompt of runs of a stored one and of new stretches between them, each a row."""

    def __init__(self, hand):
        stored = plain(len(STORED), SIZE, hand.take)
        hand.forward([stored], STORED)
        pieces = Pieces(SIZE, hand.take)
        rng = np.random.default_rng(2)
        self.tokens = []
        self.rows = []
        # Moved backward and forward, from within blocks to within blocks.
        for count, run in ((16, (21, 46)), (32, (50, 33)), (9, None)):
            self.rows.append(pieces.own(count))
            self.tokens += rng.integers(2, 256, count).tolist()
            if run is not None:
                pieces.run(stored.table, *run)
                self.tokens += STORED[run[0] : sum(run)]
        assert [segment.delta for segment in self.rows[-1].segments] == [0, -5, 0, 44, 0]

    @property
    def own(self):
        return np.concatenate([np.arange(row.start, row.stop) for row in self.rows])

    @property
    def stored(self):
        """The stored keys of the runs."""
        row = self.rows[-1]
        segments = np.array(row.segments, np.int32)
        positions = np.setdiff1d(np.arange(row.stop), self.own)
        entries, offsets = entry_of(segments, 0, positions, SIZE)
        return StoredKeys(
            np.array(row.table)[entries] * SIZE + offsets,
            positions,
            deltas_of(segments, 0, positions),
        )


def error(got, wanted):
    assert np.isfinite(got).all()
    return distance(got, wanted)


@pytest.mark.parametrize("name", ONE_LAYER)
def test_reuse_in_one_layer_is_exact(name):
    family, overrides = ONE_LAYER[name]
    hand = Hand(build_tiny_model(family, num_hidden_layers=1, **overrides))
    assert hand.runner.moved_keys_refusal is None
    mixed = Mixed(hand)
    wanted = hand.runner.eager_logits(np.array(mixed.tokens))[mixed.own]
    assert error(hand.forward(mixed.rows, mixed.tokens), wanted) <= 1e-4
    if not name.endswith("-nope"):
        wrong = [with_deltas(row, lambda delta: delta - 1) for row in mixed.rows]
        assert error(hand.forward(wrong, mixed.tokens), wanted) >= 0.005
    # Single tokens after the runs, as in decoding.
    last = mixed.rows[-1]
    hand.forward(mixed.rows, mixed.tokens)
    one = hand.forward([last.last(1)], mixed.tokens)
    assert error(one, wanted[-1:]) <= 1e-4
    hand.runner.close()


def test_bfloat16_is_close_within_rounding():
    hand = Hand(build_tiny_model("llama", num_hidden_layers=1).to(torch.bfloat16))
    assert hand.runner.moved_keys_refusal is None
    mixed = Mixed(hand)
    wanted = hand.runner.eager_logits(np.array(mixed.tokens))[mixed.own]
    assert error(hand.forward(mixed.rows, mixed.tokens), wanted) <= 0.03


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2-window", "gpt_neox"])
def test_quantized_keys_are_unpacked_and_rotated(name):
    """The error is limited by the codes' precision, and ten times as large with wrong deltas."""
    family, overrides = ONE_LAYER[name]
    hand = Hand(build_tiny_model(family, num_hidden_layers=1, **overrides), bits=8)
    assert hand.runner.moved_keys_refusal is None
    mixed = Mixed(hand)
    wanted = hand.runner.eager_logits(np.array(mixed.tokens))[mixed.own]
    assert 1e-4 <= error(hand.forward(mixed.rows, mixed.tokens), wanted) <= 0.01
    assert error(hand.forward([mixed.rows[-1].last(1)], mixed.tokens), wanted[-1:]) <= 0.01
    wrong = [with_deltas(row, lambda delta: delta - 1) for row in mixed.rows]
    assert error(hand.forward(wrong, mixed.tokens), wanted) >= 0.1


@pytest.mark.parametrize("name", ["gemma3", "smollm3"])
def test_every_layer_rotates_its_keys_by_its_own_rope(name):
    """gemma3 has two RoPEs, smollm3 has layers without one."""
    runner = TorchRunner(build_tiny_model(name))
    config = runner.model.config.to_dict()
    for layer, frequencies in enumerate(runner._turning.layers):
        if name == "smollm3":
            assert len(frequencies) == (8 if config["no_rope_layers"][layer] else 0)
        else:
            theta = config["rope_parameters"][config["layer_types"][layer]]["rope_theta"]
            np.testing.assert_allclose(frequencies, theta ** (-np.arange(16) / 16), rtol=1e-5)


@pytest.mark.parametrize("asking", [np.array([0, 5, 8]), np.array([], int)], ids=["some", "none"])
@pytest.mark.parametrize(
    "name", ["llama", "gemma2-window", "gemma3-global", "smollm3-nope", "gpt_neox"]
)
def test_attention_masses_equal_transformers(name, asking):
    family, overrides = ONE_LAYER[name]
    model = build_tiny_model(family, num_hidden_layers=1, **overrides)
    hand = Hand(model)
    mixed = Mixed(hand)
    hand.forward(mixed.rows[:-1], mixed.tokens)
    row = mixed.rows[-1]
    stored = mixed.stored
    masses = hand.runner.masses(hand.batch([row], mixed.tokens), asking, stored)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        weights = model(torch.tensor([mixed.tokens]), output_attentions=True).attentions[0][0]
    wanted = weights[:, row.start + asking][:, :, stored.positions].sum((0, 1)).numpy()
    assert len(asking) == 0 or wanted.sum() > 0.1
    np.testing.assert_allclose(masses, wanted, atol=1e-5)


def test_deviations_are_those_of_the_second_layers_values():
    """Tokens recomputed after another prefix are compared with the stored ones."""
    model = build_tiny_model("llama")
    hand = Hand(model)
    mixed = Mixed(hand)
    hand.runner.deviations(hand.batch(mixed.rows[:1], mixed.tokens), np.arange(0), np.arange(0))
    # recompute the start of the first run in separate blocks
    start = 16
    count = 32
    pieces = Pieces(SIZE, hand.take)
    pieces.run(mixed.rows[0].table, 0, start)
    row = pieces.own(count)
    slots = mixed.stored.slots[:count]
    rows = np.arange(count)
    got = hand.runner.deviations(hand.batch([row], mixed.tokens), rows, slots)
    values = []
    for tokens, first in ((mixed.tokens[: start + count], start), (STORED[: 21 + count], 21)):
        layer = model.model.layers[1]
        with torch.inference_mode():
            hidden = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[1]
            values.append(layer.self_attn.v_proj(layer.input_layernorm(hidden))[0, first:])
    wanted = (values[0] - values[1]).square().sum(1).numpy()
    assert wanted.min() > 0.01
    np.testing.assert_allclose(got, wanted, rtol=1e-3)


def test_a_one_layer_model_has_no_deviations():
    hand = Hand(build_tiny_model("llama", num_hidden_layers=1))
    mixed = Mixed(hand)
    batch = hand.batch(mixed.rows[:1], mixed.tokens)
    assert hand.runner.deviations(batch, np.arange(4), mixed.stored.slots[:4]).tolist() == [0] * 4


# refusals


def refused(hand, why):
    """Assert that moved keys, deviations and masses are refused and nothing is written."""
    assert why in str(hand.runner.moved_keys_refusal)
    pieces = Pieces(SIZE, blocks_from(10))
    pieces.run([0, 1], 3, 20)
    batch = hand.batch([pieces.own(2)], STORED)
    before = hand.backend.checksum_blocks(range(BLOCKS))
    with pytest.raises(
        ConfigError, match="the torch runner does not support segments with a position delta"
    ):
        hand.runner.forward(batch)
    nothing = np.arange(0)
    with pytest.raises(BackendUnavailable, match=why):
        hand.runner.deviations(batch, nothing, nothing)
    with pytest.raises(BackendUnavailable, match=why):
        hand.runner.masses(batch, nothing, StoredKeys(nothing, nothing, nothing))
    assert hand.backend.checksum_blocks(range(BLOCKS)) == before


@pytest.mark.parametrize("name", OTHER_ROPE)
def test_other_kinds_of_rope_are_refused_by_name(name):
    refused(Hand(build_tiny_model(name)), f"RoPE type '{OTHER_ROPE[name]}' cannot be shifted")


def test_an_unsupported_rope_of_some_layers_is_refused():
    ropes = {
        FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    }
    refused(Hand(build_tiny_model("gemma3", rope_parameters=ropes)), "RoPE type 'linear'")


@pytest.mark.parametrize("name", ["ernie4_5", "ernie4_5_moe", "glm4"])
def test_interleaved_rope_is_refused(name):
    refused(Hand(build_tiny_model(name)), "does not apply plain RoPE")


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_backends_without_key_rotation_are_refused(backend):
    refused(Hand(build_tiny_model("llama"), backend), f"backend '{backend}'")


def test_without_a_backend_moved_keys_are_refused():
    assert "no backend" in str(TorchRunner(build_tiny_model("llama")).moved_keys_refusal)


def test_coheres_interleaved_rope_is_refused():
    """Cohere rotates channels 2i and 2i + 1, with the same table."""
    refused(Hand(build_tiny_model("cohere")), "does not apply plain RoPE")


def test_learned_positions_are_refused():
    model = build_tiny_model("gpt2", n_embd=64, n_layer=2, n_head=4, n_positions=128)
    refused(Hand(model), "uses positions other than by RoPE")


def test_a_zero_embedding_is_refused():
    model = build_tiny_model("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[1] = 0
    assert "layer 0" in str(TorchRunner(model).moved_keys_refusal)


def test_the_torch_pool_knows_the_rotation():
    hand = Hand(build_tiny_model("llama"))
    assert isinstance(hand.backend, TorchBackend)
    batch = hand.backend.prepare(layout_of(Mixed(hand).rows, SIZE))
    assert batch.deltas.tolist() == [-5, 0, 44]
