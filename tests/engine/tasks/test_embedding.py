"""Embeddings of texts and scores of documents, against transformers' own states and under any
schedule.
"""

import functools
import json
import logging
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from helpers.gguf.writer import write_gguf
from helpers.models.embedding_models import HIDDEN, make_embedding_model
from helpers.models.tiny_checkpoints import EOS_ID, VOCAB_SIZE, save_tiny_checkpoint
from helpers.models.tiny_models import build_tiny_model, save_tiny_model
from helpers.raising import assert_raises
from kvboost_edge import CPUPagedEngine
from kvboost_edge.errors import KVBoostError, RequestError
from kvboost_edge.server.work.engine_warmup import prepare

RNG = np.random.default_rng(3)
STEM = RNG.integers(0, 250, 40).tolist()
TEXTS = [STEM[:16] + RNG.integers(0, 250, length).tolist() for length in (1, 3, 17, 40, 90)] + [
    STEM,
    [7],
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return save_tiny_model("qwen3", tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_embedding_model(save_tiny_model("qwen3", tmp_path_factory.mktemp("embedding")))


def load(path, **options):
    options = {"runner": "native", "weights": "f32", "num_blocks": 64, "num_threads": 1, **options}
    return CPUPagedEngine.from_pretrained(path, **options)


@pytest.fixture(scope="module")
def engine(model):
    with load(model) as engine:
        yield engine


@functools.cache
def reference_model():
    return build_tiny_model("qwen3").model


def states_of(ids):
    """Return transformers' states after the last norm, float32 [num_tokens, hidden]."""
    with torch.inference_mode():
        return reference_model()(torch.tensor([list(ids)])).last_hidden_state[0].numpy()


def unit(vector):
    return vector / np.linalg.norm(vector)


def test_last_token_pooling_equals_transformers(engine):
    found = engine.embed(TEXTS)
    assert found.shape == (len(TEXTS), HIDDEN)
    assert found.dtype == np.float32
    expected = np.stack([unit(states_of(ids)[-1]) for ids in TEXTS])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    lengths = engine.embed(TEXTS, normalize=False)
    np.testing.assert_allclose(
        lengths, np.stack([states_of(ids)[-1] for ids in TEXTS]), rtol=0, atol=1e-4
    )


def test_texts_get_the_tokenizers_eos_and_ids_are_unchanged(engine):
    ids = [*b"hello", EOS_ID]
    assert engine.tokenizer.encode("hello")[-1] == EOS_ID
    text, same, without = engine.embed(
        ["hello", engine.tokenizer.encode("hello"), engine.tokenizer.encode("hello")[:-1]]
    )
    assert len(ids) == len(engine.tokenizer.encode("hello"))
    assert (text == same).all()
    assert not np.allclose(text, without, atol=1e-2)


def test_mean_pooling_includes_cached_tokens(tmp_path):
    path = make_embedding_model(save_tiny_model("qwen3", tmp_path), "mean_tokens")
    with load(path, max_batch_tokens=32) as engine:
        cold = engine.embed(TEXTS)
        expected = np.stack([unit(states_of(ids).mean(axis=0)) for ids in TEXTS])
        np.testing.assert_allclose(cold, expected, rtol=0, atol=1e-4)
        assert (engine.embed(TEXTS) == cold).all()


def test_fewer_dimensions_are_truncated_and_normalized(engine):
    whole = engine.embed(TEXTS[:2], normalize=False)
    few = engine.embed(TEXTS[:2], dimensions=8)
    np.testing.assert_allclose(few, np.stack([unit(row[:8]) for row in whole]), atol=1e-6)


@pytest.mark.parametrize("weights", ["f32", "int8", "int4"])
def test_embeddings_are_bit_equal_alone_batched_cached_and_chunked(model, weights):
    with load(model, weights=weights) as engine:
        alone = np.concatenate([engine.embed([ids], mode="baseline") for ids in TEXTS])
        assert (engine.embed(TEXTS) == alone).all()
        handles = []
        assert (engine.embed(TEXTS, handles=handles) == alone).all()
        assert sum(handle.result().cached_tokens for handle in handles) > 100
    with load(
        model, weights=weights, max_batch_tokens=16, num_threads=2, debug_checks=True
    ) as engine:
        assert (engine.embed(TEXTS) == alone).all()


def test_embeddings_are_bit_equal_during_answers_and_scores(plain):
    with load(plain, weights="int8") as engine:
        expected = engine.embed(TEXTS, mode="baseline")
        answer = engine.generate(STEM, 30, mode="baseline", ignore_eos=True).output_token_ids
        handles = [
            engine.submit(STEM[:n] + STEM, max_new_tokens=30, ignore_eos=True) for n in (0, 5, 9)
        ]
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(engine.embed, [TEXTS] * 3))
        assert all((vectors == expected).all() for vectors in found)
        assert handles[0].result().output_token_ids == answer


def test_embeddings_are_bit_equal_in_a_small_pool(plain):
    texts = [RNG.integers(0, 250, 60).tolist() for _ in range(6)]
    with load(plain, weights="int8") as engine:
        expected = engine.embed(texts, mode="baseline")
    with load(plain, weights="int8", num_blocks=10, max_num_seqs=4, max_batch_tokens=16) as engine:
        running = [
            engine.submit(text, max_new_tokens=60, ignore_eos=True) for text in (STEM, STEM[::-1])
        ]
        handles = []
        assert (engine.embed(texts, handles=handles) == expected).all()
        preemptions = [handle.result().preemptions for handle in (*running, *handles)]
        assert sum(preemptions) > 0


def test_texts_share_their_instruction_prefix(engine):
    instruction = RNG.integers(0, 250, 64).tolist()
    handles = []
    engine.embed(
        [[*instruction, 1, 2, number] for number in range(6)], handles=handles, cache_salt="own"
    )
    assert sum(handle.result().cached_tokens for handle in handles) == 5 * 64


def test_a_checkpoint_without_prefix_and_head_gives_the_same_embeddings(model, engine, tmp_path):
    for file in model.rglob("*.json"):
        (tmp_path / file.relative_to(model)).parent.mkdir(exist_ok=True)
        (tmp_path / file.relative_to(model)).write_bytes(file.read_bytes())
    tensors = load_file(model / "model.safetensors")
    tensors.pop("lm_head.weight")
    save_file(
        {name.removeprefix("model."): value for name, value in tensors.items()},
        tmp_path / "model.safetensors",
    )
    with load(tmp_path) as other:
        assert (other.embed(TEXTS) == engine.embed(TEXTS)).all()


def test_embeddings_of_a_chat_model_warn_once_with_the_pooling(plain, caplog):
    with load(plain) as engine, caplog.at_level(logging.WARNING):
        for _ in range(2):
            engine.embed(TEXTS[:1])
    assert [
        record.getMessage() for record in caplog.records if "pooling 'last'" in record.getMessage()
    ] != []
    assert sum("pooling 'last'" in record.getMessage() for record in caplog.records) == 1


def test_an_embedding_model_refuses_generation(engine):
    with pytest.raises(
        RequestError, match=r"embedding model \(according to 1_Pooling/config.json\)"
    ):
        engine.generate("hello")
    assert_raises(RequestError, "embedding model", engine.rerank, "question", ["answer"])


BAD = [
    ({"texts": ["a", ""]}, "input 1: the prompt is empty"),
    ({"texts": ["a", []]}, "input 1: the prompt is empty"),
    ({"texts": [[1, VOCAB_SIZE]]}, f"token 1 of the prompt is {VOCAB_SIZE}"),
    ({"texts": [[-1]]}, "token 0 of the prompt is -1"),
    ({"texts": [[1] * 600]}, "600 tokens are more than the model's context of 512"),
    ({"texts": "a"}, "texts must be a list, not str"),
    ({"texts": ["a"], "dimensions": 0}, r"dimensions=0 must be in 1..64"),
    ({"texts": ["a"], "dimensions": HIDDEN + 1}, r"dimensions=65 must be in 1..64"),
    ({"texts": ["a"], "dimensions": True}, "dimensions=True must be an integer"),
    ({"texts": ["a"], "normalize": 1}, "normalize=1"),
    ({"texts": ["a"], "colour": 1}, "unknown option 'colour'"),
    ({"texts": ["a"], "mode": "chunk_kv_reuse"}, "approximate"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[message[:30] for _, message in BAD])
def test_invalid_input_is_refused_by_name(engine, arguments, message):
    assert_raises(RequestError, message, engine.embed, **arguments)


def test_a_cancelled_input_ends_the_call(engine):
    class Cancelling(list):
        def append(self, handle):
            super().append(handle)
            handle.cancel()

    with pytest.raises(KVBoostError, match="cancelled"):
        engine.embed([RNG.integers(0, 250, 400).tolist() for _ in range(4)], handles=Cancelling())


def test_an_empty_list_gives_an_empty_array(engine):
    assert engine.embed([]).shape == (0, HIDDEN)


@pytest.fixture(scope="module")
def reranker_files(tmp_path_factory):
    path = save_tiny_checkpoint(
        "qwen3", tmp_path_factory.mktemp("reranker"), max_position_embeddings=1024
    )
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    special = [
        AddedToken(text, special=True, normalized=False) for text in ("<|im_start|>", "<|im_end|>")
    ]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False) for text in ("yes", "no", "<think>", "</think>")]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def reranker(reranker_files):
    with load(reranker_files, num_blocks=256) as engine:
        yield engine


def test_a_rerank_score_is_the_softmax_of_yes_and_no(reranker):
    documents = ["Paris is the capital.", "Bread."]
    tokenizer = reranker.tokenizer
    expected = []
    for document in documents:
        prompt = (
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
            'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
            "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
            f"<Query>: What is the capital?\n<Document>: {document}"
            "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )
        ids = tokenizer.encode(prompt, False)
        row = reranker.logits(ids, len(ids) - 1)[0].astype(np.float64)
        odds = np.exp(
            row[tokenizer.encode("yes", False)[0]] - row[tokenizer.encode("no", False)[0]]
        )
        expected.append(odds / (1 + odds))
    found = reranker.rerank("What is the capital?", documents)
    assert found == pytest.approx(expected, abs=1e-9)
    assert reranker.rerank("What is the capital?", documents, mode="baseline") == found


@pytest.mark.parametrize(
    ("directory", "name", "count"),
    [("chat", None, 1), ("chat", "owner/My-Reranker-0.6B", 0), ("qwen3-RERANKER", None, 0)],
)
def test_reranking_with_another_model_warns_once(
    reranker_files, directory, name, count, tmp_path, caplog
):
    path = tmp_path / directory
    shutil.copytree(reranker_files, path)
    config = json.loads((path / "config.json").read_text())
    config["_name_or_path"] = name
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with load(path, num_blocks=64) as engine, caplog.at_level(logging.WARNING):
        for _ in range(2):
            engine.rerank("q", ["a"])
    assert sum("'rerank'" in record.getMessage() for record in caplog.records) == count


def test_special_tokens_in_a_document_stay_text(reranker):
    handles = []
    reranker.rerank("q", ["a<|im_end|>", "a"], handles=handles)
    tokens = [handle.result().prompt_tokens for handle in handles]
    assert tokens[0] - tokens[1] == len("<|im_end|>")


def test_reranking_needs_the_prompts_tokens(plain, reranker):
    with (
        load(plain) as engine,
        pytest.raises(RequestError, match="reranking needs 'yes' as a single token"),
    ):
        engine.rerank("q", ["d"])
    assert_raises(
        RequestError, "document 1 must be a non-empty string", reranker.rerank, "q", ["d", ""]
    )
    assert_raises(RequestError, "query must be a non-empty string", reranker.rerank, "", ["d"])


TORCH = {"runner": "torch", "weights": "auto", "num_threads": None}


@pytest.mark.parametrize("kind", ["lasttoken", "mean_tokens"])
def test_the_torch_runner_gives_the_same_embeddings(tmp_path, kind):
    path = make_embedding_model(save_tiny_model("qwen3", tmp_path), kind)
    with load(path, **TORCH, max_batch_tokens=64) as engine:
        rows = [
            states_of(ids)[-1] if kind == "lasttoken" else states_of(ids).mean(axis=0)
            for ids in TEXTS
        ]
        expected = np.stack([unit(row) for row in rows])
        np.testing.assert_allclose(engine.embed(TEXTS), expected, rtol=0, atol=1e-4)
        handles = []
        np.testing.assert_allclose(
            engine.embed(TEXTS, handles=handles), expected, rtol=0, atol=1e-4
        )
        assert (sum(handle.result().cached_tokens for handle in handles) > 100) == (
            kind == "lasttoken"
        )
        assert engine.embedding_size == HIDDEN


def test_the_torch_runner_embeds_during_answers_and_restores_its_model(plain):
    with load(plain, **TORCH) as engine:
        alone = engine.generate(STEM, 20, ignore_eos=True).output_token_ids
        handles = [engine.submit(STEM, max_new_tokens=20, ignore_eos=True) for _ in range(2)]
        expected = np.stack([unit(states_of(ids)[-1]) for ids in TEXTS])
        np.testing.assert_allclose(engine.embed(TEXTS), expected, rtol=0, atol=1e-4)
        assert all(handle.result().output_token_ids == alone for handle in handles)
        runner = engine._parts.runner
        assert not any(module._forward_hooks for module in runner.model.modules())


@pytest.mark.parametrize("family", ["granite", "gemma2", "gpt_neox", "starcoder2", "olmoe"])
def test_embeddings_of_other_families_are_the_inputs_of_their_heads(family, tmp_path):
    path = save_tiny_model(family, tmp_path)
    with load(path, **TORCH) as engine, torch.inference_mode():
        states = (
            build_tiny_model(family)
            .base_model(torch.tensor([STEM]))
            .last_hidden_state[0, -1]
            .numpy()
        )
        np.testing.assert_allclose(engine.embed([STEM])[0], unit(states), rtol=0, atol=1e-4)


def test_a_gguf_embedding_model_uses_its_pooling_key(plain, tmp_path):
    with load(write_gguf(plain, tmp_path / "model.gguf", keys={"pooling_type": 1})) as engine:
        expected = np.stack([unit(states_of(ids).mean(axis=0)) for ids in TEXTS])
        np.testing.assert_allclose(engine.embed(TEXTS), expected, rtol=0, atol=1e-4)
        assert_raises(RequestError, "embedding model", engine.generate, "hello")


def test_a_server_starts_with_an_embedding_model(engine):
    prepare(engine, ["hello"], [], [])
