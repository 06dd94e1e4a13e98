"""Tests of reasoning budgets over HTTP: each API's own field, levels, defaults and precedence."""

from contextlib import asynccontextmanager

import pytest

from helpers.engine.thinking_model import ANSWER, THOUGHT, thinking
from helpers.pairwise import each_once
from helpers.server.compat_apis import APIS
from helpers.server.live_servers import app_client
from helpers.server.scripted_model import ASK
from kvboost_edge.errors import ConfigError
from kvboost_edge.server.api.schemas.reasoning_effort import FRACTIONS
from kvboost_edge.server.app import create_app
from kvboost_edge.server.serve_options import options_from
from kvboost_edge.server.settings import ServerSettings

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
OLLAMA = "/api/chat"
COMPLETIONS = "/v1/completions"
LLAMA = "/completion"
REPEATED = THOUGHT * 40
LIMIT = 200
NAMES = (
    "reasoning_budget",
    "reasoning_budget_tokens",
    "thinking_budget_tokens",
    "thinking_token_budget",
)


def anthropic(budget):
    return {"thinking": {"type": "enabled", "budget_tokens": budget}}


FIELDS = [
    *((CHAT, lambda budget, name=name: {name: budget}) for name in NAMES),
    *((COMPLETIONS, lambda budget, name=name: {name: budget}) for name in NAMES),
    *((RESPONSES, lambda budget, name=name: {name: budget}) for name in NAMES[:2]),
    *((LLAMA, lambda budget, name=name: {name: budget}) for name in NAMES[1:3]),
    (MESSAGES, anthropic),
    (OLLAMA, lambda budget: {"think": budget}),
    ("/api/generate", lambda budget: {"think": budget}),
]
LEVELS = [
    (CHAT, lambda level: {"reasoning_effort": level}),
    (RESPONSES, lambda level: {"reasoning": {"effort": level}}),
    (
        MESSAGES,
        lambda level: {"thinking": {"type": "adaptive"}, "output_config": {"effort": level}},
    ),
    (OLLAMA, lambda level: {"think": level}),
]


@asynccontextmanager
async def serving(patch, name="markers", **settings):
    with thinking(patch, name, max_context=1000) as (engine, thinker):
        app = create_app(engine, ServerSettings(model_name="fake", **settings))
        async with app_client(app) as client:
            client.thinker = thinker
            client.engine = engine
            yield client


def counted(answer):
    """Return the number of reasoning tokens that the response of this API reports."""
    usage = answer.get("usage", {})
    for details, name in (
        ("completion_tokens_details", "reasoning_tokens"),
        ("output_tokens_details", "reasoning_tokens"),
        ("output_tokens_details", "thinking_tokens"),
    ):
        if name in usage.get(details, {}):
            return usage[details][name]
    return answer.get("thinking_count", answer.get("tokens_reasoning"))


async def said(app, path, **fields):
    api = APIS[path]
    answer = await api.ask(app, api.body(limit=fields.pop("limit", LIMIT)) | fields)
    return api.said(answer)


@pytest.mark.parametrize(("place", "name"), each_once(FIELDS, ["opened", "gemma", "harmony"]))
async def test_each_api_has_a_field_for_the_budget(monkeypatch, place, name, scale):
    path, field = place
    async with serving(monkeypatch, name) as app:
        api = APIS[path]
        cases = [(False, 1), (True, 40), (False, 40), (True, 1)]
        for streams, budget in cases[: scale(2, 4)]:
            body = {**api.body(limit=LIMIT), **field(budget)}
            if path in (COMPLETIONS, LLAMA):  # these return raw text without special tokens
                body["prompt"] = app.engine.tokenizer.encode_chat(ASK)
            answer = await api.ask(app, body, streams=streams)
            found = api.said(answer)
            assert found.reason == "stop"
            if path in (COMPLETIONS, LLAMA):
                assert REPEATED[:budget] in found.text
                assert REPEATED[: budget + 1] not in found.text
                assert found.text.endswith(ANSWER)
                assert counted(answer) == budget
            else:
                assert (found.thought, found.text) == (REPEATED[:budget], ANSWER)
                assert counted(answer) == budget
            app.engine.reset_cache()


@pytest.mark.parametrize(("path", "field"), [one for one in FIELDS if one[0] not in (MESSAGES,)])
@pytest.mark.some(3)
async def test_budget_0_ends_reasoning_and_minus_1_is_unlimited(monkeypatch, path, field):
    async with serving(monkeypatch, "opened") as app:
        api = APIS[path]
        app.thinker.thinks = 100
        body = api.body(limit=LIMIT)
        if path in (COMPLETIONS, LLAMA):
            body["prompt"] = app.engine.tokenizer.encode_chat(ASK)
        none, all_ = [api.said(await api.ask(app, {**body, **field(budget)})) for budget in (0, -1)]
        assert "a" not in none.thought + none.text.removesuffix(ANSWER)
        assert REPEATED[:100] in (all_.thought, all_.text.removesuffix(ANSWER))


@pytest.mark.parametrize(("path", "field"), LEVELS)
async def test_an_effort_level_is_a_fraction_of_max_tokens(monkeypatch, path, field, scale):
    async with serving(monkeypatch, "opened") as app:
        for level in ("medium", "low", "high")[: scale(1, 3)]:
            found = await said(app, path, **field(level))
            assert len(found.thought) == int(FRACTIONS[level] * LIMIT)
        # Without a limit, the share refers to the free part of the context.
        api = APIS[path]
        limit = 5000 if path == MESSAGES else None
        body = {**api.body(), **field("low"), **({"max_tokens": limit} if limit else {})}
        found = api.said(await api.ask(app, body))
        assert len(found.thought) == int(FRACTIONS["low"] * (1000 - found.prompt))


@pytest.mark.parametrize(("path", "field"), LEVELS)
async def test_effort_levels_are_passed_to_templates_that_have_them(
    monkeypatch, path, field, scale
):
    async with serving(monkeypatch, "levels", reasoning_budget=("7",)) as app:
        app.thinker.thinks = 180
        for level in ("high", "low", "medium")[: scale(1, 3)]:
            found = await said(app, path, **field(level))
            assert found.thought == REPEATED[:180]
            variables = {"reasoning_effort": level}
            prompt = app.engine.tokenizer.encode_chat(ASK, True, variables)
            assert found.prompt == len(prompt)


async def test_rare_effort_levels_map_to_the_nearest_one(monkeypatch):
    """ "minimal" becomes "low"; "xhigh" and "max" become "high". The request's own template
    variables have precedence.
    """
    async with serving(monkeypatch, "levels") as app:
        app.thinker.thinks = 30
        for level, shown in (("minimal", "low"), ("xhigh", "high"), ("max", "high")):
            found = await said(app, CHAT, reasoning_effort=level)
            prompt = app.engine.tokenizer.encode_chat(ASK, True, {"reasoning_effort": shown})
            assert found.prompt == len(prompt)
            found = await said(
                app,
                CHAT,
                reasoning_effort=level,
                chat_template_kwargs={"reasoning_effort": "special"},
            )
            assert found.prompt == len(prompt) - len(shown) + len("special")


@pytest.mark.parametrize("name", ["opened", "levels", "harmony"])
async def test_effort_none_ends_reasoning_the_template_cannot_disable(monkeypatch, name):
    async with serving(monkeypatch, name) as app:
        found = await said(app, CHAT, reasoning_effort="none")
        assert (found.thought.strip(), found.text) == ("", ANSWER)


async def test_request_effort_model_and_server_limits_in_order(monkeypatch):
    """The request's budget has precedence, then the budget of its effort level, the model's and the
    server's.
    """
    both = ("50", "fake=30")
    async with serving(monkeypatch, "opened", reasoning_budget=both) as app:
        assert len((await said(app, CHAT)).thought) == 30
        assert len((await said(app, CHAT, reasoning_effort="low")).thought) == 40
        found = await said(app, CHAT, reasoning_effort="low", reasoning_budget=10)
        assert len(found.thought) == 10
        app.thinker.thinks = 90
        assert len((await said(app, CHAT, reasoning_budget=-1)).thought) == 90
        for path, more in ((OLLAMA, {}), (RESPONSES, {}), (MESSAGES, anthropic(20))):
            assert len((await said(app, path, **more)).thought) == (20 if more else 30)
    async with serving(monkeypatch, "opened", reasoning_budget=("50", "other=30")) as app:
        assert len((await said(app, CHAT)).thought) == 50
        # Text completions are not chats: default budgets do not apply.
        app.thinker.thinks = 90
        prompt = app.engine.tokenizer.encode_chat(ASK)
        assert REPEATED[:90] in (await said(app, COMPLETIONS, prompt=prompt)).text
    async with serving(monkeypatch, "opened", reasoning_budget=("50", "fake=-1")) as app:
        app.thinker.thinks = 90
        assert len((await said(app, CHAT)).thought) == 90


async def test_the_requests_budget_message_overrides_the_servers(monkeypatch):
    settings = {"reasoning_budget": ("4",), "reasoning_budget_message": " So."}
    async with serving(monkeypatch, "opened", **settings) as app:
        for fields, message in (
            ({}, " So."),
            ({"reasoning_budget_message": " Now."}, " Now."),
            ({"reasoning_budget_message": ""}, ""),
            ({"reasoning_budget_tokens": 4, "reasoning_budget_message": " Now."}, " Now."),
        ):
            assert (await said(app, CHAT, **fields)).thought == REPEATED[:4] + message
        assert (await said(app, RESPONSES)).thought == REPEATED[:4] + " So."
        found = await said(app, RESPONSES, reasoning_budget_message=" Now.")
        assert found.thought == REPEATED[:4] + " Now."


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, OLLAMA])
async def test_forced_tokens_are_cache_hits_of_the_next_turn(monkeypatch, path):
    """Forced tokens are found in the cache like the tokens that the model chose."""
    async with serving(monkeypatch, "markers", reasoning_budget=("40",)) as app:
        api = APIS[path]
        body = api.body(limit=LIMIT, thinks=True) | (anthropic(40) if path == MESSAGES else {})
        if path == RESPONSES:
            body["reasoning_budget"] = 40
        app.thinker.thought = f"\n{REPEATED}"  # as the template writes it
        first = await api.ask(app, body)
        found = api.said(first)
        assert found.thought == REPEATED[:39]
        field = "input" if path == RESPONSES else "messages"
        content = {
            CHAT: lambda: [first["choices"][0]["message"]],
            RESPONSES: lambda: first["output"],
            MESSAGES: lambda: [{"role": "assistant", "content": first["content"]}],
            OLLAMA: lambda: [first["message"]],
        }[path]()
        body[field] = [*body[field], *content, {"role": "user", "content": "And now?"}]
        second = api.said(await api.ask(app, body))
        assert second.cached >= (found.prompt + found.output - 1) // 16 * 16


@pytest.mark.parametrize("path", [CHAT, RESPONSES, OLLAMA])
async def test_a_budget_is_refused_if_the_reasoning_markers_are_unknown(app, speaker, path):
    """The template has no reasoning markers. Fields that also enable thinking, and default levels,
    are still accepted.
    """
    app.engine.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    api = APIS[path]
    field = {"think": 5} if path == OLLAMA else {"reasoning_budget": 5}
    answer = await app.post(path, json={**api.body(), **field, "stream": False})
    assert answer.status_code == 400
    assert "reasoning_budget needs the markers" in answer.text
    for other, more in ((MESSAGES, anthropic(5)), (CHAT, {"reasoning_effort": "low"})):
        answer = await app.post(other, json={**APIS[other].body(limit=5), **more})
        assert answer.status_code == 200


async def test_contradictory_fields_are_refused_by_name(monkeypatch):
    async with serving(monkeypatch, "markers") as app:
        for fields, param, problem in (
            ({"reasoning_budget": -2}, "reasoning_budget", "greater than or equal to -1"),
            (
                {"reasoning_budget": 1, "thinking_token_budget": 1},
                "thinking_token_budget",
                "is also given",
            ),
            ({"reasoning_budget_message": "So."}, "reasoning_budget_message", "no effect"),
            ({"reasoning_effort": "much"}, "reasoning_effort", "low"),
            (
                {"reasoning_budget": 3, "guided_regex": "a+"},
                "reasoning_budget",
                "applies from the first token",
            ),
            (
                {"reasoning_budget": 3, "reasoning_budget_message": "</think>"},
                "reasoning_budget_message",
                "contains '</think>'",
            ),
        ):
            answer = await app.post(CHAT, json={"messages": ASK, **fields})
            error = answer.json()["error"]
            assert answer.status_code == 400
            assert not param or error["param"] == param
            assert problem in error["message"]
        raw = {"model": "fake", "prompt": "x", "raw": True, "think": 0}
        answer = await app.post("/api/generate", json=raw)
        assert answer.status_code == 400
        assert "think needs the model's chat template" in answer.text


async def test_a_default_budget_yields_to_structured_output(monkeypatch):
    async with serving(monkeypatch, "markers", reasoning_budget=("3",)) as app:
        answer = await app.post(
            CHAT, json={"messages": ASK, "guided_regex": "[a-z]{5}", "max_tokens": 9}
        )
        assert answer.status_code == 200
        assert len(answer.json()["choices"][0]["message"]["content"]) == 5


@pytest.mark.parametrize(
    "given", [("x",), ("=5",), ("5", "6"), ("-2",), ("a=1", "a=2"), ("1e3",), ("",), ("a=",)]
)
def test_an_invalid_default_is_refused(given):
    with pytest.raises(ConfigError, match="reasoning_budget"):
        ServerSettings(reasoning_budget=given)


def test_the_command_line_checks_model_names():
    models = ["first,alias=one", "second=two"]
    flags = {"model": models, "reasoning_budget": ["9", "alias=5", "second=-1"]}
    settings = options_from(flags).settings
    budgets = [settings.reasoning_budget_of(name) for name in ("first", "second", "other")]
    assert budgets == [5, None, 9]
    with pytest.raises(ConfigError, match="names the model 'third', which is not one of"):
        options_from({"model": models, "reasoning_budget": ["third=5"]})
