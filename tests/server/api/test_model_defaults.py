"""Tests of a model with a default system message and default sampling parameters."""

from types import SimpleNamespace

import pytest

from helpers.server.compat_apis import APIS
from helpers.server.live_servers import app_client
from helpers.server.scripted_model import ASK, TOOLS
from kvboost_edge.engine.request.sampling_defaults import DEFAULT_SAMPLING
from kvboost_edge.server.api.prompt_encoding import estimate_prefix, prefix_size
from kvboost_edge.server.api.schemas.cache import UnpinRequest
from kvboost_edge.server.app import create_app
from kvboost_edge.server.model_defaults import ModelDefaults
from kvboost_edge.server.settings import ServerSettings

DEFAULTS = ModelDefaults(
    "Answer in one word.",
    {"temperature": 0.3, "top_k": 7, "typical_p": 0.9, "bad_words": ("rain",)},
)


@pytest.fixture
async def app(spoken_engine):
    settings = ServerSettings(
        model_name="fake", model_defaults={"fake": DEFAULTS}, max_queue_tokens=1 << 22
    )
    async with app_client(create_app(spoken_engine, settings)) as client:
        yield client


@pytest.fixture
def submitted(spoken_engine, monkeypatch):
    """List of the prompt texts and sampling parameters that reached the engine."""
    found = []
    submit = spoken_engine.submit

    def recorded(prompt, **options):
        found.append(
            (spoken_engine.tokenizer.decode(prompt, skip_special_tokens=False), options["sampling"])
        )
        return submit(prompt, **options)

    monkeypatch.setattr(spoken_engine, "submit", recorded)
    return found


RAW = ("/v1/completions", "/completion")


@pytest.mark.parametrize("path", APIS)
async def test_model_defaults_apply_to_missing_fields(app, speaker, submitted, path):
    api = APIS[path]
    await api.ask(app, api.body(temperature=None))
    ((prompt, params),) = submitted
    assert {name: getattr(params, name) for name in DEFAULTS.sampling} == DEFAULTS.sampling
    assert params.top_p == DEFAULT_SAMPLING.top_p
    assert prompt.count("Answer in one word.") == (path not in RAW)


@pytest.mark.parametrize("path", APIS)
async def test_request_fields_override_model_defaults(app, speaker, submitted, path):
    api = APIS[path]
    await api.ask(app, api.body(temperature=0.9))
    ((_, params),) = submitted
    assert (params.temperature, params.top_k) == (0.9, 7)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", APIS)
async def test_a_created_models_stop_strings_and_limit_apply(spoken_engine, speaker, path, streams):
    """A model that a client created may have stop strings and a token limit among its defaults."""
    api = APIS[path]
    speaker.text = "One END two."
    given = {"stop": ("END",), "max_tokens": 9, "seed": 7}
    settings = ServerSettings(model_name="fake", model_defaults={"fake": ModelDefaults("", given)})
    async with app_client(create_app(spoken_engine, settings)) as client:
        body = api.body()
        answer = await api.ask(client, body, streams=streams)
        assert (api.said(answer).text, api.said(answer).reason) == ("One ", "stop")
        speaker.text = "A longer answer than that."
        found = api.said(await api.ask(client, body, streams=streams))
        limit = body.get("max_tokens", 9)  # Anthropic's API needs one in the request
        assert found.output == limit if limit < 20 else found.output > 9


async def test_a_system_message_of_the_request_overrides_the_default(app, speaker, submitted):
    own = {"role": "system", "content": "Be brief."}
    ask = {"role": "user", "content": "hello"}
    for path, body in (
        ("/v1/chat/completions", {"messages": [own, ask]}),
        ("/v1/chat/completions", {"messages": [{**own, "role": "developer"}, ask]}),
        ("/v1/messages", {"messages": [ask], "system": "Be brief.", "max_tokens": 50}),
        ("/v1/responses", {"input": "hello", "instructions": "Be brief.", "store": False}),
        ("/api/chat", {"messages": [own, ask], "stream": False}),
        ("/api/generate", {"prompt": "hello", "system": "Be brief.", "stream": False}),
    ):
        submitted.clear()
        answer = await app.post(path, json={"model": "fake", **body})
        assert answer.status_code == 200, answer.text
        ((prompt, _),) = submitted
        assert "Be brief." in prompt
        assert "one word" not in prompt


async def test_counted_tokens_include_the_default_system_message(app, speaker):
    body = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}
    counted = (await app.post("/v1/messages/count_tokens", json=body)).json()["input_tokens"]
    usage = (await app.post("/v1/messages", json={**body, "max_tokens": 5})).json()["usage"]
    assert counted == sum(usage[name] for name in usage if name.endswith("input_tokens"))


SAID = {"role": "assistant", "content": "It is"}
CALLED = {
    "role": "assistant",
    "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "ten"}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"messages": [{"role": "system", "content": "Be brief."}, *ASK]},
        {"tools": TOOLS},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"add_generation_prompt": False},
        {"messages": [*ASK, SAID]},
        {"messages": [*ASK, SAID], "add_generation_prompt": True},
        {"messages": [*ASK, SAID], "add_generation_prompt": False},
        {"messages": [*ASK, SAID], "continue_final_message": False},
        {
            "messages": [*ASK, SAID],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
        {"messages": [*ASK, CALLED, RESULT], "tools": TOOLS},
    ],
)
async def test_tokenize_and_apply_template_yield_the_prompt_of_a_chat(
    app, speaker, submitted, fields
):
    body = {"messages": ASK, **fields}
    chat = await app.post("/v1/chat/completions", json={**body, "max_tokens": 5})
    assert chat.status_code == 200, chat.text
    ((prompt, _),) = submitted
    tokens = (await app.post("/tokenize", json=body)).json()
    assert tokens["count"] == chat.json()["usage"]["prompt_tokens"]
    shown = await app.post("/detokenize", json={"tokens": tokens["tokens"]})
    assert shown.json()["content"] == prompt
    assert (await app.post("/apply-template", json=body)).json() == {"prompt": prompt}


async def test_a_final_message_with_tool_calls_is_tokenized_but_not_continued(app, speaker):
    body = {"messages": [*ASK, CALLED], "tools": TOOLS}
    closed = {**body, "continue_final_message": False}
    for path in ("/tokenize", "/apply-template"):
        expected = await app.post(path, json=closed)
        assert expected.status_code == 200
        assert (await app.post(path, json=body)).json() == expected.json()
        for wrong in (body["messages"], ASK):
            refused = await app.post(path, json={"messages": wrong, "continue_final_message": True})
            assert refused.status_code == 400
            assert "message" in refused.json()["error"]["message"]


@pytest.mark.parametrize(("path", "fields"), [("/v1/warm", {}), ("/v1/sessions", {"name": "mine"})])
async def test_warmed_and_saved_messages_begin_with_the_system_message(
    app, speaker, submitted, path, fields
):
    """A chat with the same messages finds their blocks."""
    prefix = await app.post(path, json={"messages": ASK, **fields})
    whole = await app.post(path, json={"messages": ASK, "add_generation_prompt": True, **fields})
    chat = await app.post("/v1/chat/completions", json={"messages": ASK, "max_tokens": 5})
    assert [answer.status_code for answer in (prefix, whole, chat)] == [200] * 3
    begun, full, prompt = (text for text, _ in submitted)
    assert prompt == full
    assert prompt.startswith(begun)
    assert DEFAULTS.system in begun


def test_estimates_of_warmed_messages_count_the_system_message():
    state = SimpleNamespace(defaults=DEFAULTS)
    system = {"role": "system", "content": DEFAULTS.system}
    body, whole = (UnpinRequest(messages=messages) for messages in (ASK, [system, *ASK]))
    assert estimate_prefix(state, body) == estimate_prefix(state, whole)
    assert prefix_size(state, body) == prefix_size(state, whole)


async def test_unpinned_messages_begin_with_the_system_message(app, speaker, spoken_engine):
    system = {"role": "system", "content": DEFAULTS.system}
    pinned = await app.post("/v1/warm", json={"messages": [system, *ASK], "pin": True})
    assert pinned.status_code == 200, pinned.text
    assert spoken_engine.paged_stats()["pinned_blocks"] > 0
    unpinned = await app.post("/v1/unpin", json={"messages": ASK})
    assert unpinned.json()["blocks_unpinned"] > 0
    assert spoken_engine.paged_stats()["pinned_blocks"] == 0


async def test_cached_prefixes_begin_with_the_system_message(app, speaker, spoken_engine):
    """A cache breakpoint also counts the tokens of the default system message."""
    text = {"type": "text", "text": "x" * 64, "cache_control": {"type": "ephemeral"}}
    body = {"model": "fake", "max_tokens": 5, "messages": [{"role": "user", "content": [text]}]}
    usage = (await app.post("/v1/messages", json=body)).json()["usage"]
    assert usage["cache_creation_input_tokens"] >= 80


async def test_the_effective_defaults_are_shown(app, speaker):
    await app.post("/completion", json={"prompt": "x", "n_predict": 1})
    (listed,) = (await app.get("/v1/models")).json()["data"]
    props = (await app.get("/props")).json()["default_generation_settings"]["params"]
    for shown in (listed["sampling"], props):
        assert (shown["temperature"], shown["top_k"]) == (0.3, 7)
