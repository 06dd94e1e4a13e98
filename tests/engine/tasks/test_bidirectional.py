"""Bidirectional embedding models (EmbeddingGemma): vectors equal those of transformers, and nothing
of them stays in the cache.
"""

import logging
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from helpers.gguf.writer import write_gguf
from helpers.models.embedding_models import DENSE, save_bidirectional_model
from helpers.models.tiny_checkpoints import EOS_ID
from helpers.models.tiny_models import build_tiny_model, save_tiny_model
from helpers.raising import assert_raises
from kvboost_edge import CPUPagedEngine
from kvboost_edge.errors import ConfigError, ModelFormatError, RequestError

RNG = np.random.default_rng(7)
# The window of 24 reaches 12 tokens to either side. The lengths are near it, near blocks of 16 and
# tiles of 64, and far above.
LENGTHS = (1, 2, 11, 12, 13, 14, 16, 25, 63, 64, 65, 130, 500)
TEXTS = [RNG.integers(0, 250, length).tolist() for length in LENGTHS]
UNCHANGED = (
    "used_blocks",
    "cached_blocks",
    "free_blocks",
    "hit_tokens",
    "miss_tokens",
    "tokens_held",
    "evictions",
    "loaded_chunks",
    "cow_copies",
    "pool_bytes",
    "copied_bytes",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_bidirectional_model(tmp_path_factory.mktemp("bidirectional"))


def load(path, **options):
    options = {"weights": "f32", "num_threads": 1, **options}
    return CPUPagedEngine.from_pretrained(path, **options)


@pytest.fixture(scope="module")
def engine(model):
    with load(model) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(model):
    """Vectors from transformers: the mean of bidirectional states, times both matrices, scaled to
    length 1.
    """
    torch_model = build_tiny_model(
        "gemma3", use_bidirectional_attention=True, attn_implementation="eager"
    ).model
    assert torch_model.config.sliding_window == 13
    matrices = [load_file(model / f"{n}_Dense/model.safetensors")["linear.weight"] for n in (2, 3)]
    vectors = []
    for ids in TEXTS:
        with torch.inference_mode():
            states = (
                torch_model(torch.tensor([ids])).last_hidden_state[0].numpy().astype(np.float64)
            )
        vector = matrices[1].astype(np.float64) @ (
            matrices[0].astype(np.float64) @ states.mean(axis=0)
        )
        vectors.append(vector / np.linalg.norm(vector))
    return np.stack(vectors)


def test_embeddings_equal_transformers(engine, expected):
    found = engine.embed(TEXTS)
    assert found.shape == (len(TEXTS), DENSE[-1])
    assert engine.embedding_size == DENSE[-1]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    few = engine.embed(TEXTS, dimensions=8)
    cut = expected[:, :8] / np.linalg.norm(expected[:, :8], axis=1)[:, None]
    np.testing.assert_allclose(few, cut, rtol=0, atol=3e-4)


def test_the_reference_backend_gives_the_same_embeddings(model, expected):
    with load(model, backend="reference") as engine:
        np.testing.assert_allclose(engine.embed(TEXTS[:-2]), expected[:-2], rtol=0, atol=1e-4)


def test_head_sizes_below_a_group_of_32_run_layer_by_layer(tmp_path):
    fields = {"head_dim": 20, "num_attention_heads": 2, "num_key_value_heads": 1}
    path = save_bidirectional_model(tmp_path, dense=(), **fields)
    torch_model = build_tiny_model(
        "gemma3", use_bidirectional_attention=True, attn_implementation="eager", **fields
    )
    with load(path, num_threads=2) as engine, torch.inference_mode():
        states = torch_model.model(torch.tensor([TEXTS[-1]])).last_hidden_state[0].numpy()
        found = engine.embed(TEXTS[-1:], normalize=False)[0]
    np.testing.assert_allclose(found, states.mean(axis=0), rtol=0, atol=1e-4)


@pytest.mark.parametrize("weights", ["f32", "int8", "int4"])
def test_embeddings_are_bit_equal_alone_batched_and_threaded(model, weights):
    with load(model, weights=weights) as engine:
        alone = np.concatenate([engine.embed([ids]) for ids in TEXTS])
        assert (engine.embed(TEXTS) == alone).all()
        assert (engine.embed(TEXTS[::-1])[::-1] == alone).all()
    for options in (
        {"max_batch_tokens": 1},
        {"max_batch_tokens": 4096, "num_threads": 2},
        {"num_blocks": 40},
    ):
        with load(model, weights=weights, debug_checks=True, **options) as engine:
            assert (engine.embed(TEXTS) == alone).all()


def test_concurrent_tenants_get_the_same_embeddings(model, expected):
    calls = [{"tenant": name, "priority": int(name == "c")} for name in "abc"]
    with load(model, max_num_seqs=4) as engine, ThreadPoolExecutor(3) as pool:
        for vectors in pool.map(lambda call: engine.embed(TEXTS, **call), calls):
            np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-4)


def test_embeddings_store_and_hit_nothing(engine):
    before = engine.paged_stats()
    handles = []
    for _ in range(2):
        engine.embed(
            [TEXTS[-1], TEXTS[-1]], handles=handles
        )  # a list that holds some already gets more
    after = engine.paged_stats()
    assert {name: before[name] for name in UNCHANGED} == {name: after[name] for name in UNCHANGED}
    assert (
        after["pool_bytes"]
        == after["bytes_per_block"]
        == after["cached_blocks"]
        == after["used_blocks"]
        == 0
    )
    assert [handle.result().cached_tokens for handle in handles] == [0, 0, 0, 0]


def test_texts_are_encoded_with_special_tokens(engine, model):
    ids = AutoTokenizer.from_pretrained(model)("hello")["input_ids"]
    assert engine.tokenizer.encode("hello") == ids
    assert (engine.embed(["hello"]) == engine.embed([ids])).all()


def test_a_text_is_bounded_by_the_context(engine):
    engine.embed([[1] * 512])
    with pytest.raises(RequestError, match="513 tokens are more than the model's context of 512"):
        engine.embed([[1] * 513])


def test_everything_but_embeddings_is_refused_by_name(engine):
    assert_raises(RequestError, "embedding model", engine.generate, "hello")
    assert_raises(RequestError, "embedding model", engine.rerank, "q", ["d"])
    for call in (
        lambda: engine.warm("hello"),
        lambda: engine.pin("hello"),
        lambda: engine.logits([1, 2]),
    ):
        assert_raises(RequestError, "is bidirectional", call)
    assert_raises(RequestError, "pin=True", engine.embed, ["hello"], pin=True)
    assert "is bidirectional" in str(engine.reuse_refusal)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_cache_bytes": 1 << 20}, ConfigError, "max_cache_bytes has no effect"),
        ({"kv_cache_bits": 8}, ConfigError, "kv_cache_bits"),
        ({"disk_cache_dir": "blocks"}, ConfigError, "disk_cache_dir has no effect"),
        (
            {"runner": "torch", "weights": "auto"},
            ModelFormatError,
            "supports causal models only",
        ),
    ],
)
def test_options_without_effect_are_refused(model, options, error, message):
    assert_raises(error, message, load, model, **options)


def test_a_loaded_bidirectional_transformers_model_is_refused(model):
    with pytest.raises(ModelFormatError, match="supports causal models only"):
        CPUPagedEngine(
            build_tiny_model("gemma3", use_bidirectional_attention=True),
            AutoTokenizer.from_pretrained(model),
        )


def test_a_model_without_pooling_information_is_refused(tmp_path):
    path = save_tiny_model("gemma3", tmp_path, use_bidirectional_attention=True)
    assert_raises(ModelFormatError, "not name the pooling", load, path)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_gguf_file_gives_the_same_embeddings(tmp_path, kind):
    model = save_bidirectional_model(
        tmp_path / "dir", query_pre_attn_scalar=32
    )  # in GGUF it is the size of the heads
    path = write_gguf(model, tmp_path / "model.gguf", kind=kind, keys={"pooling_type": 1})
    with load(model) as engine:
        expected = engine.embed(TEXTS)
    with load(path, weights="f32" if kind == "F32" else "auto") as engine:
        found = engine.embed(TEXTS)
        if kind == "F32":
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
        assert (found * expected).sum(axis=1).min() > 0.97
        assert engine.tokenizer.encode("hello")[-1] == EOS_ID
        with pytest.raises(
            RequestError, match=r"embedding model \(according to key gemma-embedding.pooling_type"
        ):
            engine.generate("hello")


def test_a_gguf_file_names_its_pooling_or_is_refused(model, tmp_path):
    path = write_gguf(model, tmp_path / "bare.gguf", keys={"pooling_type": 1}, dense=False)
    with pytest.raises(
        ModelFormatError,
        match=r"lacks the tensors dense_2.weight, dense_3.weight of the Dense layers",
    ):
        load(path)
    with pytest.raises(ModelFormatError, match="not name the pooling"):
        load(write_gguf(model, tmp_path / "unsaid.gguf"))
    path = write_gguf(
        model, tmp_path / "causal.gguf", keys={"pooling_type": 1, "attention.causal": True}
    )
    with pytest.raises(
        ModelFormatError, match=r"attention\.causal=True contradicts the architecture"
    ):
        load(path)
    path = write_gguf(
        model, tmp_path / "said.gguf", keys={"pooling_type": 1, "attention.causal": False}
    )
    with load(path) as engine:
        assert engine.embedding_size == DENSE[-1]


def test_the_default_sizes_fit_a_batch_of_long_texts(model, caplog):
    with load(model) as engine, caplog.at_level(logging.WARNING):
        engine.embed([[1] * 512 for _ in range(40)])
        assert engine.paged_stats()["preemptions"] == 0
