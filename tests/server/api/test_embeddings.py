"""Tests of /v1/embeddings, /v1/rerank and Ollama's /api/embed with clients of these APIs against the
engine, and of rejected input.
"""

import base64
from functools import partial

import numpy as np
import ollama
import openai
import pytest
from pydantic import TypeAdapter
from tokenizers import AddedToken, Tokenizer

from helpers.models.embedding_models import DENSE, make_embedding_model, save_bidirectional_model
from helpers.models.tiny_checkpoints import VOCAB_SIZE, save_tiny_checkpoint
from helpers.models.tiny_models import build_tiny_model
from helpers.onnx.blocks import Form
from helpers.onnx.concat import ConcatDecoder
from helpers.onnx.writer import write_onnx
from helpers.server.live_servers import ENGINE_OPTIONS, serving, wait_until
from kvboost_edge import CPUPagedEngine
from kvboost_edge.server.api.bounds import COUNTS
from kvboost_edge.server.response_types import EmbeddingResponse, RerankResponse

HIDDEN = 64
TEXTS = ["How are you?", "A cat sat on a mat. " * 8, "x"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Server of a tiny model whose tokenizer has the tokens of a reranking prompt."""
    path = save_tiny_checkpoint(
        "qwen3", tmp_path_factory.mktemp("model"), max_position_embeddings=2048
    )
    add_reranker_tokens(path / "tokenizer.json")
    with (
        CPUPagedEngine.from_pretrained(path, **ENGINE_OPTIONS) as engine,
        serving(engine) as server,
    ):
        yield server


def add_reranker_tokens(path):
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<|im_start|>", "<|im_end|>")]
    )
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False) for text in ("yes", "no", "<think>", "</think>")]
    )
    tokenizer.save(str(path))


@pytest.fixture(scope="module")
def openai_client(server):
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


def name_of(server):
    return str(server.state.model_name)


@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_openais_client_gets_the_vectors_of_the_engine(server, openai_client, encoding):
    expected = server.engine.embed(TEXTS)
    given = {} if encoding is None else {"encoding_format": encoding}
    answer = openai_client.embeddings.create(model=name_of(server), input=TEXTS, **given)
    rows = [item.embedding for item in answer.data]
    if encoding == "base64":
        rows = [np.frombuffer(base64.b64decode(row), "<f4") for row in rows]
    assert (np.array(rows, np.float32) == expected).all()
    assert [item.index for item in answer.data] == [0, 1, 2]
    tokens = sum(len(server.engine.tokenizer.encode(text)) for text in TEXTS)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)


def test_every_input_form_and_dimensions_are_answered(server, client):
    ids = server.engine.tokenizer.encode(TEXTS[0])
    expected = server.engine.embed([ids], 5)
    for given in (TEXTS[0], [TEXTS[0]], ids, [ids]):
        answer = client.post(
            "/v1/embeddings", json={"input": given, "dimensions": 5, "user": "me"}
        ).json()
        TypeAdapter(EmbeddingResponse).validate_python(answer, strict=True)
        assert (np.array([answer["data"][0]["embedding"]], np.float32) == expected).all()


def test_the_maximum_number_of_inputs_is_answered_in_order(server, client):
    most = int(COUNTS["inputs"].high)
    inputs = [[1 + number % 200, 2 + number // 200] for number in range(most)]
    answer = client.post(
        "/v1/embeddings", json={"input": inputs, "encoding_format": "base64"}, timeout=300
    ).json()
    assert answer["usage"]["prompt_tokens"] == 2 * most
    found = np.stack(
        [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in answer["data"]]
    )
    some = [0, 1, 777, most - 1]
    assert (found[some] == server.engine.embed([inputs[number] for number in some])).all()
    assert server.idle()


@pytest.fixture(scope="module")
def ollama_client(server):
    client = ollama.Client(server.base_url)
    yield client
    client.close()


def test_ollamas_client_gets_the_vectors_of_the_engine(server, ollama_client):
    name = name_of(server)
    expected = server.engine.embed(TEXTS)
    answer = ollama_client.embed(name, TEXTS, options={"temperature": 0})
    assert (np.array(answer.embeddings, np.float32) == expected).all()
    assert answer.prompt_eval_count == sum(
        len(server.engine.tokenizer.encode(text)) for text in TEXTS
    )
    assert (answer.model, answer.total_duration > 0) == (name, True)
    few = ollama_client.embed(f"{name}:latest", TEXTS[0], dimensions=5)
    assert (
        np.array(few.embeddings, np.float32) == server.engine.embed(TEXTS[:1], dimensions=5)
    ).all()
    older = ollama_client.embeddings(name, TEXTS[1])
    assert (np.array(older.embedding, np.float32) == expected[1]).all()


def test_ollamas_truncate_cuts_off_the_end_of_long_texts(server, client):
    long = "A cat sat on a mat. " * 200
    ids = server.engine.tokenizer.encode(long)
    body = {"model": name_of(server), "input": [long, "x"]}
    for num_ctx, length in ((None, 2048), (20, 20), (10_000, 2048)):
        cut = {**body, "truncate": True, "options": {"num_ctx": num_ctx}}
        answer = client.post("/api/embed", json=cut).json()
        expected = server.engine.embed([ids[:length], "x"])
        assert (np.array(answer["embeddings"], np.float32) == expected).all()
        assert answer["prompt_eval_count"] == length + len(server.engine.tokenizer.encode("x"))
    for refused in ({}, {"truncate": False}):
        answer = client.post("/api/embed", json={**body, **refused})
        assert (answer.status_code, "context of 2048" in answer.json()["error"]) == (400, True)


@pytest.mark.parametrize(
    ("save", "num_end"),
    [(partial(save_tiny_checkpoint, "qwen3"), 0), (save_bidirectional_model, 1)],
)
def test_ollamas_truncate_cuts_texts_to_a_pool_smaller_than_the_context(tmp_path, save, num_end):
    with (
        CPUPagedEngine.from_pretrained(
            save(tmp_path), **ENGINE_OPTIONS | {"num_blocks": 4}
        ) as engine,
        serving(engine) as server,
        server.client() as client,
    ):
        ids = engine.tokenizer.encode(TEXTS[1])
        end = ids[len(ids) - num_end :]  # the token that the tokenizer adds
        size = 4 * engine.config.block_size
        assert size < len(ids) < engine.runner_info.max_context
        body = {"model": name_of(server), "input": [TEXTS[1], "x"]}
        for num_ctx, length in ((None, size), (20, 20), (10_000, size)):
            cut = {**body, "truncate": True, "options": {"num_ctx": num_ctx}}
            answer = client.post("/api/embed", json=cut)
            assert answer.status_code == 200, answer.text
            expected = engine.embed([ids[: length - num_end] + end, "x"])
            assert (np.array(answer.json()["embeddings"], np.float32) == expected).all()
        answer = client.post("/api/embed", json=body)
        assert (answer.status_code, "the pool has only 4" in answer.json()["error"]) == (400, True)


def test_truncated_texts_keep_the_tokens_that_the_tokenizer_adds(tmp_path):
    path = make_embedding_model(save_tiny_checkpoint("qwen3", tmp_path), begins=True)
    with (
        CPUPagedEngine.from_pretrained(path, **ENGINE_OPTIONS) as engine,
        serving(engine) as server,
        server.client() as client,
    ):
        name = name_of(server)
        ids = engine.tokenizer.encode(TEXTS[1])
        body = {"model": name, "input": TEXTS[1], "truncate": True}
        answer = client.post("/api/embed", json={**body, "options": {"num_ctx": 9}}).json()
        expected = engine.embed([[*ids[:8], ids[-1]]])
        assert (np.array(answer["embeddings"], np.float32) == expected).all()
        shown = client.post("/api/show", json={"model": name}).json()
        assert shown["capabilities"] == ["embedding"]


@pytest.mark.parametrize(
    ("path", "body", "answer"),
    [
        *(
            ("/api/embed", body, {"embeddings": [], "prompt_eval_count": 0})
            for body in ({}, {"input": ""}, {"input": []}, {"input": None, "dimensions": 0})
        ),
        *(("/api/embeddings", body, {"embedding": []}) for body in ({}, {"prompt": ""})),
    ],
)
def test_ollamas_request_without_a_text_gets_no_vector(server, client, path, body, answer):
    found = client.post(path, json={"model": name_of(server), **body})
    assert (found.status_code, answer.items() <= found.json().items()) == (200, True)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        *(
            ("/api/embed", {"input": given}, "must be a string or a list of strings")
            for given in (5, [1], [["a"]], {"a": 1}, False, 0)
        ),
        ("/api/embed", {"input": ["a", ""]}, "input 1 has 0 characters"),
        ("/api/embed", {"input": ["a"] * 2049}, "must hold 1..2048 inputs"),
        ("/api/embed", {"input": "a", "dimensions": HIDDEN + 1}, "must be in 1..64"),
        ("/api/embed", {"input": "a", "stream": True}, "stream"),
        ("/api/embeddings", {"prompt": "A cat sat on a mat. " * 200}, "context of 2048"),
        ("/api/embeddings", {"prompt": ["a"]}, "prompt"),
    ],
)
def test_ollamas_invalid_input_is_refused_by_name(server, client, path, body, message):
    answer = client.post(path, json={"model": name_of(server), **body})
    assert (answer.status_code, message in answer.json()["error"]) == (400, True), answer.text


BAD = [
    ({"input": ""}, "input", "input 0 has 0 characters"),
    ({"input": ["a", ""]}, "input", "input 1 has 0 characters"),
    ({"input": []}, "input", "must hold 1..2048 inputs, not 0"),
    ({"input": ["a"] * 8193}, "input", "must hold 1..2048 inputs, not 8193"),
    ({"input": ["a"] * 2049}, "input", "must hold 1..2048 inputs, not 2049"),
    ({"input": [[]]}, "input", "input 0 has 0 token ids"),
    ({"input": [VOCAB_SIZE]}, "input", f"token 0 of the prompt is {VOCAB_SIZE}"),
    ({"input": [-1]}, "input", ""),
    ({"input": [1, "a"]}, "input", ""),
    ({"input": 5}, "input", "must be a string, a list"),
    ({"input": [[1] * 2049]}, "input", "2049 tokens are more than the model's context of 2048"),
    ({"input": "a", "dimensions": 0}, "dimensions", ""),
    ({"input": "a", "dimensions": HIDDEN + 1}, "dimensions", "must be in 1..64"),
    ({"input": "a", "dimensions": 2**20}, "dimensions", ""),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format", ""),
    ({"input": "a", "colour": 1}, "colour", ""),
    ({}, "input", ""),
]


@pytest.mark.parametrize(
    ("body", "param", "message"), BAD, ids=[f"{n}-{one[1]}" for n, one in enumerate(BAD)]
)
def test_invalid_input_is_refused_by_name(client, body, param, message):
    answer = client.post("/v1/embeddings", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert message in error["message"]


def test_an_unknown_model_returns_404(client):
    for path, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/rerank", {"query": "q", "documents": ["d"]}),
    ):
        assert client.post(path, json={**body, "model": "other"}).status_code == 404


def test_a_bidirectional_model_serves_embeddings_only(tmp_path):
    path = save_bidirectional_model(tmp_path)
    with (
        CPUPagedEngine.from_pretrained(path, weights="f32") as engine,
        serving(engine) as server,
        server.client() as client,
    ):
        before = engine.paged_stats()
        answer = client.post("/v1/embeddings", json={"input": TEXTS})
        TypeAdapter(EmbeddingResponse).validate_json(answer.content, strict=True)
        rows = np.array([item["embedding"] for item in answer.json()["data"]], np.float32)
        assert (rows == engine.embed(TEXTS)).all()
        assert rows.shape == (len(TEXTS), DENSE[-1])
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert {
            engine.paged_stats()[name] == before[name]
            for name in ("used_blocks", "hit_tokens", "miss_tokens")
        } == {True}
        wide = client.post("/v1/embeddings", json={"input": "a", "dimensions": DENSE[-1] + 1})
        assert (wide.status_code, wide.json()["error"]["param"]) == (400, "dimensions")
        user = [{"role": "user", "content": "hello"}]
        for path_, body, param in (
            ("/v1/chat/completions", {"messages": user}, None),
            ("/v1/completions", {"prompt": "hello"}, None),
            ("/v1/rerank", {"query": "q", "documents": ["d"]}, "documents"),
        ):
            refused = client.post(path_, json=body)
            assert refused.status_code == 400, refused.text
            assert (
                "embedding model (according to 1_Pooling/config.json)"
                in refused.json()["error"]["message"]
            )
            assert param is None or refused.json()["error"]["param"] == param


def test_the_onnx_runner_refuses_embeddings_and_names_the_native_runner(tmp_path):
    model = write_onnx(build_tiny_model("llama"), tmp_path / "m", Form(concat=True), ConcatDecoder)
    with (
        CPUPagedEngine.from_pretrained(model, runner="onnx") as engine,
        serving(engine) as server,
        server.client() as client,
    ):
        answer = client.post("/v1/embeddings", json={"input": "hello"})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "input"
        assert (
            "runner 'onnx' does not return hidden states for embeddings; use runner='native'"
            in answer.json()["error"]["message"]
        )


def test_documents_are_ranked_by_the_scores_of_the_engine(server, client):
    documents = ["Paris", "A cat sat", "Bread and butter"]
    scores = server.engine.rerank("capital?", documents)
    order = sorted(range(3), key=lambda index: -scores[index])
    body = {
        "query": "capital?",
        "documents": ["Paris", {"text": "A cat sat"}, documents[2]],
        "return_documents": True,
    }
    answer = client.post("/v1/rerank", json=body).json()
    TypeAdapter(RerankResponse).validate_python(answer, strict=True)
    expected = [
        {"index": i, "relevance_score": scores[i], "document": {"text": documents[i]}}
        for i in order
    ]
    assert answer["results"] == expected
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    few = client.post(
        "/v1/rerank", json={"query": "capital?", "documents": documents, "top_n": 2}
    ).json()
    assert few["results"] == [{"index": i, "relevance_score": scores[i]} for i in order[:2]]


BAD_RANKS = [
    ({"query": "", "documents": ["d"]}, "query"),
    ({"query": "q", "documents": []}, "documents"),
    ({"query": "q", "documents": ["d"] * 1025}, "documents"),
    ({"query": "q", "documents": ["d", ""]}, "documents"),
    ({"query": "q", "documents": [{"title": "d"}]}, "documents"),
    ({"query": "q", "documents": ["d"], "top_n": 0}, "top_n"),
    ({"query": "q", "documents": ["d" * 4000]}, "documents"),
]


@pytest.mark.parametrize(("body", "param"), BAD_RANKS)
def test_an_invalid_rerank_request_is_refused_by_name(client, body, param):
    answer = client.post("/v1/rerank", json=body)
    assert (answer.status_code, answer.json()["error"]["param"].split(".")[0]) == (400, param)


@pytest.mark.parametrize("name", ["max_tokens_per_doc", "max_chunks_per_doc"])
def test_a_limit_of_the_documents_is_refused_with_advice(client, name):
    answer = client.post("/v1/rerank", json={"query": "q", "documents": ["d"], name: 512})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, name)
    assert "documents are never truncated; shorten them" in error["message"]


def test_a_disconnect_cancels_the_remaining_inputs(server):
    inputs = [[number + 1] * 1000 for number in range(16)]
    with server.connect() as socket:
        socket.sendall(server.request_bytes("/v1/embeddings", {"input": inputs}))
        wait_until(lambda: server.engine.num_running() > 0, "the first inputs")
    wait_until(server.idle, "abandoned requests to end")
    assert server.state.admission.sequences == 0
