"""Tests of tools in chats: allowed tools, edited calls, other routes, and unknown templates and
models.
"""

import dataclasses
import json

import pytest

from helpers.server.compat_apis import APIS
from helpers.server.live_servers import app_client
from helpers.server.scripted_model import ARGUMENTS, ASK, CALL, FORMATS, TOOLS, scripted
from kvboost_edge.server.app import create_app
from kvboost_edge.server.settings import ServerSettings

API = APIS["/v1/chat/completions"]


async def ask(app, **more):
    return await API.ask(app, {**API.body(tools=TOOLS, limit=300), **more})


async def test_allowed_tools_restrict_the_calls(app, speaker):
    speaker.text = CALL
    clock = [{"type": "function", "function": {"name": "clock"}}]
    chosen = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": clock}}
    assert {name for name, _ in API.said(await ask(app, tool_choice=chosen)).calls} == {"clock"}


CLOCK_CALL = '{"name": "clock", "arguments": {}}'
CLOCK_ALONE = {
    "type": "allowed_tools",
    "allowed_tools": {
        "mode": "auto",
        "tools": [{"type": "function", "function": {"name": "clock"}}],
    },
}
AS_ANSWER = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "arguments": {"type": "object"}},
    "required": ["name", "arguments"],
}


@pytest.mark.parametrize(
    ("text", "more", "is_call"),
    [
        (CLOCK_CALL, {}, True),
        (CLOCK_CALL, {"tool_choice": CLOCK_ALONE}, True),
        (CALL.split("\n")[1], {"tool_choice": CLOCK_ALONE}, False),
        (CLOCK_CALL, {"tool_choice": "none"}, False),
        (
            CLOCK_CALL,
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": AS_ANSWER},
                }
            },
            False,
        ),
    ],
    ids=["auto", "allowed", "not allowed", "none", "an answer's schema"],
)
async def test_a_call_without_markers_is_recognized_only_for_allowed_tools(
    app, speaker, text, more, is_call
):
    speaker.text = text
    said = API.said(await ask(app, **more))
    assert (bool(said.calls), said.text) == (is_call, "" if is_call else text)


async def test_a_call_without_markers_stays_text_if_its_schema_is_large(app, speaker):
    """A large schema would have to be parsed while other requests wait for their next tokens."""
    speaker.text = CLOCK_CALL
    found = []
    for size in (1000, 1100):
        parameters = {"type": "object", "description": ":" * size}
        tool = {"type": "function", "function": {"name": "clock", "parameters": parameters}}
        found.append(bool(API.said(await ask(app, tools=[tool])).calls))
    assert found == [True, False]


async def test_a_call_without_markers_does_not_begin_in_the_prompt(app, speaker):
    begun = {"role": "assistant", "content": "So: "}
    speaker.openings = ("So: ",)
    speaker.text = CLOCK_CALL
    said = API.said(await ask(app, messages=[*ASK, begun], continue_final_message=True))
    assert (said.text, said.calls) == (CLOCK_CALL, [])


async def test_usage_counts_reasoning_tokens(app, speaker, spoken_engine):
    speaker.text = FORMATS["hermes"].turn(thought="One, two.", text="Three.")
    counted = (await ask(app))["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert counted == len(spoken_engine.tokenizer.encode("<think>\nOne, two.\n</think>", False))


async def test_an_edited_tool_call_is_not_replayed(app, speaker):
    speaker.text = CALL.replace('": ', '":')  # other whitespace than in the template
    first = await ask(app)
    body = API.next_turn(API.body(tools=TOOLS), first, ["Rain."])
    speaker.text = "It rains."
    cached = []
    for _ in range(2):
        cached.append(API.said(await API.ask(app, body)).cached)
        body = json.loads(json.dumps(body))
        body["messages"][1]["tool_calls"][0]["function"]["arguments"] = (
            '{"city": "Bonn", "days": 2}'
        )
    said = API.said(first)
    assert cached[1] < said.prompt + said.output - 17 <= cached[0]


@pytest.mark.parametrize("form", FORMATS, indirect=True)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_a_truncated_call_can_be_sent_back(app, speaker, form, path):
    """The prompt contains the tokens that the model wrote or, if they are no longer stored, an
    object that holds the text.
    """
    api = APIS[path]
    speaker.text = FORMATS[form].turn(calls=[("weather", ARGUMENTS)])
    tokens = len(app.engine.tokenizer.encode(speaker.text, False))
    body = api.body(tools=TOOLS)
    first = await api.ask(app, api.body(tools=TOOLS, limit=tokens - tokens // 8))
    said = api.said(first)
    ((_, arguments),) = said.calls
    with pytest.raises(ValueError, match="line 1"):
        json.loads(arguments)
    speaker.text = FORMATS[form].turn(text="Once more.")
    whole = api.next_turn(body, first, ["The call was truncated."])
    replayed = api.said(await api.ask(app, whole))
    assert replayed.text == "Once more."
    if form != "harmony":  # its template renders calls again
        assert replayed.cached >= said.prompt + said.output - 17
    seen = []
    for text in (arguments, json.dumps({"INVALID_JSON": arguments})):
        sent = json.dumps({**whole, "cache_salt": "other"})
        assert sent.count(json.dumps(arguments)) == 1
        sent = sent.replace(json.dumps(arguments), json.dumps(text))
        assert api.said(await api.ask(app, json.loads(sent))).text == "Once more."
        seen.append(speaker.seen)
    assert seen[0] == seen[1] != []


def _messages(*sent):
    return [{"role": role, "content": content} for role, content in sent]


LEADING = _messages(("system", "Be brief."), ("developer", "Be kind."), ("system", "It is noon."))
MERGED = _messages(("system", "Be brief.\n\nBe kind.\n\nIt is noon."))


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("form", ["hermes", "words"], indirect=True)
async def test_leading_system_messages_become_one(app, speaker, form, tools):
    """Many templates accept only one. Later ones keep their places."""
    later = [*ASK, *_messages(("system", "It is one."), ("system", "It is two."), ("user", "x"))]
    seen = []
    for path, place in (("/v1/chat/completions", "messages"), ("/v1/responses", "input")):
        api = APIS[path]
        for messages in ([*LEADING, *later], [*MERGED, *later]):
            answer = await api.ask(app, {**api.body(tools=tools), place: messages})
            assert api.said(answer).text == "Good day."
            seen.append(speaker.seen)
    assert seen == [seen[0]] * 4
    if tools is None:
        expected = app.engine.tokenizer.encode_chat([*MERGED, *later])
        assert seen[0][: len(expected)] == expected
    body = {"messages": [*LEADING, *later], "tools": tools}
    shown = (await app.post("/apply-template", json=body)).json()["prompt"]
    assert MERGED[0]["content"] in shown
    assert (await app.post("/tokenize", json=body)).json()["count"] == len(
        app.engine.tokenizer.encode(shown, False)
    )


async def test_leading_system_messages_suit_a_template_that_accepts_one(app, speaker):
    app.engine.tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
        "<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
    )
    assert API.said(await ask(app, messages=[*LEADING, *ASK], tools=None)).text == "Good day."
    answer = await app.post(API.path, json={"messages": [*LEADING, *ASK, *LEADING]})
    assert (answer.status_code, "at the beginning" in answer.text) == (400, True)


async def test_tokenize_and_warm_include_tools(app, speaker):
    plain = (await app.post("/tokenize", json={"messages": ASK})).json()["count"]
    with_tools = (await app.post("/tokenize", json={"messages": ASK, "tools": TOOLS})).json()[
        "count"
    ]
    assert with_tools > plain + 100
    warmed = await app.post("/v1/warm", json={"messages": ASK, "tools": TOOLS})
    assert warmed.status_code == 200, warmed.text
    assert API.said(await ask(app)).cached >= warmed.json()["token_count"] - 16


@pytest.mark.parametrize(
    ("form", "known", "odd"),
    [
        (
            "hermes",
            '{"name": "{{ call.function.name }}", "arguments":',
            "call:{{ call.function.name }}{",
        ),
        ("gemma", "{{ key }}:", "{{ key }}=>"),
        ("gemma", '<|"|>', "'"),
        ("gemma", "'['", "'('"),
    ],
)
async def test_tools_are_refused_if_the_templates_call_format_is_unknown(
    monkeypatch, form, known, odd
):
    template = FORMATS[form].template.replace(f"'{known}'", f'"{odd}"').replace(known, odd)
    with scripted(monkeypatch, dataclasses.replace(FORMATS[form], template=template)) as (
        engine,
        _,
    ):
        async with app_client(create_app(engine, ServerSettings(model_name="fake"))) as client:
            answer = await client.post(API.path, json=API.body(tools=TOOLS))
    assert (answer.status_code, "unknown format" in answer.json()["error"]["message"]) == (
        400,
        True,
    )


async def test_tools_are_refused_if_the_vocabulary_lacks_the_call_tokens(monkeypatch):
    form = dataclasses.replace(FORMATS["lfm2"], markers=FORMATS["lfm2"].markers[:2])
    with scripted(monkeypatch, form) as (engine, _):
        async with app_client(create_app(engine, ServerSettings(model_name="fake"))) as client:
            error = (await client.post(API.path, json=API.body(tools=TOOLS))).json()["error"]
    assert (error["param"], "in an unknown format or not at all" in error["message"]) == (
        "tools",
        True,
    )


@pytest.mark.parametrize("form", ["gemma"], indirect=True)
@pytest.mark.parametrize(
    ("schema", "word"),
    [({"not": {}}, "'not' is not supported"), ({"properties": {"a:b": {}}}, "rename it")],
)
async def test_tool_schemas_the_call_format_cannot_express_are_refused(app, schema, word):
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", **schema}},
    }
    answer = await app.post(API.path, json=API.body(tools=[tool]))
    assert (answer.status_code, word in answer.json()["error"]["message"]) == (400, True)
