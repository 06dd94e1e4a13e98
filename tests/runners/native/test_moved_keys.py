"""Keys attended at other positions than those they were computed at, on the native runner.

The KV of the first layer depends only on the token, so a model of one layer gives the same results
with and without reuse.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.distance import distance
from helpers.kernels.shifted_cases import Pieces, blocks_from, layout_of, plain, with_deltas
from helpers.models.tiny_models import save_tiny_model
from helpers.random_ids import random_ids
from kvboost_edge.backends.cpu import CPUBackend
from kvboost_edge.backends.reference import ReferenceBackend
from kvboost_edge.config import EngineConfig
from kvboost_edge.errors import ConfigError
from kvboost_edge.kernels.attention.paged import AttentionOptions, QueryRotation
from kvboost_edge.kernels.attention.rope import RopeTable
from kvboost_edge.kernels.reference import attention as reference
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.config.spec import describe_model
from kvboost_edge.runners.attended_keys import asked_layer
from kvboost_edge.runners.base import ForwardBatch, StoredKeys
from kvboost_edge.runners.native.runner import NativeRunner
from kvboost_edge.runners.native.select_native import moved_keys_refusal
from kvboost_edge.segments import deltas_of, entry_of

SIZE = 16
BLOCKS = 160
FULL = "full_attention"
SLIDING = "sliding_attention"
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
PARTIAL = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": [1.0 + 0.2 * i for i in range(6)],
    "long_factor": [4.0] * 6,
    "partial_rotary_factor": 0.75,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}
# One-layer models with every kind of RoPE and of norm that the families have.
ONE_LAYER = {
    "llama": ("llama", {}),
    "llama-llama3rope": ("llama-llama3rope", {}),
    "llama-yarn": ("llama-yarn", {}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}),
    "mistral-window": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma": ("gemma", {}),
    "gemma2-window": ("gemma2", {"layer_types": [SLIDING]}),
    "gemma3-global": ("gemma3", {"layer_types": [FULL]}),
    "gemma3-local": ("gemma3", {"layer_types": [SLIDING]}),
    "gemma4-global": ("gemma4", {"layer_types": [FULL], "num_kv_shared_layers": 0}),
    "phi3-partial": ("phi3", {"rope_parameters": PARTIAL}),
    "phi3-longrope": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 96},
    ),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {}),
    "granite_swa": ("granite_swa", {"layer_types": [SLIDING]}),
    "ministral3": ("ministral3", {}),
    "smollm3-nope": ("smollm3", {"no_rope_layers": [0]}),
}
ELSEWHERE = (
    "phi3-longrope",
    "granite_swa",
)  # other factors beyond 96; transformers' attention weights exclude sinks
# RoPE of each kind of layer (-1: none), and whether the layer has a window.
LAYERS = {
    "llama-yarn": {(0, False)},
    **{name: {(0, False), (1, True)} for name in ("gemma3", "gemma4")},
    "smollm3": {(0, False), (-1, False)},
}
SOME = ("llama-yarn", "gemma2-window", "phi3-partial")


class Hand:
    """A runner whose passes are made by hand. Unwritten memory is NaN."""

    def __init__(
        self,
        directory,
        bits=(16, 16),
        *,
        weights="f32",
        threads=1,
        backend_type=CPUBackend,
    ):
        self._options = {"weights": weights, "num_threads": threads, "kv_bits": bits}
        self._directory = directory
        self.runner = NativeRunner.from_dir(directory, **self._options)
        self.backend = backend_type(self.runner.info.kv_spec, BLOCKS, num_threads=threads)
        self.backend.poison_blocks(range(BLOCKS))
        self.runner.bind(self.backend)
        self.take = blocks_from(0)

    def another_runner(self):
        """Replace the runner by a new one, whose tables cover no position yet, over the same
        blocks.
        """
        self.runner.close()
        self.runner = NativeRunner.from_dir(self._directory, **self._options)
        self.runner.bind(self.backend)

    def forward(self, rows, tokens, wanted=None):
        """Run a pass and return the logits of each row's tokens, or those of the `wanted` tokens of
        the batch.

        Args:
            tokens: whole sequence of each row.
        """
        new = [
            token
            for row, one in zip(rows, tokens, strict=True)
            for token in one[row.start : row.stop]
        ]
        positions = np.concatenate([np.arange(row.start, row.stop, dtype=np.int64) for row in rows])
        asked = np.array(range(len(new)) if wanted is None else wanted, np.int64)
        layout = layout_of(rows, SIZE)
        logits = self.runner.forward(
            ForwardBatch(np.array(new, np.int64), positions, layout, asked)
        )
        if wanted is not None:
            return [np.array(logits)]
        return [np.array(one) for one in np.split(logits, layout.cu_seqlens_q[1:-1])]

    def stored(self, tokens):
        row = plain(len(tokens), SIZE, self.take)
        self.forward([row], [tokens])
        return row

    def close(self):
        self.runner.close()
        self.backend.close()


class Mixed:
    """A prompt of runs of a stored one and of new stretches between them, each a row."""

    def __init__(self, hand, stored, of_stored, seed, own):
        pieces = Pieces(SIZE, hand.take)
        self.tokens = []
        self.rows = []
        # Moved backward and forward; from within blocks to within blocks; the same blocks twice;
        # whole blocks.
        runs = [(21, 46), (33, 50), (32, 48)]
        for number, count in enumerate(own):
            self.rows.append(pieces.own(count))
            self.tokens += random_ids(count, seed + number)
            if number + 1 < len(own):
                start, length = runs[number]
                pieces.run(stored.table, start, length)
                self.tokens += of_stored[start : start + length]

    @property
    def deltas(self):
        return [segment.delta for segment in self.rows[-1].segments]


def error(got, wanted):
    assert all(np.isfinite(one).all() for one in got)
    return distance(np.concatenate(got), np.concatenate(wanted))


def model(name, directory):
    family, overrides = ONE_LAYER[name]
    return save_tiny_model(family, directory, num_hidden_layers=1, **overrides)


STORED = random_ids(96, 1)


def mixed_and_exact(hand):
    """Return a prompt of runs, and the logits of its new rows when everything is recomputed."""
    mixed = Mixed(hand, hand.stored(STORED), STORED, 10, (16, 32, 16, 9))
    assert mixed.deltas == [0, -5, 0, 61, 0, 128, 0]
    (whole,) = hand.forward([plain(len(mixed.tokens), SIZE, hand.take)], [mixed.tokens])
    return mixed, [whole[row.start : row.stop] for row in mixed.rows]


@pytest.mark.parametrize("name", ONE_LAYER)
@pytest.mark.some(3)
def test_reuse_in_one_layer_is_exact(name, tmp_path):
    hand = Hand(model(name, tmp_path))
    assert hand.runner.moved_keys_refusal is None
    mixed, exact = mixed_and_exact(hand)
    several = [mixed.tokens] * len(mixed.rows)
    assert error(hand.forward(mixed.rows, several), exact) <= 2e-4
    if name != "smollm3-nope":
        for change in (lambda delta: delta - 1, lambda delta: 0):
            wrong = [with_deltas(row, change) for row in mixed.rows]
            assert error(hand.forward(wrong, several), exact) >= 0.005
    hand.close()


@pytest.mark.parametrize("bits", [(8, 8), (8, 4), (4, 4)], ids=str)
@pytest.mark.parametrize("name", SOME)
def test_reuse_in_one_layer_over_quantized_keys(name, bits, tmp_path):
    """The error is limited by the codes' precision, and far smaller than with deltas that are off
    by one.
    """
    hand = Hand(model(name, tmp_path))
    mixed, exact = mixed_and_exact(hand)
    hand.close()
    hand = Hand(tmp_path, bits)
    mixed, _ = mixed_and_exact(hand)
    several = [mixed.tokens] * len(mixed.rows)
    right = error(hand.forward(mixed.rows, several), exact)
    hand.backend.release_blocks(range(BLOCKS))
    wrong = error(
        hand.forward([with_deltas(row, lambda delta: delta - 1) for row in mixed.rows], several),
        exact,
    )
    hand.close()
    assert right <= (0.02 if bits == (8, 8) else 0.2)
    assert right <= 0.5 * wrong


class LayerByLayer(CPUBackend):
    name = "layer by layer"
    kernel_access = None


class TurnsKeys(LayerByLayer):
    """Backend that rotates keys instead of queries, using each layer's RoPE tables: float32 [2,
    positions, pairs].
    """

    tables: list[np.ndarray]

    def attention(self, layer, queries, batch, params):
        turning = QueryRotation(queries, *self.tables[layer])
        return reference.paged_attention(
            queries, self._pools[layer], batch.paged, AttentionOptions(*params), turning
        )


@pytest.mark.parametrize("name", ["llama-yarn", "gemma3", "gemma4", "smollm3"])
def test_every_layer_rotates_queries_by_its_own_rope(name, tmp_path, monkeypatch):
    """The moved keys come from another context. gemma3 has two RoPEs, smollm3 has layers without
    one.
    """
    hand = Hand(save_tiny_model(name, tmp_path))
    mixed = Mixed(hand, hand.stored(STORED), STORED, 10, (16, 32, 16, 9))
    several = [mixed.tokens] * len(mixed.rows)
    got = hand.forward(mixed.rows, several)
    hand.close()

    monkeypatch.setattr(
        "kvboost_edge.runners.native.runner.refuse_deltas", lambda layout, who: None
    )
    slow = Hand(tmp_path, backend_type=TurnsKeys)
    spec = describe_model(json.loads((tmp_path / "config.json").read_text(encoding="utf-8")))
    ropes = [RopeTable(np.array(rope.frequencies, np.float32), rope.factor) for rope in spec.ropes]
    for rope in ropes:
        rope.cover(1024)
    assert {(layer.rope, layer.window > 0) for layer in spec.layers} == LAYERS[name]
    assert isinstance(slow.backend, TurnsKeys)
    slow.backend.tables = [
        np.stack([ropes[layer.rope].cos, ropes[layer.rope].sin])[
            :, :, : None if layer.rope >= 0 else 0
        ]
        for layer in spec.layers
    ]
    mixed = Mixed(slow, slow.stored(STORED), STORED, 10, (16, 32, 16, 9))
    assert error(got, slow.forward(mixed.rows, several)) <= 2e-4
    slow.close()


@pytest.fixture(scope="module", params=["llama", "gemma3", "gemma4"])
def deep_model(request, tmp_path_factory):
    """A model with several layers; gemma3's have windows and two kinds of RoPE."""
    return save_tiny_model(request.param, tmp_path_factory.mktemp("deep"))


@pytest.mark.parametrize("bits", [(16, 16), (8, 8), (8, 4)], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_spans_in_one_pass_equal_separate_passes(deep_model, bits, threads):
    hand = Hand(deep_model, bits, weights="int8", threads=threads)
    stored = hand.stored(STORED)
    apart, together, quiet = (Mixed(hand, stored, STORED, 10, (16, 32, 16, 9)) for _ in range(3))
    wanted = [hand.forward([row], [apart.tokens])[0] for row in apart.rows]
    got = hand.forward(together.rows, [together.tokens] * len(together.rows))
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    # If few logits are wanted, the head runs separately. If none are, the last layer's attention is
    # skipped.
    assert hand.forward(quiet.rows[:2], [quiet.tokens] * 2, [])[0].shape[0] == 0
    (some,) = hand.forward(quiet.rows[2:], [quiet.tokens] * 2, [3, 24])
    np.testing.assert_array_equal(some, [wanted[2][3], wanted[3][8]])
    hand.close()


@pytest.mark.parametrize("bits", [(16, 16), (8, 8)], ids=str)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.some(3)
def test_rows_do_not_depend_on_the_batch(deep_model, bits, seed):
    """The batch mixes prefill and decode rows of exact sequences with rows over moved keys."""
    rng = np.random.default_rng(seed)
    hand = Hand(deep_model, bits, weights="int8", threads=int(rng.integers(1, 3)))
    stored = hand.stored(STORED)
    alone = []
    batch = []
    for number in range(6):
        copies = exact_duplicates(hand, rng) if number % 2 else mixed_duplicates(hand, rng, stored)
        (first, tokens), second = copies
        alone += hand.forward([first], [tokens])
        batch.append(second)
    assert any(row.stop - row.start == 1 for row, _ in batch)
    order = rng.permutation(len(batch)).tolist()
    together = hand.forward(
        [batch[index][0] for index in order], [batch[index][1] for index in order]
    )
    for index, got in zip(order, together, strict=True):
        np.testing.assert_array_equal(got, alone[index])
    hand.close()


def exact_duplicates(hand, rng):
    """Return the last token or tokens of a plain sequence twice, in separate blocks."""
    tokens = random_ids(seed=int(rng.integers(1000)), count=int(rng.integers(20, 120)))
    done = len(tokens) - int(rng.choice([1, 1, int(rng.integers(1, len(tokens)))]))
    rows = [plain(len(tokens), SIZE, hand.take) for _ in range(2)]
    for row in rows:
        hand.forward([row._replace(stop=done)], [tokens])
    return [(row._replace(start=done), tokens) for row in rows]


def mixed_duplicates(hand, rng, stored):
    """Return two copies of the last stretch of a prompt of runs, in separate blocks."""
    seed = int(rng.integers(1000))
    last = int(rng.integers(1, 30))
    copies = [Mixed(hand, stored, STORED, seed, (16, 16, last)) for _ in range(2)]
    for mixed in copies:
        hand.forward(mixed.rows[:2], [mixed.tokens] * 2)
    return [(mixed.rows[2], mixed.tokens) for mixed in copies]


def test_rope_tables_cover_rotated_positions(tmp_path):
    """The rotations go beyond any position of the batch."""
    hand = Hand(save_tiny_model("llama", tmp_path, max_position_embeddings=4096), threads=2)
    tokens = random_ids(1500, 2)
    pieces = Pieces(SIZE, hand.take)
    pieces.run(hand.stored(tokens).table, 1400, 40)
    row = pieces.own(8)
    own = [*tokens[1400:1440], *random_ids(8, 3)]
    wanted = hand.forward([row], [own])[0]
    hand.another_runner()
    np.testing.assert_array_equal(hand.forward([row], [own])[0], wanted)
    hand.close()


@pytest.mark.parametrize(
    "backend_type", [ReferenceBackend, LayerByLayer], ids=["reference", "cpu, layer by layer"]
)
def test_layer_by_layer_backends_refuse_moved_keys(backend_type, tmp_path):
    runner = NativeRunner.from_dir(save_tiny_model("llama", tmp_path), weights="f32")
    assert runner.moved_keys_refusal is not None
    backend = backend_type(runner.info.kv_spec, BLOCKS)
    runner.bind(backend)
    assert runner.moved_keys_refusal is not None
    pieces = Pieces(SIZE, blocks_from(10))
    pieces.run([0, 1], 3, 20)
    row = pieces.own(2)
    before = backend.checksum_blocks(range(BLOCKS))
    batch = ForwardBatch(
        np.array([1, 2]), np.array([20, 21]), layout_of([row], SIZE), np.array([1])
    )
    with pytest.raises(
        ConfigError,
        match=f"the native runner on backend '{backend.name}' does not support segments with",
    ):
        runner.forward(batch)
    assert backend.checksum_blocks(range(BLOCKS)) == before
    runner.close()
    backend.close()


def test_models_with_padded_heads_refuse_moved_keys(tmp_path):
    """Passes of such a model run layer by layer on every backend."""
    hand = Hand(save_tiny_model("llama", tmp_path, hidden_size=80, intermediate_size=104))
    assert "is not a multiple of 32" in str(hand.runner.moved_keys_refusal)
    hand.close()


@pytest.mark.parametrize("bits", [(16, 16), (8, 8)], ids=str)
@pytest.mark.parametrize("name", [name for name in ONE_LAYER if name not in ELSEWHERE])
@pytest.mark.some(3)
def test_attention_masses_equal_transformers(name, bits, tmp_path):
    """The reference computes the prompt without reuse, which gives the same keys in the first
    layer.
    """
    hand = Hand(model(name, tmp_path), bits)
    mixed = Mixed(hand, hand.stored(STORED), STORED, 10, (16, 32, 16, 9))
    hand.forward(mixed.rows[:-1], [mixed.tokens] * 3)
    row = mixed.rows[-1]
    segments = np.array(row.segments, np.int32)
    own = {position for one in mixed.rows for position in range(one.start, one.stop)}
    positions = np.array([position for position in range(row.stop) if position not in own])
    entries, offsets = entry_of(segments, 0, positions, SIZE)
    stored = StoredKeys(
        np.array(row.table)[entries] * SIZE + offsets, positions, deltas_of(segments, 0, positions)
    )
    new = np.arange(row.start, row.stop)
    batch = ForwardBatch(
        np.array(mixed.tokens[row.start :]), new, layout_of([row], SIZE), np.empty(0, np.int64)
    )
    asking = np.array([2, 3, 8])
    masses = hand.runner.masses(batch, asking, stored)
    hand.close()
    oracle = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        weights = oracle(torch.tensor([mixed.tokens]), output_attentions=True).attentions[0][0]
    wanted = weights[:, row.start + asking][:, :, positions].sum((0, 1)).numpy()
    assert wanted.sum() > 0.1
    np.testing.assert_allclose(masses, wanted, atol=1e-4 if bits == (16, 16) else 0.05)


def test_the_probed_layer_is_near_two_thirds_of_the_depth():
    assert [asked_layer([0] * count) for count in (1, 2, 3, 4, 30)] == [0, 1, 2, 2, 20]
    assert asked_layer([24, 24, 0, 24, 24, 0]) == 5
    assert asked_layer([24, 0, 24, 24]) == 1
    assert asked_layer([24] * 6) == 4


def test_keys_normed_after_rope_are_not_moved(tmp_path):
    hand = Hand(save_tiny_model("hunyuan_v1_dense", tmp_path))
    refusals = (
        hand.runner.moved_keys_refusal,
        moved_keys_refusal(EngineConfig(), Checkpoint.open(tmp_path).config, "cpu"),
    )
    assert all("norms queries and keys after RoPE" in str(refusal) for refusal in refusals)
    stored = hand.stored(random_ids(40, 5))
    moved = Pieces(SIZE, hand.take)
    moved.own(32)
    moved.run(stored.table, 16, 16)
    with pytest.raises(ConfigError, match="hunyuan_v1_dense"):
        hand.forward([moved.own(4)], [random_ids(52, 6)])
    hand.close()
