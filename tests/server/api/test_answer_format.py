"""Tests of structured output in every API's field names, and of draft tokens, which no response
contains.
"""

import json
import re
import threading

import jsonschema_rs
import pytest

from helpers.engine.fake_runner import fake_engine
from helpers.server.live_servers import app_client
from kvboost_edge.config import MOST_DRAFT_TOKENS
from kvboost_edge.engine.grammar.compiler import GrammarCompiler
from kvboost_edge.server import serve
from kvboost_edge.server.api.schemas.chat import ChatRequest
from kvboost_edge.server.api.schemas.completions import CompletionRequest
from kvboost_edge.server.app import create_app
from kvboost_edge.server.settings import ServerSettings

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["ok", "n"],
    "additionalProperties": False,
}
NAMED = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}


@pytest.fixture(scope="module")
def engine():
    with fake_engine() as engine:
        engine.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        yield engine


@pytest.fixture
async def app(engine):
    async with app_client(create_app(engine, ServerSettings())) as client:
        yield client


def body(path, **more):
    ask = (
        {"prompt": "hello"}
        if path == COMPLETIONS
        else {"messages": [{"role": "user", "content": "hello"}]}
    )
    return {**ask, "max_tokens": 120, "seed": 3, **more}


def text_of(answer):
    choice = answer["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "spelled",
    [
        {"response_format": NAMED},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"json_schema": SCHEMA},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
        {"response_format": NAMED, "json_schema": SCHEMA},
    ],
    ids=lambda spelled: "+".join(spelled),
)
async def test_a_json_schema_is_accepted_in_every_apis_field(app, path, spelled):
    answer = await app.post(path, json=body(path, **spelled))
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    jsonschema_rs.validate(SCHEMA, json.loads(text_of(answer.json())))


@pytest.mark.parametrize(
    ("spelled", "form"),
    [
        ({"guided_regex": "[a-c]{3}!"}, "[a-c]{3}!"),
        ({"structured_outputs": {"regex": "[a-c]{3}!"}}, "[a-c]{3}!"),
        ({"guided_choice": ["up", "down"]}, "up|down"),
        ({"structured_outputs": {"choice": ["up", "down"]}}, "up|down"),
        ({"grammar": 'root ::= "x" [0-9] "y"'}, "x[0-9]y"),
        ({"guided_grammar": 'start: "x" /[0-9]/ "y"'}, "x[0-9]y"),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]/ "y"'}}, "x[0-9]y"),
    ],
    ids=str,
)
async def test_regex_choice_and_grammar_constrain_the_answer(app, spelled, form):
    answer = await app.post(COMPLETIONS, json=body(COMPLETIONS, **spelled))
    assert answer.status_code == 200, answer.text
    assert re.fullmatch(form, text_of(answer.json()))


async def test_guided_choice_accepts_up_to_10000_entries(app):
    """The parser can hold only 2,000 separate alternatives, yet 10,000 choices work; 10,001 are
    rejected.
    """
    choice = [f"{number * 7919 % 10_007:05}" for number in range(10_001)]
    for seed in range(3):
        more = {"guided_choice": choice[:10_000], "seed": seed, "temperature": 1}
        answer = await app.post(COMPLETIONS, json=body(COMPLETIONS, **more))
        assert answer.status_code == 200, answer.text
        assert text_of(answer.json()) in choice[:10_000]
    answer = await app.post(COMPLETIONS, json=body(COMPLETIONS, guided_choice=choice))
    assert answer.status_code == 400
    assert "choice has 10001 entries; 1 to 10000 are allowed" in answer.text


async def test_json_object_returns_an_object(app):
    answer = await app.post(
        CHAT, json=body(CHAT, max_tokens=200, response_format={"type": "json_object"})
    )
    assert answer.status_code == 200
    assert text_of(answer.json()).startswith("{")


async def test_all_choices_match_the_schema(app):
    answer = await app.post(COMPLETIONS, json=body(COMPLETIONS, n=4, json_schema=SCHEMA))
    texts = [choice["text"] for choice in answer.json()["choices"]]
    assert len(set(texts)) > 1
    for text in texts:
        jsonschema_rs.validate(SCHEMA, json.loads(text))


async def test_speculative_n_max_limits_drafts(app):
    """The value 0 turns off speculative decoding. A value above the engine's maximum is reduced to
    it.
    """
    for number, drafts in ((0, {"speculation": "off"}), (4, {"max_draft_tokens": 4})):
        for path, asked in ((COMPLETIONS, body(COMPLETIONS)), (CHAT, body(CHAT))):
            model = CompletionRequest if path == COMPLETIONS else ChatRequest
            read = model.model_validate({**asked, "speculative.n_max": number})
            assert read.engine_options == drafts
    read = ChatRequest.model_validate({**body(CHAT), "speculative.n_max": 1000})
    assert read.engine_options == {"max_draft_tokens": MOST_DRAFT_TOKENS}
    read = ChatRequest.model_validate({**body(CHAT), "speculative.n_min": 1000})
    assert read.engine_options == {"min_draft_tokens": MOST_DRAFT_TOKENS}
    read = ChatRequest.model_validate({**body(CHAT), "speculative.p_min": 0.5})
    assert read.engine_options == {"draft_p_min": 0.5}
    refused = await app.post("/completion", json={"prompt": "hello", "speculative.p_min": 0.5})
    assert refused.status_code == 400
    assert "has no effect without a draft model" in refused.json()["error"]["message"]
    found = {}
    for number in (0, 4):
        answer = await app.post(
            "/completion",
            json={"prompt": "hello", "json_schema": SCHEMA, "seed": 3, "speculative.n_max": number},
        )
        found[number] = answer.json()
    assert found[0]["content"] == found[4]["content"]
    assert found[0]["timings"]["draft_n"] == 0
    assert found[4]["generation_settings"]["speculative.n_max"] == 4


async def test_drafts_are_counted_and_do_not_change_answers(app):
    answers = {}
    for way in ("off", "on"):
        answer = await app.post(
            COMPLETIONS,
            json=body(
                COMPLETIONS, json_schema=SCHEMA, kvboost={"speculation": way, "max_draft_tokens": 4}
            ),
        )
        answers[way] = answer.json()
    assert text_of(answers["on"]) == text_of(answers["off"])
    assert answers["off"]["timings"]["draft_n"] == 0
    assert answers["on"]["timings"]["draft_n"] >= answers["on"]["timings"]["draft_n_accepted"] > 0
    metrics = (await app.get("/metrics")).text
    found = {
        name: float(value)
        for name, value in re.findall(
            r"^(vllm:spec_decode_\w+)\{.*\} (\S+)$", metrics, re.MULTILINE
        )
    }
    assert found["vllm:spec_decode_num_draft_tokens_total"] >= answers["on"]["timings"]["draft_n"]
    assert (
        found["vllm:spec_decode_num_accepted_tokens_total"]
        >= answers["on"]["timings"]["draft_n_accepted"]
    )


async def test_a_schema_of_5_mb_is_refused(app):
    answer = await app.post(CHAT, json=body(CHAT, json_schema={"description": "x" * (5 << 20)}))
    assert 400 <= answer.status_code < 500
    assert "bytes" in answer.text or answer.status_code == 413


async def test_grammar_compilation_does_not_block_the_event_loop(app, monkeypatch):
    """The event loop itself queues short requests, but a grammar is compiled in another thread."""
    make = GrammarCompiler.make
    threads = list[threading.Thread]()

    def noting(self, grammar):
        threads.append(threading.current_thread())
        return make(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "make", noting)
    assert (await app.post(CHAT, json=body(CHAT, json_schema=SCHEMA))).status_code == 200
    assert threads != []
    assert threading.current_thread() not in threads


def test_the_vocabulary_is_read_before_serving(engine, monkeypatch):
    settings = ServerSettings(host="127.0.0.1", port=0)
    done = []
    monkeypatch.setattr(type(engine), "read_ahead", lambda self: done.append("read"))
    monkeypatch.setattr(serve.DrainingServer, "run", lambda self, sockets: done.append("served"))
    with serve.bind(settings) as listener:
        serve.run_server(create_app(engine, settings), settings, listener)
    assert done == ["read", "served"]
