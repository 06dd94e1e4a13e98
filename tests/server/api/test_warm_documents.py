"""Tests of /v1/warm, which computes documents, and texts that follow others, for non-prefix KV
reuse.
"""

import asyncio
import random
import threading

import pytest
from pydantic import TypeAdapter

from helpers.engine.fake_runner import fake_engine, runner_of
from helpers.server.live_servers import app_client
from kvboost_edge.server.app import create_app
from kvboost_edge.server.response_types import WarmResponse
from kvboost_edge.server.settings import ServerSettings

WARM = "/v1/warm"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
TEXT = "A text of several blocks, which is to be there before anybody asks. "


def document(number, length):
    return random.Random(number).choices(range(256), k=length)


@pytest.fixture
async def app():
    """Client of a fake engine with two API keys. `app.engine` is the engine; `app.served` is the
    application.
    """
    with fake_engine(primer_tokens=32) as engine:
        served = create_app(
            engine, ServerSettings(api_keys=("one", "two weight=3"), admin_api_keys=("admin",))
        )
        async with app_client(served, "one") as client:
            client.engine = engine
            client.served = served
            yield client


async def warm(app, key="one", **body):
    answer = await app.post(WARM, json=body, headers={"x-api-key": key})
    assert answer.status_code == 200, answer.text
    TypeAdapter(WarmResponse).validate_json(answer.content, strict=True)
    return answer.json()


async def shared(app, prompt, key="one", **body):
    asked = {
        "prompt": prompt,
        "max_tokens": 2,
        "kvboost": {"mode": "chunk_kv_reuse", "recompute_strategy": "none"},
    }
    answer = await app.post(COMPLETIONS, json={**asked, **body}, headers={"x-api-key": key})
    assert answer.status_code == 200, answer.text
    return int(answer.json()["kvboost"]["reused_span_tokens"])


async def test_warmed_documents_are_reused_in_any_order_and_stored_once(app):
    texts = [document(1, 64), TEXT, document(2, 48)]
    told = await warm(app, documents=texts)
    assert (told["object"], told["chunks_stored"], told["token_count"]) == (
        "warm",
        3,
        64 + len(TEXT) + 48,
    )
    assert told["usage"]["prompt_tokens"] > told["token_count"]  # including the tokens before them
    assert told["timings"]["prompt_n"] > 0
    prompt = [*document(9, 16), *texts[2], *app.engine.tokenizer.encode(TEXT, False), *texts[0], 7]
    assert await shared(app, prompt) >= told["token_count"] - 3 * 15
    computed = runner_of(app.engine).computed
    again = await warm(app, documents=texts)
    assert runner_of(app.engine).computed == computed
    assert (again["chunks_stored"], again["timings"], again["kvboost"]) == (3, None, None)
    assert again["usage"]["prompt_tokens"] == 0


async def test_a_text_is_computed_at_its_position_offset(app):
    told = await warm(app, text=TEXT, position_offset=33)
    assert told["token_count"] == len(TEXT)
    assert told["usage"]["prompt_tokens"] >= 33 + len(TEXT)
    assert (
        await shared(app, [*document(3, 20), *app.engine.tokenizer.encode(TEXT, False), 7])
        > len(TEXT) - 32
    )
    assert (await warm(app, text=TEXT, position_offset=0))["chunks_stored"] == 1


async def test_warmed_documents_belong_to_their_key_and_salt(app):
    doc = document(4, 80)
    await warm(app, documents=[doc], cache_salt="s")
    prompt = [*document(5, 20), *doc, 1]
    assert await shared(app, prompt) == await shared(app, prompt, key="two", cache_salt="s") == 0
    assert await shared(app, prompt, cache_salt="s") > 60


async def test_warming_runs_with_the_keys_priority_and_deadline(app, monkeypatch):
    seen = []
    submit = app.engine._core.submit
    monkeypatch.setattr(
        app.engine._core, "submit", lambda request: seen.append(request) or submit(request)
    )
    await warm(app, "two", documents=[document(6, 40)], priority=2)
    terms = seen[0].terms
    assert len(seen) == 1
    assert (terms.weight, terms.priority, terms.deadline is not None) == (3.0, 2, True)


async def test_a_disconnect_cancels_its_documents(app):
    """The computation stops, the request keeps its place in the queue until then, and no block
    stays in use.
    """
    begun = threading.Event()
    may_go_on = threading.Event()

    def wait(batch):
        begun.set()
        assert may_go_on.wait(20)

    runner_of(app.engine).on_forward = wait
    task = asyncio.ensure_future(
        warm(app, documents=[document(number, 200) for number in range(5)])
    )
    assert await asyncio.to_thread(begun.wait, 20)
    task.cancel()
    await asyncio.sleep(0.2)
    admission = app.served.state.kv.first.admission
    assert (task.done(), admission.sequences) == (False, 5)
    may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 20)
    assert admission.sequences == 0
    assert runner_of(app.engine).computed < 600
    assert app.engine.paged_stats()["used_blocks"] == 0
    runner_of(app.engine).on_forward = None
    assert (await warm(app, documents=[document(1, 40)]))["chunks_stored"] == 1


@pytest.mark.parametrize(
    ("options", "body", "places"),
    [
        ({}, {"documents": [document(number, 40) for number in range(3)]}, 3),
        ({}, {"documents": [document(number, 40) for number in range(6)]}, 4),
        ({"chunk_size": 48}, {"documents": [document(1, 100)]}, 3),
        ({}, {"text": TEXT, "position_offset": 33}, 1),
    ],
)
async def test_warming_takes_a_place_for_each_chunk_up_to_a_batch(options, body, places):
    taken = []
    with fake_engine(primer_tokens=32, max_num_seqs=4, **options) as engine:
        served = create_app(engine, ServerSettings())
        admission = served.state.kv.first.admission
        runner_of(engine).on_forward = lambda batch: taken.append(admission.sequences)
        async with app_client(served) as client:
            answer = await client.post(WARM, json=body)
        assert answer.status_code == 200, answer.text
    assert set(taken) == {places}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"documents": []}, "documents", ""),
        ({"documents": [""]}, "documents", ""),
        ({"documents": ["a"] * 257}, "documents", ""),
        ({"documents": "words"}, "documents", ""),
        ({"documents": [[1.5]]}, "documents", ""),
        ({"documents": [[]]}, "documents", "document 0 is empty"),
        ({"documents": [[1, 260]]}, "documents", "token 1 of document 0 is 260"),
        ({"documents": [[1] * 390]}, "documents", "primer_tokens=32"),
        ({"documents": ["a"], "text": "b"}, "documents", "exactly one of"),
        ({"documents": ["a"], "messages": MESSAGES}, "documents", "exactly one of"),
        ({"documents": ["a"], "pin": True}, "pin", "documents"),
        ({"documents": ["a"], "ttl": 3}, "ttl", "pin: true"),
        ({"documents": ["a"], "position_offset": 3}, "position_offset", "needs text"),
        (
            {"documents": ["a"], "chat_template_kwargs": {}},
            "chat_template_kwargs",
            "not to documents",
        ),
        ({"documents": ["a"], "priority": -1}, "priority", "other tenants"),
        ({"text": "a", "position_offset": -1}, "position_offset", ""),
        ({"text": "a", "position_offset": 1.5}, "position_offset", ""),
        ({"text": "a", "position_offset": 400}, "position_offset", "context of 400"),
        ({"text": "a", "position_offset": 3, "pin": True}, "pin", "position_offset"),
        ({"messages": MESSAGES, "position_offset": 3}, "position_offset", "needs text"),
    ],
    ids=str,
)
async def test_invalid_requests_are_refused_by_name(app, body, param, words):
    answer = await app.post(WARM, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].partition(".")[0] == param
    assert words in error["message"]
    assert runner_of(app.engine).computed == 0


async def test_a_runner_without_support_gives_its_reason(app):
    runner_of(app.engine).moved_keys_refusal = "this runner cannot; use another one"
    for body, param in (
        ({"documents": ["a"]}, "documents"),
        ({"text": "a", "position_offset": 3}, "position_offset"),
    ):
        error = (await app.post(WARM, json=body)).json()["error"]
        assert (error["param"], "this runner cannot" in error["message"]) == (param, True)
    assert (await warm(app, text=TEXT))["chunks_stored"] > 0
