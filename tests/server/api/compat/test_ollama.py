"""Tests of features specific to Ollama's routes: raw prompts, tool results matched by order and
name, model names, and loading.
"""

import pytest

from helpers.server.compat_apis import APIS
from helpers.server.live_servers import app_client
from helpers.server.scripted_model import ASK, CALL, FORMATS, TOOLS
from kvboost_edge import __version__
from kvboost_edge.server.app import create_app
from kvboost_edge.server.settings import ServerSettings

CHAT = APIS["/api/chat"]
GENERATE = APIS["/api/generate"]


async def test_tool_results_match_calls_by_order_and_by_name(app, speaker):
    speaker.text = CALL
    first = await CHAT.ask(app, CHAT.body(tools=TOOLS))
    called = [*ASK, first["message"]]
    speaker.text = "Rain."
    for result in (
        {},
        {"tool_name": "weather"},
        {"tool_call_id": first["message"]["tool_calls"][0]["id"]},
    ):
        body = {
            **CHAT.body(tools=TOOLS),
            "messages": [*called, {"role": "tool", "content": "rain", **result}],
        }
        second = await CHAT.ask(app, body)
        assert second["message"]["content"] == "Rain."
        assert second["prompt_eval_count"] > first["prompt_eval_count"] + first["eval_count"]
    body["messages"][-1] = {"role": "tool", "content": "", "tool_name": "x"}
    answer = await app.post(CHAT.path, json=body)
    assert (
        answer.status_code,
        "a tool result without a call before it" in answer.json()["error"],
    ) == (400, True)


async def test_a_tool_whose_properties_are_null_takes_no_arguments(app, speaker):
    """Ollama's Go client sends null for a function without arguments."""
    speaker.text = FORMATS["hermes"].turn(calls=[("clock", {})])
    parameters = {"type": "object", "properties": None}
    tools = [{"type": "function", "function": {"name": "clock", "parameters": parameters}}]
    answer = await CHAT.ask(app, CHAT.body(tools=tools))
    assert CHAT.said(answer).calls == [("clock", "{}")]


async def test_generate_applies_the_template_unless_raw(app, speaker):
    speaker.text = FORMATS["hermes"].turn(thought="It may rain.", text="Sun.")
    answered = GENERATE.said(await GENERATE.ask(app, {**GENERATE.body(), "system": "Be brief."}))
    assert (answered.thought, answered.text) == ("It may rain.", "Sun.")
    for streams in (False, True):
        raw = await GENERATE.ask(
            app, {**GENERATE.body(), "prompt": "<|assistant|>", "raw": True}, streams=streams
        )
        assert GENERATE.said(raw).text == speaker.text
        assert GENERATE.said(raw).prompt < answered.prompt


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", {}),
        ("/api/chat", {"messages": []}),
        ("/api/generate", {}),
        ("/api/generate", {"prompt": ""}),
    ],
)
async def test_a_request_without_a_prompt_returns_done_reason_load(app, path, body):
    answer = (
        await app.post(path, json={"model": "fake:latest", "keep_alive": "5m", **body})
    ).json()
    assert (answer["model"], answer["done"], answer["done_reason"]) == ("fake:latest", True, "load")


async def test_num_predict_0_does_not_limit_an_answer(app, speaker):
    speaker.text = FORMATS["hermes"].turn(text="Sun.")
    for limit in (0, -1):
        raw = await GENERATE.ask(app, {**GENERATE.body(), "options": {"num_predict": limit}})
        assert GENERATE.said(raw).text == "Sun."


@pytest.mark.parametrize("place", ["chat", "generate", "raw"])
async def test_an_answer_whose_num_predict_exceeds_the_context_fills_it(app, speaker, place):
    speaker.text = "x" * 9000
    context = app.engine.runner_info.max_context
    api = CHAT if place == "chat" else GENERATE

    async def answer(size):
        body = {
            "chat": {"messages": [{"role": "user", "content": "y" * size}]},
            "generate": {"prompt": "y" * size},
            "raw": {"prompt": "y" * size + "<|assistant|>", "raw": True},
        }[place]
        options = {"temperature": 0, "num_predict": context}
        return await app.post(
            api.path, json={**api.body(), **body, "options": options, "stream": False}
        )

    said = api.said((await answer(7900)).json())
    assert (said.prompt + said.output, said.reason) == (context, "length")
    assert said.text == "x" * said.output
    refused = await answer(context)
    assert (refused.status_code, "no room for an answer" in refused.json()["error"]) == (400, True)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_a_larger_context_is_reduced_and_logged_once(app, speaker, caplog, path):
    api = APIS[path]
    body = api.body()
    for num_ctx in (16, 10**6, 10**6 + 1):
        body["options"] = {**body.get("options", {}), "num_ctx": num_ctx}
        assert api.said(await api.ask(app, body)).text == speaker.text
    (said,) = [one for one in caplog.records if "num_ctx" in one.getMessage()]
    assert said.facts["num_ctx"] == 10**6


async def test_the_model_is_listed_and_shown_under_its_names(app):
    (tagged,) = (await app.get("/api/tags")).json()["models"]
    (running,) = (await app.get("/api/ps")).json()["models"]
    assert tagged["name"] == running["model"] == "fake:latest"
    assert tagged["digest"] == running["digest"]
    for name in ("fake", "fake:latest"):
        shown = (await app.post("/api/show", json={"model": name})).json()
        assert shown["capabilities"] == ["completion", "tools", "thinking"]
        assert (
            shown["model_info"][f"{shown['model_info']['general.architecture']}.context_length"]
            == 8000
        )
        assert (
            await app.post("/api/chat", json={"model": name, "messages": []})
        ).status_code == 200


@pytest.mark.parametrize(
    ("num_params", "shown"),
    [  # Ollama's own formats
        (0, ""),
        (999, "999"),
        (30_496, "30K"),
        (134_515_008, "134.52M"),
        (2 * 10**6, "2M"),
        (999_999_999, "1000.00M"),
        (8_030_261_248, "8.0B"),
        (7 * 10**9, "7B"),
    ],
)
async def test_numbers_of_parameters_have_ollamas_format(spoken_engine, num_params, shown):
    app = create_app(spoken_engine, ServerSettings(model_name="fake"))
    async with app_client(app) as client:
        served = app.state.kv.models.find("fake")
        served.known = served.known._replace(num_params=num_params)
        answer = (await client.post("/api/show", json={"model": "fake"})).json()
    assert answer["details"]["parameter_size"] == shown
    assert answer["model_info"].get("general.parameter_count", 0) == num_params


async def test_version_returns_api_and_server_versions(app):
    answer = (await app.get("/api/version")).json()
    assert answer.keys() == {"version", "server"}
    assert answer["server"] == f"kvboost-edge {__version__}"
