"""Tests of the small routes: models, tokenize, detokenize, stats, warm, reset, blocks."""

import asyncio
import base64
import json
import threading

import openai
import pytest

from helpers.engine.fake_runner import fake_engine
from helpers.server.live_servers import app_client
from kvboost_edge.server.api.bodies import parse_json
from kvboost_edge.server.app import ROUTERS, create_app
from kvboost_edge.server.settings import ServerSettings

MESSAGES = [{"role": "user", "content": "hello"}]


def test_openai_client_lists_and_retrieves_models(live_server):
    with openai.OpenAI(
        base_url=f"{live_server.base_url}/v1", api_key="none", max_retries=0
    ) as client:
        listed = client.models.list().data
        assert [model.id for model in listed] == ["kvboost-edge/demo"]
        model = client.models.retrieve("kvboost-edge/demo")
        assert model == listed[0]
        assert model.object == "model"
        assert model.model_extra is not None
        assert model.model_extra["max_model_len"] == live_server.engine.runner_info.max_context
        with pytest.raises(openai.NotFoundError) as missing:
            client.models.retrieve("kvboost-edge/other")
        assert missing.value.code == "model_not_found"


async def test_the_advertised_context_fits_into_the_pool(caplog):
    with fake_engine(num_blocks=20, max_context=4000) as engine:
        app = create_app(engine, ServerSettings())
        tokens = 20 * engine.config.block_size
        assert "the pool is smaller than the context" in caplog.text
        async with app_client(app) as client:
            (model,) = (await client.get("/v1/models")).json()["data"]
            props = (await client.get("/props")).json()["default_generation_settings"]
            (slot, *_) = (await client.get("/slots")).json()
            asked = (await client.post("/tokenize", json={"content": "a"})).json()
            shown = [
                model["max_model_len"],
                props["n_ctx"],
                slot["n_ctx"],
                asked["max_model_len"],
            ]
            assert shown == [tokens] * 4
            body = {"prompt": [5], "ignore_eos": True}
            longest = await client.post("/v1/completions", json={**body, "max_tokens": tokens - 1})
            assert longest.status_code == 200
            too_long = await client.post("/v1/completions", json={**body, "max_tokens": 4000})
            assert too_long.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "routes"),
    [
        ("/chat/completions", ["/v1/chat/completions"]),
        ("/v1/v1/chat/completions", ["/v1/chat/completions"]),
        ("/v1/chat/completions/", ["/v1/chat/completions"]),
        ("/models", ["/v1/models"]),
        ("/v1/embedding", ["/v1/embeddings"]),
        ("/xyzzy", []),
    ],
)
async def test_an_unknown_route_returns_similar_routes(tiny_app, path, routes):
    answer = await tiny_app.post(path, json={})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == "not_found"
    meant = error["message"].partition("did you mean ")[2].partition("?")[0]
    assert [one for one in meant.split(" or ") if one][: len(routes) or 1] == routes
    assert "/openapi.json lists the routes" in error["message"]


async def test_apps_share_the_routes(tiny_app):
    """If routes were not shared, the first request to each router would wait until its types are
    rebuilt.
    """
    served = set(map(id, tiny_app.app.router.routes))
    assert served >= {id(route) for router in ROUTERS for route in router.routes}


async def test_tokenize_answers_in_vllms_and_llama_cpps_form(tiny_app, tiny_engine):
    tokenizer = tiny_engine.tokenizer
    text = "Hello, wörld 🙂"
    plain = tokenizer.encode(text, False)
    special = tokenizer.encode(text, True)
    cases = [
        ({"content": text}, plain),
        ({"content": text, "add_special": True}, special),
        ({"prompt": text}, special),
        ({"prompt": text, "add_special_tokens": False}, plain),
        ({"messages": MESSAGES}, tokenizer.encode_chat(MESSAGES)),
        (
            {"messages": MESSAGES, "add_generation_prompt": False},
            tokenizer.encode_chat(MESSAGES, False),
        ),
        ({"content": ""}, []),
    ]
    assert plain != special
    for body, ids in cases:
        answer = (await tiny_app.post("/tokenize", json=body)).json()
        assert (answer["tokens"], answer["count"]) == (ids, len(ids)), body
        assert answer["max_model_len"] == tiny_engine.runner_info.max_context
    with_text = {"content": text, "with_pieces": True, "return_token_strs": True}
    answer = (await tiny_app.post("/tokenize", json=with_text)).json()
    assert [piece["id"] for piece in answer["tokens"]] == plain
    assert answer["token_strs"] == [tokenizer.decode([i]) for i in plain]
    pieces = [piece["piece"] for piece in answer["tokens"]]
    assert b"".join(p.encode() if isinstance(p, str) else bytes(p) for p in pieces) == text.encode()
    partial = [isinstance(piece, list) for piece in pieces]
    assert partial == ["\ufffd" in shown for shown in answer["token_strs"]]
    assert set(partial) == {False, True}


async def test_parse_special_decides_whether_content_may_contain_special_tokens(
    tiny_app, tiny_engine
):
    tokenizer = tiny_engine.tokenizer
    special = max(tokenizer.codec.special_texts()[0], key=len)
    text = f"a{special}b"

    async def ids(**fields):
        answer = await tiny_app.post("/tokenize", json={"content": text, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()["tokens"]

    assert await ids() == await ids(parse_special=True) == tokenizer.encode(text, False)
    plain = await ids(parse_special=False)
    assert tokenizer.codec.token_id(special) not in plain
    assert tokenizer.decode(plain, False) == text


async def test_detokenize_inverts_tokenize(tiny_app, tiny_engine):
    for text in ("Hello, wörld 🙂", ""):
        ids = tiny_engine.tokenizer.encode(text, False)
        answer = (await tiny_app.post("/detokenize", json={"tokens": ids})).json()
        assert answer == {"content": text, "prompt": text}


async def test_invalid_bodies_are_refused_by_name(tiny_app):
    cases = [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": "a", "prompt": "b"}, "prompt"),
        ("/tokenize", {"content": "\ud800"}, "content"),
        ("/tokenize", {"content": 5}, "content"),
        ("/tokenize", {"content": "a", "colour": 1}, "colour"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**7]}, "tokens"),
        ("/detokenize", {"tokens": [2**63]}, "tokens"),
        ("/v1/warm", {}, "text"),
        ("/v1/warm", {"text": ""}, "text"),
        ("/v1/warm", {"text": "a", "messages": MESSAGES}, "text"),
        ("/v1/warm", {"text": "a", "priority": 10**9}, "priority"),
        ("/v1/warm", {"text": "word " * 5000}, "text"),
        ("/tokenize", {"content": "x" * (2**20 + 1)}, "content"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * (2**20 + 1)}]}, "messages"),
        ("/v1/completions", {"prompt": ["a", "x" * (2**20 + 1)]}, "prompt"),
        ("/tokenize", {"content": "\u4e00" * 2**16, "with_pieces": True}, "with_pieces"),
        (
            "/tokenize",
            {"content": "\u4e00" * 2**16, "return_token_strs": True},
            "return_token_strs",
        ),
        ("/detokenize", {"tokens": [1] * (2**18 + 1)}, "tokens"),
        ("/tokenize", {"prompt": "a", "add_special": False}, "add_special"),
        ("/tokenize", {"prompt": "a", "parse_special": True}, "parse_special"),
        (
            "/tokenize",
            {"content": "a", "add_special": True, "parse_special": False},
            "parse_special",
        ),
        ("/tokenize", {"messages": MESSAGES, "add_special": True}, "add_special"),
        ("/tokenize", {"content": "a", "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"content": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "chat_template_kwargs": {}}, "chat_template_kwargs"),
        ("/v1/warm", {"text": "a", "chat_template_kwargs": {}}, "chat_template_kwargs"),
        ("/v1/warm", {"text": "a", "temperature": 1}, "temperature"),
        ("/v1/warm", {"text": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        *(
            ("/v1/warm", {"messages": MESSAGES, name: value}, name)
            for name, value in (
                ("functions", []),
                ("unknown", 1),
                ("chat_template", "x"),
                ("continue_final_message", False),
                ("kvboost", {"context_overflow": "drop_oldest"}),
                ("reasoning_effort", "none"),
            )
        ),
        ("/v1/warm", {"text": "a", "pin": 1}, "pin"),
        ("/v1/warm", {"text": "a", "ttl": 5}, "ttl"),
        ("/v1/warm", {"text": "a", "pin": True, "ttl": 0}, "ttl"),
        ("/v1/warm", {"text": "a", "pin": True, "ttl": 10**10}, "ttl"),
        ("/v1/unpin", {}, "text"),
        ("/v1/unpin", {"text": "a", "priority": 1}, "priority"),
        ("/cache/reset", {"foo": 1}, "foo"),
    ]
    for path, body, param in cases:
        answer = await tiny_app.post(
            path, content=json.dumps(body), headers={"content-type": "application/json"}
        )
        assert answer.status_code == 400, (path, body)
        assert answer.json()["error"]["param"].partition(".")[0] == param, (path, answer.text)
    for path in ("/tokenize", "/detokenize", "/v1/warm"):
        body = (
            {"content": "a"}
            if path == "/tokenize"
            else {"tokens": []}
            if path == "/detokenize"
            else {"text": "a"}
        )
        assert (await tiny_app.post(path, json={**body, "model": "other"})).status_code == 404


async def test_warm_then_reset(tiny_app, tiny_engine):
    text = "A document that many questions will be asked about. " * 3
    tokens = len(tiny_engine.tokenizer.encode(text))
    block = tiny_engine.config.block_size
    warmed = (await tiny_app.post("/v1/warm", json={"text": text})).json()
    assert warmed["token_count"] == warmed["usage"]["prompt_tokens"] == tokens
    assert tiny_engine.paged_stats()["cached_blocks"] == tokens // block
    chunks, tail = divmod(tokens, warmed["chunk_size"])
    assert warmed["chunk_size"] == 128
    assert warmed["chunks_stored"] == chunks + (tail >= 32) > 0
    assert warmed["partial_tail_tokens"] == tail
    assert warmed["chunk_boundary_aligned"] is True
    assert warmed["alignment_warning"] is None
    assert warmed["usage"]["completion_tokens"] == 0

    async def cached():
        answer = await tiny_app.post(
            "/v1/completions", json={"prompt": text + "Why?", "max_tokens": 1}
        )
        details = answer.json()["usage"]["prompt_tokens_details"]
        return details["cached_tokens"]

    assert await cached() >= tokens // block * block - block, (
        "all blocks except the last one must be cached"
    )
    held = tiny_engine.paged_stats()["cached_blocks"]
    reset = (await tiny_app.post("/cache/reset")).json()
    assert reset == {"object": "cache.reset", "blocks_dropped": held}
    assert (await tiny_app.post("/cache/reset", json={})).json() == {
        "object": "cache.reset",
        "blocks_dropped": 0,
    }
    assert await cached() == 0


async def test_a_pinned_text_stays_until_it_is_unpinned(tiny_app, tiny_engine):
    text = "A document that has to stay, whatever else comes. " * 3
    blocks = len(tiny_engine.tokenizer.encode(text)) // tiny_engine.config.block_size
    warmed = (await tiny_app.post("/v1/warm", json={"text": text, "pin": True, "ttl": 3600})).json()
    assert warmed["chunks_stored"] > 0
    assert warmed["pinned_tokens"] == blocks * tiny_engine.config.block_size > 0
    await tiny_app.post("/cache/reset")
    stats = (await tiny_app.get("/v1/stats")).json()
    assert (stats["pool"]["pinned_blocks"], stats["pool"]["cached_blocks"]) == (blocks, 0)
    assert stats["memory"]["pinned_bytes"] == blocks * stats["pool"]["bytes_per_block"]
    assert (
        f'kvboost:pinned_blocks{{model_name="tiny"}} {float(blocks)}'
        in (await tiny_app.get("/metrics")).text
    )
    for expected in (blocks, 0):
        answer = await tiny_app.post("/v1/unpin", json={"text": text})
        assert answer.json() == {"object": "unpin", "blocks_unpinned": expected}
    system = {"role": "system", "content": text}
    await tiny_app.post("/v1/warm", json={"messages": [system], "pin": True})
    assert tiny_engine.paged_stats()["pinned_blocks"] > 0
    assert (await tiny_app.post("/v1/unpin", json={"messages": [system]})).json()[
        "blocks_unpinned"
    ] > 0
    assert tiny_engine.paged_stats()["pinned_blocks"] == 0
    refused = await tiny_app.post("/v1/warm", json={"text": "a", "pin": True})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "pin"
    assert "no full block of 16 tokens" in refused.json()["error"]["message"]


def test_a_tenant_cannot_unpin_another_tenants_text(keyed_server):
    text = "A text that one tenant pins and another tries to let go. " * 3
    first, second = ({"Authorization": f"Bearer {key}"} for key in keyed_server.keys)

    def unpinned(headers):
        with keyed_server.client(headers=headers) as client:
            return int(client.post("/v1/unpin", json={"text": text}).json()["blocks_unpinned"])

    with keyed_server.client(headers=first) as client:
        tokens = client.post("/v1/warm", json={"text": text, "pin": True}).json()["token_count"]
    assert (unpinned(second), unpinned(first), unpinned(first)) == (0, tokens // 16, 0)


async def test_warmed_messages_are_cache_hits_of_the_conversation(tiny_app, tiny_engine):
    system = {
        "role": "system",
        "content": "You are the keeper of a mill and speak of nothing else. " * 3,
    }
    warmed = (await tiny_app.post("/v1/warm", json={"messages": [system]})).json()
    body = {"messages": [system, *MESSAGES], "max_tokens": 1}
    usage = (await tiny_app.post("/v1/chat/completions", json=body)).json()["usage"]
    block = tiny_engine.config.block_size
    assert (
        usage["prompt_tokens_details"]["cached_tokens"]
        >= warmed["token_count"] // block * block - block
        > 0
    )


async def test_stats_equal_the_engines_statistics(tiny_app, tiny_engine):
    body = {"prompt": "a" * 40, "max_tokens": 24, "logit_bias": {"97": 100}}  # repeats one token
    await tiny_app.post("/v1/completions", json={**body, "kvboost": {"speculation": "on"}})
    answer = await tiny_app.get("/v1/stats")
    assert answer.headers["cache-control"] == "no-store"
    stats = answer.json()
    assert stats["model"] == "tiny"
    assert stats["cache"] == tiny_engine.cache_stats()
    expected = tiny_engine.paged_stats()
    assert expected["drafts"]["lookup"]["accepted_by_position"]
    beside = {name for name in expected if name.endswith("_bytes")} | {"tiers"}
    assert stats["pool"] == {name: value for name, value in expected.items() if name not in beside}
    assert stats["tiers"] == {}
    assert stats["memory"]["pool_bytes"] == expected["pool_bytes"]
    queue = stats["queue"]
    assert (queue["running"], queue["waiting"], queue["waiting_tokens"], queue["in_flight"]) == (
        0,
        0,
        0,
        0,
    )
    assert stats["throughput"]["generated_tokens_total"] == 24
    assert stats["throughput"]["generated_tokens_per_second"] > 0


async def test_blocks_equal_the_engines_block_map(app, spoken_engine):
    secret = "a text with the word xylophone in it, twice: xylophone. " * 3
    await app.post("/v1/completions", json={"prompt": secret, "max_tokens": 2})
    answer = await app.get("/v1/blocks")
    assert answer.headers["cache-control"] == "no-store"
    assert "xylophone" not in answer.text
    blocks = answer.json()
    states = list(base64.b64decode(blocks["states"]))
    assert states == spoken_engine.block_map()
    assert sum(blocks["counts"].values()) == blocks["num_blocks"] == len(states)
    assert blocks["counts"]["cached"] == states.count(1) > 0
    details = spoken_engine.block_details(10**6)
    assert list(base64.b64decode(blocks["refs"])) == [detail.refs for detail in details]
    assert list(base64.b64decode(blocks["tokens"])) == [detail.tokens for detail in details]
    pool = spoken_engine.paged_stats()
    assert blocks["memory"]["pool_bytes"] == pool["pool_bytes"]
    assert blocks["hit_rate"] == 0.0
    chunks = pool["loaded_chunks"]
    assert blocks["tiers"] == {
        "pool": {
            "blocks": chunks,
            "bytes": chunks * pool["bytes_per_block"],
            "max_bytes": pool["pool_bytes"],
            "writable": True,
            "state": "",
            "recent_hit_tokens": 0,
        }
    }
    assert blocks["recent_computed_tokens"] == pool["miss_tokens"] > 0


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_text_routes_are_admitted_and_have_a_deadline(tiny_engine, monkeypatch, path):
    """Like generating routes, they count as admitted work, return 503 for a full queue and 504 at
    the deadline.
    """
    release = threading.Event()
    codec = tiny_engine.tokenizer.codec
    for name in ("encode", "decode"):
        monkeypatch.setattr(codec, name, lambda *_: release.wait(30) and None)
    app = create_app(
        tiny_engine, ServerSettings(max_batch_size=1, max_queue_size=0, request_timeout=0.5)
    )
    admission = app.state.kv.first.admission
    body = {"content": "word " * 100} if path == "/tokenize" else {"tokens": [1] * 100}
    async with app_client(app) as client:
        first = asyncio.create_task(client.post(path, json=body))
        try:
            while not admission.sequences:
                await asyncio.sleep(0.001)
            assert admission.tokens >= 100
            refused = await client.post(path, json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
            late = await first
        finally:
            release.set()
    assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert (admission.sequences, admission.tokens, len(admission.admitted)) == (0, 0, 0)


def test_integers_of_up_to_20_digits_are_parsed():
    value = [10**20 - 1, 1 - 10**20, "1" * 30, 0.1234567890123456789012345, {"9" * 30: 12345}]
    for encoding in ("utf-8", "utf-16", "utf-32"):
        assert parse_json(json.dumps(value).encode(encoding)) == (value, None)
    text = b"[1." + b"1" * 30 + b", 1e+0000000000000000000000001]"
    assert parse_json(text) == ([1 + 1 / 9, 10.0], None)
    for text in ("1" * 21, "[-" + "1" * 21 + "]", '["' + "1" * 30 + '", ' + "9" * 5000 + ", 1]"):
        for encoding in ("utf-8", "utf-16", "utf-32"):
            _, refusal = parse_json(text.encode(encoding))
            assert "an integer has more than 20 digits" in refusal.message


async def test_a_longer_integer_is_refused_in_any_field(tiny_app):
    """The limit applies to fields and also to numbers within a schema."""
    for field, value, told in (
        ("seed", "1" * 5000, "seed"),
        ("json_schema", '{"type": "integer", "maximum": ' + "1" * 21 + "}", "20 digits"),
    ):
        content = f'{{"prompt": "a", "{field}": {value}, "model": "tiny"}}'
        answer = await tiny_app.post("/v1/completions", content=content)
        assert answer.status_code == 400
        assert told in answer.json()["error"]["message"]
        assert "11111" not in answer.text


async def test_short_requests_do_not_wait_for_the_tokenization_of_long_texts(tiny_app, tiny_engine):
    """Short requests of every kind finish while more long texts than there are worker threads are
    stuck.
    """
    release = threading.Event()
    codec = tiny_engine.tokenizer.codec
    encode = codec.encode

    def stuck(text, add_special_tokens):
        if len(text) > 100_000:
            assert release.wait(30)
            return [1]
        return encode(text, add_special_tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "encode", stuck)
        long = [
            asyncio.create_task(tiny_app.post("/tokenize", json={"content": "x" * 100_001}))
            for _ in range(40)
        ]
        try:
            await asyncio.sleep(0)
            for path, body in (
                ("/tokenize", {"content": "short"}),
                ("/v1/completions", {"prompt": "short", "max_tokens": 2}),
                ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2}),
            ):
                assert (
                    await asyncio.wait_for(tiny_app.post(path, json=body), 20)
                ).status_code == 200
            assert not any(task.done() for task in long)
        finally:
            release.set()
            answers = await asyncio.gather(*long)
    assert {answer.status_code for answer in answers} == {200}
