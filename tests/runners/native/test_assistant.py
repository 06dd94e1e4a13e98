"""Gemma 4 assistants on the native runner: the states and logits of transformers."""

import numpy as np
import pytest
import torch

from helpers.distance import distance
from helpers.models.assistants import (
    TARGETS,
    build_assistant,
    lends_kv,
    save_assistant,
    save_pair,
    write_gguf_assistant,
)
from helpers.models.tiny_models import build_tiny_model, save_tiny_model
from kvboost_edge.backends import cpu, reference
from kvboost_edge.backends.base import BatchLayout
from kvboost_edge.errors import ConfigError
from kvboost_edge.models.assistant import AssistantFiles
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.runners.base import ForwardBatch, LoadOptions
from kvboost_edge.runners.native.mtp_head import load_mtp_head
from kvboost_edge.runners.native.runner import NativeRunner

TOKENS = np.random.default_rng(2).integers(0, 256, 61).tolist()
BLOCK = 16
TABLE = (5, 3, 2, 1)
WINDOW = 24

pytestmark = pytest.mark.usefixtures("one_torch_thread")


class Pair:
    """A model and its assistant over one pool, and a sequence in the blocks of TABLE."""

    def __init__(self, path, own, weights="f32", *, bits=(16, 16), made=cpu.make, num_threads=1):
        target = Checkpoint.open(path)
        self.model = NativeRunner.from_dir(
            target, weights=weights, num_threads=num_threads, kv_bits=bits
        )
        self.backend = made(
            self.model.info.kv_spec, 6, device="cpu", num_threads=num_threads, num_open=6
        )
        options = LoadOptions(weights, "auto", "cpu", num_threads, BLOCK, bits)
        assistant = AssistantFiles(Checkpoint.open(own), target, weights)
        self.runner = load_mtp_head(assistant, self.model, options)
        self.model.bind(self.backend)
        self.runner.bind(self.backend)

    def fill(self, tokens):
        """Compute tokens from the first one on, and return their states and logits."""
        count = len(tokens)
        rows = np.arange(count)
        slots = np.array([TABLE[place // BLOCK] * BLOCK + place % BLOCK for place in range(count)])
        states = np.empty((count, self.model.info.hidden_size), np.float32)
        batch = ForwardBatch(
            np.array(tokens, np.int64),
            rows,
            _layout([count], [0, count], slots),
            rows,
            rows,
            states,
        )
        return states, self.model.forward(batch).copy()

    def step(self, tokens, states, lengths):
        """States and logits of a row for each token, after the first `lengths` tokens."""
        count = len(tokens)
        rows = np.arange(count)
        layout = _layout(lengths, list(range(count + 1)), np.zeros(count, np.int64), stores=False)
        out = np.empty((count, self.runner.info.hidden_size), np.float32)
        batch = ForwardBatch(
            np.array(tokens, np.int64),
            np.array(lengths, np.int64),
            layout,
            rows,
            rows,
            out,
            joined=np.asarray(states, np.float32),
        )
        return out, self.runner.forward(batch).copy()

    def close(self):
        self.runner.close()
        self.model.close()
        self.backend.close()


def _layout(lengths, starts, slots, **fields):
    return BatchLayout(
        cu_seqlens_q=np.array(starts, np.int32),
        seq_lens=np.array(lengths, np.int32),
        block_tables=np.array([TABLE] * len(lengths), np.int32),
        slot_mapping=slots,
        **fields,
    )


class Reference:
    """transformers' model and assistant. fields: of the assistant's config."""

    def __init__(self, name, **fields):
        with lends_kv():
            self.model = build_tiny_model(name)
        self.assistant = build_assistant(name, **fields)

    def trunk(self, tokens):
        """The last states [tokens, size], and the KV that the assistant reads."""
        with torch.no_grad():
            out = self.model(
                torch.tensor([tokens]),
                output_hidden_states=True,
                return_shared_kv_states=True,
                use_cache=False,
            )
        return out.hidden_states[-1][0], out.shared_kv_states

    def step(self, token, state, kv, length):
        """State and logits of a row after the first `length` tokens."""
        # A query at position `length` sees the keys from `length` - window + 1 on.
        first = {"full_attention": 0, "sliding_attention": max(0, length - WINDOW + 1)}
        seen = {
            kind: tuple(part[:, :, first[kind] : length] for part in parts)
            for kind, parts in kv.items()
        }
        with torch.no_grad():
            embedding = self.model.get_input_embeddings()(torch.tensor([[token]]))
            out = self.assistant(
                inputs_embeds=torch.cat([embedding, state.reshape(1, 1, -1)], dim=-1),
                position_ids=torch.tensor([[length]]),
                shared_kv_states=seen,
            )
        return out.last_hidden_state[0, 0], out.logits[0, 0]


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("form", ["safetensors", "GGUF", "reference"])
def test_a_draft_equals_that_of_transformers(name, form, tmp_path):
    expected_by = Reference(name)
    path, own = save_pair(name, tmp_path)
    if form == "GGUF":
        own = write_gguf_assistant(own, tmp_path / "own.gguf")
    pair = Pair(path, own, made=reference.make if form == "reference" else cpu.make)
    found, _ = pair.fill(TOKENS)
    states, kv = expected_by.trunk(TOKENS)
    assert distance(found, states.numpy()) < 1e-4
    # Within the window, at a block's end, and beyond the window. Then each step's own state.
    for length in (1, 16, 17, WINDOW, 40, 61):
        token = 7 * length % 256
        own = expected = states[length - 1]
        own = own.numpy()
        for _ in range(3):
            found, logits = pair.step([token], [own], [length])
            expected, wanted = expected_by.step(token, expected, kv, length)
            assert distance(found[0], expected.numpy()) < 1e-3
            assert distance(logits[0], wanted.numpy()) < 1e-3
            own = found[0]
            token = int(wanted.argmax())
    pair.close()


@pytest.mark.parametrize("form", ["safetensors", "GGUF"])
def test_an_assistant_with_clusters_computes_all_logits(form, tmp_path):
    """transformers computes those of the tokens in the most likely clusters, and gives all others
    the same lower one.
    """
    clusters = {
        "use_ordered_embeddings": True,
        "num_centroids": 20,
        "centroid_intermediate_top_k": 6,
    }
    expected_by = Reference("gemma4", **clusters)
    path = save_tiny_model("gemma4", tmp_path / "model")
    own = save_assistant("gemma4", tmp_path / "assistant", **clusters)
    if form == "GGUF":
        own = write_gguf_assistant(own, tmp_path / "own.gguf")
    pair = Pair(path, own)
    pair.fill(TOKENS)
    states, kv = expected_by.trunk(TOKENS)
    for length in (1, 17, 61):
        _, (found,) = pair.step([9], [states[length - 1].numpy()], [length])
        _, wanted = expected_by.step(9, states[length - 1], kv, length)
        wanted = wanted.numpy()
        likely = wanted > wanted.min()
        assert likely.sum() == 6 * (len(wanted) // 20)
        assert distance(found[likely], wanted[likely]) < 1e-3
    pair.close()


@pytest.mark.parametrize(("bits", "most"), [((8, 8), 0.1), ((8, 4), 0.6), ((4, 4), 1.0)])
@pytest.mark.parametrize("made", [cpu.make, reference.make])
def test_quantized_kv_is_read_without_writing_it(bits, most, made, tmp_path):
    path, own = save_pair("gemma4", tmp_path)
    exact = Pair(path, own)
    states, _ = exact.fill(TOKENS)
    pair = Pair(path, own, bits=bits, made=made)
    pair.fill(TOKENS)
    before = pair.backend.checksum_blocks(TABLE)
    _, wanted = exact.step([9], states[-1:], [61])
    for _ in range(2):
        _, found = pair.step([9], states[-1:], [61])
        assert 1e-6 < distance(found, wanted) < most
    assert pair.backend.checksum_blocks(TABLE) == before
    with pytest.raises(ConfigError, match=r"blocks \[2\] are not open"):
        pair.step([9], states[:1], [48])
    exact.close()
    pair.close()


def test_rows_do_not_depend_on_the_batch_or_the_number_of_threads(tmp_path):
    path, own = save_pair("gemma4", tmp_path)
    for weights in ("bf16", "int8", "int4"):
        alone = Pair(path, own, weights)
        states, _ = alone.fill(TOKENS)
        lengths = [3, 16, 40, 61]
        rows = [states[length - 1] for length in lengths]
        found = [alone.step([7], [row], [n]) for row, n in zip(rows, lengths, strict=True)]
        pair = Pair(path, own, weights, num_threads=2)
        pair.fill(TOKENS)
        together = pair.step([7] * 4, rows, lengths)
        for part, one in zip(together, zip(*found, strict=True), strict=True):
            np.testing.assert_array_equal(part, np.concatenate(one))
        alone.close()
        pair.close()
