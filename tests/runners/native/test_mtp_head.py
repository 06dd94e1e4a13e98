"""MTP heads on the native runner: states and logits equal those of the float64 reference."""

import numpy as np
import pytest

from helpers.distance import distance
from helpers.models.mtp_heads import (
    HEADS,
    save_with_head,
    write_gguf_with_head,
    write_head_file,
)
from helpers.oracles.packed_plan import last_states, mtp_model, mtp_states, plan_floats
from kvboost_edge.backends.base import BatchLayout
from kvboost_edge.backends.cpu import CPUBackend
from kvboost_edge.models.assistant import HeadFile
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.runners.base import ForwardBatch, LoadOptions
from kvboost_edge.runners.native.mtp_head import load_mtp_head
from kvboost_edge.runners.native.runner import NativeRunner

TOKENS = np.random.default_rng(2).integers(0, 256, 41).tolist()
BLOCK = 16

pytestmark = pytest.mark.usefixtures("one_torch_thread")


class Head:
    """A head over a separate pool, and the rows of one sequence in the blocks 3, 2 and 1."""

    def __init__(self, path, weights="f32", num_threads=1, file=None):
        """Load the head of a model, or that in a file of its own."""
        checkpoint = Checkpoint.open(path)
        options = LoadOptions(weights, "auto", "cpu", num_threads, BLOCK, (16, 16))
        self.model = NativeRunner.from_dir(checkpoint, weights=weights, num_threads=num_threads)
        head = checkpoint if file is None else HeadFile(Checkpoint.open(file), checkpoint, weights)
        self.runner = load_mtp_head(head, self.model, options)
        self.backend = CPUBackend(self.runner.info.kv_spec, 4, num_threads=num_threads)
        self.runner.bind(self.backend)

    def step(self, start, tokens, states, wanted):
        """Return states and logits of the `wanted` rows. Row i joins the state `states[i]`."""
        places = np.arange(start, start + len(tokens))
        blocks = np.array([[3, 2, 1]], np.int32)
        layout = BatchLayout(
            cu_seqlens_q=np.array([0, len(tokens)], np.int32),
            seq_lens=np.array([start + len(tokens)], np.int32),
            block_tables=blocks,
            slot_mapping=blocks[0, places // BLOCK] * np.int64(BLOCK) + places % BLOCK,
        )
        rows = np.array(wanted, np.int64)
        out = np.empty((len(rows), self.runner.info.hidden_size), np.float32)
        batch = ForwardBatch(
            np.array(tokens, np.int64),
            places,
            layout,
            rows,
            rows,
            out,
            joined=np.asarray(states, np.float32),
        )
        return out, self.runner.forward(batch).copy()

    def close(self):
        self.runner.close()
        self.backend.close()
        self.model.close()


def _reference(path):
    """Return states and logits of the reference, whose first row has no state."""
    head, weights, matrix = mtp_model(path)
    trunk = last_states(*plan_floats(path), TOKENS[:-1])
    rows = np.concatenate([np.zeros_like(trunk[:1]), trunk])
    states = mtp_states(head, weights, rows, TOKENS)
    return rows, states, states @ matrix.T


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("form", ["safetensors", "GGUF"])
def test_a_head_equals_the_reference(name, form, tmp_path):
    path = save_with_head(name, tmp_path / "model")
    if form == "GGUF":
        path = write_gguf_with_head(path, tmp_path / "m.gguf")
    rows, states, logits = _reference(path)
    head = Head(path)
    # One pass, or a pass that only stores KV, one that needs only its last row, and single rows.
    for chunks in ([41], [20, 19, 1, 1]):
        start = 0
        for number, count in enumerate(chunks):
            stop = start + count
            wanted = [[], [count - 1]][number] if len(chunks) > 1 and number < 2 else range(count)
            found, drafted = head.step(start, TOKENS[start:stop], rows[start:stop], wanted)
            places = [start + row for row in wanted]
            if places:
                assert distance(found, states[places]) < 1e-5
                assert distance(drafted, logits[places]) < 1e-5
            start = stop
    head.close()


def test_quantized_heads_are_close_and_equal_in_any_split(tmp_path):
    path = save_with_head("qwen3_5_text", tmp_path)
    rows, _, logits = _reference(path)
    for weights, most in (("bf16", 0.02), ("int8", 0.05), ("int4", 0.4)):
        head = Head(path, weights, num_threads=2)
        whole = head.step(0, TOKENS, rows, range(41))
        assert distance(whole[1], logits) < most
        for start in range(0, 41, 7):
            stop = min(41, start + 7)
            parts = head.step(start, TOKENS[start:stop], rows[start:stop], range(stop - start))
            for part, one in zip(parts, whole, strict=True):
                np.testing.assert_array_equal(part, one[start:stop])
        head.close()


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("weights", ["f32", "int8"])
def test_a_head_in_its_own_file_equals_that_inside_the_whole_file(name, weights, tmp_path):
    model = save_with_head(name, tmp_path / "model")
    whole = write_gguf_with_head(model, tmp_path / "m.gguf")
    alone = write_head_file(model, tmp_path / "head.gguf")
    joined = np.random.default_rng(3).standard_normal((41, 64)).astype(np.float32)
    found = []
    for path, file in ((whole, None), (whole, alone), (model, alone)):
        head = Head(path, weights, file=file)
        found.append(head.step(0, TOKENS, joined, range(41)))
        head.close()
    for ours, of_gguf, of_directory in zip(*found, strict=True):
        np.testing.assert_array_equal(of_gguf, ours)
        assert distance(of_directory, ours) < (1e-6 if weights == "f32" else 1e-3)


@pytest.mark.parametrize("name", ["qwen3_5_text", "glm4_moe"])
def test_own_embeddings_and_lm_heads_are_used(name, tmp_path):
    own = np.random.default_rng(5).standard_normal((300, 64)).astype(np.float32)
    prefix = "mtp." if name == "qwen3_5_text" else "model.layers.3."
    tensors = {f"{prefix}embed_tokens.weight": own}
    if name == "glm4_moe":
        tensors[f"{prefix}shared_head.head.weight"] = own[::-1].copy()
    path = save_with_head(name, tmp_path / "model", own=tensors)
    rows, _, logits = _reference(path)
    head = Head(path)
    _, drafted = head.step(0, TOKENS, rows, range(41))
    assert distance(drafted, logits) < 1e-5
    head.close()


def test_a_head_has_its_own_packed_file(tmp_path, monkeypatch):
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path / "cache"))
    path = save_with_head("qwen3_5_text", tmp_path / "model")
    for _ in range(2):
        Head(path, "int8").close()
        files = list((tmp_path / "cache" / "packed").iterdir())
        assert len(files) == 2
