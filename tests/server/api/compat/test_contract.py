"""Contract tests of all APIs that generate: each property is checked for every API and every chat
format.
"""

import asyncio
import itertools
import json
import threading

import jsonschema_rs
import pytest

from helpers.engine import fake_runner
from helpers.engine.fake_runner import hold_passes, runner_of
from helpers.pairwise import each_once
from helpers.server.api_bodies import ASKED, TEXTS, asked, error_text
from helpers.server.compat_apis import APIS, MODEL, lasting
from helpers.server.compat_fields import REFUSED, TAKEN
from helpers.server.live_servers import app_client, wait_until
from helpers.server.scripted_model import ARGUMENTS, CALL, CLOCK, FORMATS, TOOLS, WEATHER
from kvboost_edge.engine.handle import RequestHandle

SAYINGS = {
    "text": {"text": "Sun, später\nRegen 🌧."},
    "nothing": {},
    "odd text": {"text": "It is <b>fine</b> <tool"},
    "thought and text": {"thought": "It may rain 🌧.", "text": "Sun."},
    "text and call": {"text": "Let me look.", "calls": [("weather", ARGUMENTS)]},
    "calls": {"calls": [("weather", ARGUMENTS), ("clock", {})]},
    "all": {"thought": "It may rain.", "text": "Let me look.", "calls": [("weather", ARGUMENTS)]},
}
TALKING = [path for path, api in APIS.items() if "thinks" in api.has]
CALLING = [path for path, api in APIS.items() if "tools" in api.has]
CHOOSING = [path for path, api in APIS.items() if "choice" in api.has]
CHAT = "/v1/chat/completions"
CALL_FORMATS = (
    "hermes",
    "words",
    "gemma",
    "lfm2",
)  # test_channels.py tests the fifth with a tiny model of its own
OWN_LOGITS = fake_runner.token_logits
SEVEN = {
    "type": "object",
    "properties": {"n": {"const": 7}},
    "required": ["n"],
    "additionalProperties": False,
}


def pairs(paths, forms=tuple(FORMATS)):
    """Return (format, path) pairs: the first format with every path, the others with chat paths.

    Pairs of the other formats are marked `full`, except with chat completions.
    """
    return [
        pytest.param(form, path, marks=() if form == forms[0] or path == CHAT else pytest.mark.full)
        for form, path in itertools.product(forms, paths)
        if form == forms[0] or path in TALKING  # other APIs do not parse turns
    ]


def possible(form, path, saying):
    """Return the parts of a turn that this chat format and this API can express."""
    parts = dict(SAYINGS[saying])
    if FORMATS[form].thought is None:
        parts.pop("thought", None)
    if "calls" in parts:
        parts["calls"] = parts["calls"][: FORMATS[form].most] if path in CALLING else []
    return parts


@pytest.mark.parametrize(("form", "path"), pairs(APIS), indirect=["form"])
@pytest.mark.parametrize("saying", SAYINGS)
@pytest.mark.some(6)
async def test_whole_and_streamed_answers_equal_the_models_output(app, speaker, form, path, saying):
    api = APIS[path]
    parts = possible(form, path, saying)
    speaker.text = FORMATS[form].turn(**parts)
    calls = parts.get("calls", [])
    more = {"thinks": True} if path in TALKING and form == "hermes" else {}
    body = api.body(limit=400, tools=TOOLS if calls else None, **more)
    if path not in TALKING:  # the whole turn is text
        parts = {"text": speaker.text}
    whole = await api.ask(app, body)
    app.engine.reset_cache()
    streamed = await api.ask(app, body, streams=True)
    assert lasting(streamed) == lasting(whole)
    said = api.said(whole)
    assert (said.thought.strip(), said.text) == (parts.get("thought", ""), parts.get("text", ""))
    assert [(name, json.loads(text)) for name, text in said.calls] == calls
    assert said.reason == ("tool_calls" if calls else "stop")


@pytest.mark.parametrize("path", CALLING)
async def test_reasoning_text_and_tool_calls_are_in_the_apis_fields(app, speaker, path):
    api = APIS[path]
    speaker.text = FORMATS["hermes"].turn(**SAYINGS["all"])
    answer = await api.ask(app, api.body(tools=TOOLS, thinks=True))
    assert lasting(api.told(answer)) == api.parts(
        "It may rain.", "Let me look.", "weather", ARGUMENTS
    )


@pytest.mark.parametrize(("form", "path"), pairs(APIS), indirect=["form"])
async def test_a_truncated_answer_has_finish_reason_length(app, speaker, form, path, scale):
    """The limit ends the response in the reasoning, in the text, in a call's name or in its
    arguments.
    """
    api = APIS[path]
    parts = possible(form, path, "all")
    speaker.text = FORMATS[form].turn(**parts)
    more = {"thinks": True} if path in TALKING and form == "hermes" else {}
    more |= {"tools": TOOLS} if path in CALLING else {}
    tokens = len(app.engine.tokenizer.encode(speaker.text, False))
    shown = []
    limits = (1, tokens - tokens // 8, tokens // 3, tokens // 2)
    for limit in sorted(limits[: scale(2, 4)]):
        body = api.body(**more, limit=limit)
        answers = []
        for streams in (False, True):
            app.engine.reset_cache()
            answers.append(await api.ask(app, body, streams=streams))
        assert lasting(answers[0]) == lasting(answers[1])
        said = api.said(answers[0])
        assert (said.reason, said.output) == ("length", limit)
        if path in TALKING:
            # An incomplete marker is text.
            assert all(part.strip() in speaker.text for part in (said.thought, said.text))
        shown = said.calls
    if path in ("/v1/chat/completions", "/v1/responses"):  # the others show complete calls only
        ((name, arguments),) = shown
        assert name == "weather"
        assert json.dumps(ARGUMENTS, ensure_ascii=False).startswith(arguments)
    else:
        assert shown in ([], [("weather", "{}")])


@pytest.mark.parametrize("path", [path for path in APIS if path != "/v1/responses"])
async def test_a_stop_string_ends_the_text(app, speaker, path):
    """If several stop strings end at the same position, the longest one counts."""
    api = APIS[path]
    speaker.text = "One, two, three."
    for streams, (stops, text, stop) in itertools.product(
        (False, True), ((["four", "two", ", two"], "One", ", two"), (["four"], speaker.text, None))
    ):
        answer = await api.ask(app, api.body(stop=stops), streams=streams)
        assert api.said(answer)[1:4] == (text, [], "stop")
        assert api.stopped_by(answer) in ("", stop)


@pytest.mark.parametrize("form", ["hermes", "words", "gemma", "lfm2"], indirect=True)
async def test_a_tool_call_cut_by_a_stop_string_is_not_a_call(app, speaker, form):
    api = APIS[CHAT]
    speaker.text = FORMATS[form].turn(calls=[("weather", ARGUMENTS)])
    cut, whole = [
        api.said(await api.ask(app, api.body(tools=TOOLS, stop=[stop])))
        for stop in ("Kö", speaker.text[speaker.text.rindex("<") :])
    ]
    assert (cut.calls, cut.reason) == ([("weather", '{"city": "')], "stop")
    assert (json.loads(whole.calls[0][1]), whole.reason) == (ARGUMENTS, "tool_calls")


@pytest.fixture
def own_logits(monkeypatch, speaker):
    """The original random logits of the fake runner."""
    monkeypatch.setattr(fake_runner, "token_logits", OWN_LOGITS)


@pytest.mark.parametrize("path", [path for path in APIS if path != "/v1/messages"])
async def test_a_seed_reproduces_an_answer(app, own_logits, path):
    api = APIS[path]
    said = [
        api.said(await api.ask(app, api.body(seed=seed, temperature=1, limit=24)))
        for seed in (5, 5, 6)
    ]
    first, again, other = (one.thought + one.text for one in said)
    assert first == again != other


@pytest.mark.parametrize("path", APIS)
async def test_a_json_schema_constrains_the_text(app, speaker, path):
    api = APIS[path]
    off = {}
    on = {}
    if path in TALKING:
        off = {"thinks": False}
        on = {"thinks": True}
    speaker.text = "no JSON"
    for streams in (False, True):
        said = api.said(await api.ask(app, api.body(form=SEVEN, limit=60, **off), streams=streams))
        assert (json.loads(said.text), said.reason) == ({"n": 7}, "stop")
    if on:
        speaker.text = FORMATS["hermes"].turn(thought="Hm.", text='{"n": 7}')
        said = api.said(await api.ask(app, api.body(form=SEVEN, **on)))
        assert (said.thought.strip(), json.loads(said.text)) == ("Hm.", {"n": 7})


LARGE = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(2000)}}
LARGE_AT_LAST = {
    "type": "object",
    "properties": {"a": {"const": "x"}, "b": LARGE},
    "required": ["a", "b"],
}


@pytest.mark.parametrize(
    ("path", "large"),
    each_once(APIS, [(LARGE, '{"p1":"'), (LARGE_AT_LAST, '{"a":"x","b":{"p1":"')]),
)
@pytest.mark.some(3)
async def test_a_grammar_that_grows_too_large_fails_only_its_request(app, speaker, path, large):
    """The error is a status 400 before the first byte, and an event with the same error after it."""
    api = APIS[path]
    schema, text = large
    speaker.text = text
    body = api.body(form=schema, limit=60, **({"thinks": False} if path in TALKING else {}))
    whole = await app.post(path, json={**body, "stream": False})
    assert whole.status_code == 400
    assert "the grammar's parser failed" in error_text(path, whole.content)
    error = whole.json()["error"]
    streamed = await app.post(path, json={**body, "stream": True})
    if schema is LARGE:
        assert (streamed.status_code, streamed.json()) == (400, whole.json())
        return
    assert streamed.status_code == 200
    events = api.events(streamed)
    assert len(events) > len(text) // 2
    if path == "/v1/responses":
        assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
        assert {name: events[-2][name] for name in ("code", "message", "param")} == {
            name: error[name] for name in ("code", "message", "param")
        }
        told = {"code": "invalid_prompt", "message": error["message"]}
        assert events[-1]["response"]["error"] == told
    else:
        assert events[-1] == whole.json()


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("streams", [False, True])
async def test_a_schema_that_matches_nothing_is_refused(app, speaker, path, streams):
    """The request fails with status 400, also if the model may think before its answer."""
    api = APIS[path]
    for more in ({"thinks": False}, {"thinks": True}) if path in TALKING else ({},):
        body = {**api.body(form={"$ref": "#"}, limit=60, **more), "stream": streams}
        answer = await app.post(path, json=body)
        assert answer.status_code == 400
        assert "json_schema matches no value, because its $ref" in error_text(path, answer.content)


@pytest.mark.parametrize("path", CALLING)
async def test_a_tool_schema_that_matches_nothing_is_refused(app, speaker, path):
    api = APIS[path]
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"$ref": "#"}}}
    answer = await app.post(path, json=api.body(tools=[tool]))
    assert answer.status_code == 400
    assert "matches no value, because its $ref" in error_text(path, answer.content)


@pytest.mark.parametrize("path", CHOOSING)
async def test_tools_and_a_schema_allow_a_call_or_a_matching_answer(app, speaker, path):
    """Agents send both when they want the final answer to match a schema."""
    api = APIS[path]
    for choice, text, calls in (
        ("auto", CALL, 1),
        ("auto", '{"n": 7}', 0),
        ("none", '{"n": 7}', 0),
    ):
        speaker.text = text
        said = api.said(
            await api.ask(app, api.body(tools=TOOLS, form=SEVEN, choice=choice, thinks=True))
        )
        assert len(said.calls) == calls
        assert calls or json.loads(said.text) == {"n": 7}


@pytest.mark.parametrize(("form", "path"), pairs(CHOOSING, CALL_FORMATS), indirect=["form"])
@pytest.mark.some(2)
async def test_tool_choice_is_enforced(app, speaker, form, path):
    api = APIS[path]
    more = {"tools": TOOLS, "thinks": True} if form == "hermes" else {"tools": TOOLS}

    async def called(choice, *, one=False):
        body = api.body(**more, choice=choice, limit=300)
        return api.said(await api.ask(app, api.one_call(body) if one else body))

    speaker.text = FORMATS[form].turn(calls=[("weather", ARGUMENTS)] * 2)
    assert [name for name, _ in (await called("auto")).calls] == ["weather"] * 2
    assert {name for name, _ in (await called("clock")).calls} == {"clock"}
    for choice in ("auto", "required", "clock"):
        assert len((await called(choice, one=True)).calls) == 1
    refused = await called("none")
    assert (refused.calls, FORMATS[form].call in refused.text) == ([], False)
    speaker.text = FORMATS[form].turn(text="No.")
    assert (await called("auto"))[1:4] == ("No.", [], "stop")


@pytest.mark.parametrize(("form", "path"), pairs(CHOOSING, CALL_FORMATS), indirect=["form"])
@pytest.mark.some(3)
async def test_a_required_call_matches_its_schema_for_any_logits(
    app, own_logits, form, path, scale
):
    api = APIS[path]
    ended = 0
    functions = [
        WEATHER,
        {**CLOCK, "parameters": {"type": "object", "additionalProperties": False}},
    ]
    validators = {one["name"]: jsonschema_rs.validator_for(one["parameters"]) for one in functions}
    tools = [{"type": "function", "function": one} for one in functions]
    for seed in range(40):
        more = {} if path == "/v1/messages" else {"seed": seed}
        body = api.one_call(
            api.body(tools=tools, choice="required", temperature=1, limit=300, **more)
        )
        said = api.said(await api.ask(app, body))
        if said.reason != "length":
            ended += 1
            ((name, arguments),) = said.calls
            validators[name].validate(json.loads(arguments))
        if ended == scale(1, 2):
            return
    raise AssertionError("too few calls finished")


@pytest.mark.parametrize(("form", "path"), pairs(CALLING), indirect=["form"])
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.some(6)
async def test_tool_results_hit_the_generated_tokens_in_the_cache(
    app, speaker, form, path, streams
):
    """The next prompt contains a tool call as the model generated it, not as the template would
    format it.
    """
    api = APIS[path]
    model = FORMATS[form]
    written = 0
    body = api.body(tools=TOOLS, **({"thinks": True} if form == "hermes" else {}))
    values = (
        dict(reversed(ARGUMENTS.items())) if form == "gemma" else ARGUMENTS
    )  # the template sorts arguments
    for text in (
        model.turn(text="Let me look.", calls=[("weather", values)]).replace('": ', '":'),
        model.turn(calls=[("weather", ARGUMENTS)]),
        model.turn(text="It rains."),
    ):
        speaker.text = text
        answer = await api.ask(app, body, streams=streams)
        said = api.said(answer)
        # The template with channels shows text before a call as reasoning.
        assert said.cached >= (written - 17 if form != "harmony" else 0)
        written = said.prompt + said.output
        if said.calls:
            body = api.next_turn(body, answer, ["Rain."])
    assert (said.text, said.cached > 0) == ("It rains.", True)


BARE = json.dumps({"name": "weather", "arguments": ARGUMENTS}, ensure_ascii=False)
FENCED = f"```json\n{json.dumps(json.loads(BARE), indent=2, ensure_ascii=False)}\n```"


@pytest.mark.parametrize(("form", "path"), pairs(CALLING, ("hermes", "words")), indirect=["form"])
@pytest.mark.parametrize("text", [BARE, FENCED], ids=["bare", "fenced"])
@pytest.mark.some(4)
async def test_a_tool_call_without_markers_is_recognized(app, speaker, form, path, text):
    """Small models omit the markers. The generated tokens are kept, so the next turn finds them in
    the cache.
    """
    api = APIS[path]
    body = api.body(tools=TOOLS, limit=300, **({"thinks": True} if form == "hermes" else {}))
    speaker.text = text
    whole = await api.ask(app, body)
    app.engine.reset_cache()
    streamed = await api.ask(app, body, streams=True)
    assert lasting(streamed) == lasting(whole)
    said = api.said(streamed)
    assert [(name, json.loads(given)) for name, given in said.calls] == [("weather", ARGUMENTS)]
    assert (said.text, said.reason) == ("", "tool_calls")
    written = said.prompt + said.output
    body = api.next_turn(body, streamed, ["Rain."])
    speaker.text = "It rains."
    found = api.said(await api.ask(app, body))
    assert (found.text, found.cached >= written - 17) == ("It rains.", True)
    assert text in app.engine.tokenizer.decode(speaker.seen)


@pytest.mark.parametrize("path", CALLING)
async def test_an_example_of_a_call_stays_text(app, speaker, path, scale):
    api = APIS[path]
    texts = (f"{FENCED}\nThat calls it.", f"Write {BARE}", BARE.replace("weather", "rain"))
    for text in texts:
        speaker.text = text
        for streams in (True, False)[: scale(1, 2)]:
            said = api.said(await api.ask(app, api.body(tools=TOOLS, limit=300), streams=streams))
            assert (said.text, said.calls, said.reason) == (text, [], "stop")


_MADE = {form: FORMATS[form].calls([("weather", ARGUMENTS)]) for form in FORMATS}
# Text in the prompt after a result was sent back, and after the arguments of the call were
# edited.
SHOWN = {
    "words": (
        f"<|assistant|>{_MADE['words']}<|end|><|user|><tool_response>\nRain.\n</tool_response><|end|>",
        '{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}',
    ),
    "gemma": (
        f'model\n{_MADE["gemma"]}<|tool_response>response:weather{{value:<|"|>Rain.<|"|>}}<tool_response|>',
        '<|tool_call>call:weather{city:<|"|>Bonn<|"|>,days:2}<tool_call|>',
    ),
    "lfm2": (
        f"assistant\n{_MADE['lfm2']}<|im_end|>\n<|im_start|>tool\n<|tool_response_start|>Rain.<|tool_response_end|>",
        '<|tool_call_start|>[weather(city="Bonn", days=2)]<|tool_call_end|>',
    ),
}


@pytest.mark.parametrize("form", SHOWN, indirect=True)
async def test_tool_results_use_the_models_format_and_edited_calls_are_not_replayed(
    app, speaker, form
):
    api = APIS[CHAT]
    model = FORMATS[form]
    body = api.body(tools=TOOLS)
    speaker.text = model.turn(calls=[("weather", ARGUMENTS)])
    answer = await api.ask(app, body)
    body = api.next_turn(body, answer, ["Rain."])
    speaker.text = ""
    found = []
    for _ in range(2):
        said = api.said(await api.ask(app, body))
        found.append(
            (app.engine.tokenizer.decode(speaker.seen, skip_special_tokens=False), said.cached)
        )
        body["messages"][1]["tool_calls"][0]["function"]["arguments"] = (
            '{"city": "Bonn", "days": 2}'
        )
    for (prompt, _), shown in zip(found, SHOWN[form], strict=True):
        assert shown in prompt
    assert found[1][1] < found[0][1]
    if form == "words":
        assert found[0][0].startswith("<|system|>You can call tools.")
        assert (
            '{"name": "weather", "description": "Weather of a city", "parameters": {' in found[0][0]
        )


@pytest.mark.parametrize("path", TALKING)
async def test_thinking_can_be_turned_off(app, speaker, path):
    api = APIS[path]
    speaker.text = FORMATS["hermes"].turn(thought="One, two.", text="Three.")
    on, off = [api.said(await api.ask(app, api.body(thinks=thinks))) for thinks in (True, False)]
    assert (on.thought.strip(), on.text, off.thought) == ("One, two.", "Three.", "")
    assert off.prompt > on.prompt  # the closed block is in the prompt


@pytest.mark.parametrize("path", [path for path in ASKED if path != "/cache/reset"])
async def test_an_unknown_model_returns_404(app, path):
    answer = await app.post(path, json={**asked(path, "hello"), "model": "nobody"})
    assert (answer.status_code, "nobody" in error_text(path, answer.content)) == (404, True)
    if path in {"/v1/messages", "/completion"}:
        assert answer.json()["error"]["type"] == "not_found_error"


@pytest.fixture
def ended(monkeypatch):
    """List of the errors (or None) with which requests have ended."""
    found = []
    finish = RequestHandle._finish

    def finish_and_say(handle, result, error):
        finish(handle, result, error)
        found.append(error)

    monkeypatch.setattr(RequestHandle, "_finish", finish_and_say)
    return found


EARLY = [(path, streams, 1) for path in APIS for streams in (False, True)]
EARLY += [(path, True, 3) for path in ("/v1/chat/completions", "/v1/completions")]


@pytest.mark.parametrize(("path", "streams", "n"), EARLY)
@pytest.mark.some(3)
async def test_an_error_at_the_first_token_is_reported(app, speaker, ended, path, streams, n):
    """The client gets an error status or an error event. The request releases all its resources."""
    api = APIS[path]
    speaker.text = "Zebras and others."
    engine = app.engine
    runner = runner_of(engine)
    go = threading.Event()
    (broken,) = engine.tokenizer.codec.encode("Z", False)
    body = {**api.body(limit=9), "stream": streams, **({"n": n} if n > 1 else {})}
    hold_passes(engine, go)
    try:
        task = asyncio.ensure_future(app.post(path, json=body))
        while not engine.num_running():
            await asyncio.sleep(0.001)
        runner.nan_for = {broken}  # after the first token all logits are NaN
        go.set()
        # The event loop is blocked until then, so that it sees the token and the error together.
        wait_until(lambda: len(ended) == n, "the error")
        answer = await asyncio.wait_for(task, 30)
    finally:
        runner.nan_for = set()
        runner.on_forward = None
    assert None not in ended
    if streams and answer.status_code == 200:
        assert api.went_wrong(api.events(answer))
    else:
        assert answer.status_code == 500
        assert error_text(path, answer.content)
    state = app.state
    stats = engine.paged_stats()
    assert (state.admission.sequences, state.admission.tokens, len(state.admission.admitted)) == (
        0,
        0,
        0,
    )
    # The cache-miss report drops requests that left nothing in the cache.
    assert (await app.get("/v1/requests")).json()["data"] == []
    assert (state.doctor.history.nbytes, state.remembered.num_bytes) == (0, 0)
    assert (stats["used_blocks"], stats["num_running"], stats["num_waiting"]) == (0, 0, 0)
    assert not engine._core._live
    assert (await app.post(path, json={**api.body(limit=5), "stream": False})).status_code == 200


@pytest.mark.parametrize("path", APIS)
async def test_an_error_after_the_first_token_ends_the_stream(app, speaker, path):
    """The error hides internal details. A response that is not streamed has status 500 instead."""
    api = APIS[path]
    speaker.text = "Hello. " * 40
    begun = threading.Event()
    passes = itertools.count()

    async def noting(scope, receive, send):
        async def sent(message):
            await send(message)
            if message.get("body"):
                begun.set()

        await app._transport.app(scope, receive, sent)

    def fail(batch):
        if next(passes) == 100:
            assert begun.wait(30) or not streams
            raise RuntimeError("a secret of the runner")

    for streams in (True, False):
        passes = itertools.count()
        runner_of(app.engine).on_forward = fail
        async with app_client(noting) as client:
            answer = await client.post(path, json={**api.body(limit=300), "stream": streams})
        runner_of(app.engine).on_forward = None
        assert (answer.status_code, "secret" in answer.text) == (200 if streams else 500, False)
        if streams:
            events = api.events(answer)
            assert len(events) > 2
            assert api.went_wrong(events)
        else:
            assert error_text(path, answer.content)
        begun.set()
    assert (await app.post(path, json={**api.body(limit=5), "stream": False})).status_code == 200
    assert app.engine.paged_stats()["used_blocks"] == 0


def half_utf_16(body):
    return body.encode("utf-16")[:-2].decode(errors="surrogateescape")


# Name, error code in OpenAI's format ("" for any), and the change to a valid body.
HOSTILE = [
    ("deep", "invalid_json", lambda body: body.replace('"hello"', "[" * 100_000)),
    ("not UTF-8", "invalid_json", lambda body: body.replace("hello", "\udcff")),
    ("half UTF-16", "invalid_json", half_utf_16),
    ("a surrogate", "", lambda body: body.replace("hello", "\\ud800")),
    ("NaN", "", lambda body: body[:-1] + ', "x": NaN}'),
    ("a list", "", lambda body: f"[{body}]"),
    (
        "many lists",
        "request_too_large",
        lambda body: body.replace('"hello"', "[" + "[]," * 300_000 + "1]"),
    ),
    (
        "many numbers",
        "request_too_large",
        lambda body: body.replace('"hello"', "[" + "1," * 2**20 + "1]"),
    ),
    ("no end", "invalid_json", lambda body: body[:-1]),
    ("a part of a word", "invalid_json", lambda body: "nul"),
    ("nothing", "", lambda body: ""),
]


@pytest.mark.parametrize("path", TEXTS)
async def test_hostile_bodies_are_refused(app, path):
    for name, code, make in HOSTILE:
        body = make(json.dumps(asked(path, "hello")))
        answer = await app.post(path, content=body.encode(errors="surrogateescape"))
        assert (answer.status_code, len(error_text(path, answer.content)) < 400) == (400, True), (
            name,
            answer.text,
        )
        error = answer.json()["error"]
        if code and "param" in error:
            assert error["code"] == code, (name, answer.text)


@pytest.mark.parametrize("path", CALLING)
async def test_deep_schemas_and_arguments_are_refused(app, path):
    api = APIS[path]
    deep = {}
    for _ in range(200):
        deep = {"properties": {"a": deep}}
    answer = await app.post(
        path,
        json=api.body(tools=[{"type": "function", "function": {"name": "x", "parameters": deep}}]),
    )
    assert (answer.status_code, len(error_text(path, answer.content)) < 400) == (400, True)


@pytest.mark.parametrize("path", REFUSED)
async def test_invalid_fields_are_refused_by_name(app, path):
    """The error has the API's format, names the field and is shorter than 500 characters."""
    for fields, name, *words in REFUSED[path]:
        answer = await app.post(
            path, content=json.dumps({**asked(path, "hello", model=MODEL), **fields})
        )
        shown = {field: str(value)[:80] for field, value in list(fields.items())[:3]}
        assert answer.status_code == 400, (shown, answer.text)
        message = error_text(path, answer.content)
        error = answer.json()["error"]
        if "param" in error:
            assert error["type"] == "invalid_request_error"
            param = error["param"] or ""
            assert name in (param, param.partition(".")[0]), (shown, error)
        else:
            assert name in message, (shown, message)
        assert all(word in message for word in words), (shown, message)
        assert len(message) < 500


@pytest.mark.parametrize("path", TAKEN)
async def test_fields_without_effect_are_accepted(app, speaker, path):
    api = APIS[path]
    plain = await api.ask(app, api.body())
    for fields in TAKEN[path]:
        assert api.said(await api.ask(app, {**api.body(), **fields}))[:4] == api.said(plain)[:4], (
            fields
        )
