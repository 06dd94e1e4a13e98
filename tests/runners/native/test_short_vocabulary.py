"""Logits of a short vocabulary on the native runner: to the bit, the first columns of all logits."""

import numpy as np
import pytest

from helpers.models.mtp_heads import save_with_head
from helpers.models.tiny_models import save_tiny_model
from kvboost_edge.backends.base import BatchLayout
from kvboost_edge.backends.cpu import CPUBackend
from kvboost_edge.backends.reference import ReferenceBackend
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.runners.base import ForwardBatch, LoadOptions
from kvboost_edge.runners.native.mtp_head import load_mtp_head
from kvboost_edge.runners.native.runner import NativeRunner

SHORT = 100  # not a multiple of a tile's 16 rows
BLOCK = 16
TOKENS = np.random.default_rng(2).integers(0, 256, 40)
# Rows of passes that need logits, and those that need hidden states.
ROWS = [([1, 3], ()), (range(8), ()), ([7], ()), ((), ()), ((), [7]), ([7], [7]), ([2], [5, 7])]

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def passes(runner, backend, rows, states, is_short):
    """Logits and hidden states of five passes over the tokens of a sequence, 8 tokens each."""
    joined = np.random.default_rng(3).standard_normal((40, runner.info.hidden_size))
    found = []
    for start in range(0, 40, 8):
        places = np.arange(start, start + 8)
        batch = ForwardBatch(
            TOKENS[places],
            places,
            BatchLayout(
                cu_seqlens_q=np.array([0, 8], np.int32),
                seq_lens=np.array([start + 8], np.int32),
                block_tables=np.arange(3, dtype=np.int32)[None],
                slot_mapping=places,
            ),
            np.array(rows, np.int64),
            np.array(states, np.int64),
            np.empty((len(states), runner.info.hidden_size if states else 0), np.float32),
            joined=joined[places].astype(np.float32) if runner.info.joins_hidden_states else None,
            is_short=is_short,
        )
        found.append((runner.forward(batch).copy(), batch.hidden_states))
    return found


def assert_prefix(runner, backend):
    runner.bind(backend)
    size = runner.info.vocab_size
    for rows, states in ROWS:
        every = passes(runner, backend, rows, states, is_short=False)
        short = passes(runner, backend, rows, states, is_short=True)
        for (logits, hidden), (own, own_hidden) in zip(every, short, strict=True):
            assert logits.shape == (len(rows), size)
            if len(rows):
                np.testing.assert_array_equal(own, logits[:, :SHORT])
            np.testing.assert_array_equal(own_hidden, hidden)


@pytest.mark.parametrize("weights", ["f32", "int8"])
@pytest.mark.parametrize("name", ["qwen2", "gemma2", "granite"])
def test_short_logits_equal_the_first_of_all(name, weights, tmp_path):
    """A model whose embedding is the LM head, one with a softcap, and one with a logit factor."""
    path = save_tiny_model(name, tmp_path)
    for make in (CPUBackend, ReferenceBackend):
        runner = NativeRunner.from_dir(path, weights=weights, num_threads=1, short_vocabulary=SHORT)
        backend = (
            make(runner.info.kv_spec, 3, num_threads=1)
            if make is CPUBackend
            else make(runner.info.kv_spec, 3)
        )
        assert_prefix(runner, backend)
        runner.close()


def test_short_logits_of_an_mtp_head_equal_the_first_of_all(tmp_path):
    checkpoint = Checkpoint.open(save_with_head("qwen3_5_text", tmp_path))
    model = NativeRunner.from_dir(checkpoint, weights="int8", num_threads=1)
    options = LoadOptions("int8", "auto", "cpu", 1, BLOCK, (16, 16), short_vocabulary=SHORT)
    head = load_mtp_head(checkpoint, model, options)
    assert_prefix(head, CPUBackend(head.info.kv_spec, 3, num_threads=1))
    head.close()
    model.close()
