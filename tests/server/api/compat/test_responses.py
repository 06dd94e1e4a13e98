"""Tests of features specific to /v1/responses: namespaces, echoed fields, stored responses, and a
request recorded from Codex.
"""

import json
from pathlib import Path

import openai
import pytest

from helpers.server.compat_apis import APIS, lasting
from helpers.server.scripted_model import ASK, CALL, FORMATS, TOOLS
from kvboost_edge.server.api.compat.responses.schemas import ResponseRequest
from kvboost_edge.server.api.compat.responses.translate import messages_of
from kvboost_edge.server.work.stored_responses import StoredResponse

API = APIS["/v1/responses"]
PATH = API.path
FUNCTIONS = API.tools(TOOLS)
FIRST, SECOND = ({"Authorization": f"Bearer {key}"} for key in ("first-key", "second-key"))
# Third request of codex (npm, 0.169), with shortened texts and zeroed ids.
CODEX = Path(__file__).parents[3] / "data" / "agents" / "codex.json"


async def ask(app, **more):
    return await API.ask(app, {**API.body(), **more})


async def test_namespaced_functions_are_called_by_their_qualified_name(app, speaker):
    speaker.text = CALL.replace('"weather"', '"sky.weather"')
    tools = [{"type": "namespace", "name": "sky", "description": "", "tools": FUNCTIONS}]
    (call,) = (await ask(app, tools=tools))["output"]
    assert (call["namespace"], call["name"]) == ("sky", "weather")
    parts = [{"type": "input_text", "text": "x"}]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": parts}
    speaker.text = "Done."
    again = await ask(app, tools=tools, input=[*ASK, call, output])
    assert again["output"][0]["content"][0]["text"] == "Done."


async def test_request_fields_are_echoed(app, speaker):
    answer = await ask(app, metadata={"a": "b"}, user="u", tools=[], reasoning={"effort": "high"})
    assert (answer["metadata"], answer["user"], answer["tools"]) == ({"a": "b"}, "u", [])
    assert answer["reasoning"]["effort"] == "high"
    form = API.form({"type": "object", "properties": {"n": {"const": 7}}})
    assert (await ask(app, text=form, max_output_tokens=50))["text"] == form


async def test_a_recorded_codex_request_is_answered_with_a_tool_call(app, speaker):
    speaker.text = FORMATS["hermes"].calls([("exec_command", {"cmd": "ls"})])
    body = {**json.loads(CODEX.read_text(encoding="utf-8")), "temperature": 0}
    answer = await API.ask(app, body, streams=True)
    assert API.said(answer).calls == [("exec_command", '{"cmd": "ls"}')]
    assert (await app.get(f"{PATH}/{answer['id']}")).status_code == 404  # store is false


async def test_previous_response_id_continues_a_conversation(app, speaker):
    speaker.text = CALL
    known = {"tools": FUNCTIONS, "instructions": "Be brief."}
    first = await ask(app, store=True, **known)
    result = [
        {
            "type": "function_call_output",
            "call_id": first["output"][0]["call_id"],
            "output": "Rain.",
        }
    ]
    speaker.text = "It rains."
    second = await ask(app, input=result, previous_response_id=first["id"], store=True, **known)
    whole = await ask(app, input=[*ASK, *first["output"], *result], **known)
    assert second["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert second["previous_response_id"] == first["id"]
    third = await ask(app, input="Thanks.", previous_response_id=second["id"], **known)
    assert third["usage"]["input_tokens"] > second["usage"]["total_tokens"]
    # Instructions apply to one response only.
    without = await ask(app, input=result, previous_response_id=first["id"], tools=FUNCTIONS)
    assert without["usage"]["input_tokens"] < second["usage"]["input_tokens"]


async def test_references_stand_for_stored_items(app, speaker):
    """The Vercel AI SDK refers to each item of an earlier response by its id."""
    calls = [("weather", {"city": "Bonn"})]
    speaker.text = FORMATS["hermes"].turn(thought="Rain?", text="Let me look.", calls=calls)
    known = {"tools": FUNCTIONS, "chat_template_kwargs": {"enable_thinking": True}}
    first = await ask(app, store=True, **known)
    assert [item["type"] for item in first["output"]] == ["reasoning", "message", "function_call"]
    output = {"type": "function_call_output", "output": "Rain."}
    result = {**output, "call_id": first["output"][-1]["call_id"]}
    reference = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    del reference[0]["type"]  # it is optional
    speaker.text = "It rains."
    app.engine.reset_cache()
    second = await ask(app, input=[*ASK, *reference, result], store=True, **known)
    app.engine.reset_cache()
    whole = await ask(app, input=[*ASK, *first["output"], result], **known)
    assert lasting(second["usage"]) == lasting(whole["usage"])
    path = f"{PATH}/{second['id']}/input_items"
    listed = (await app.get(path, params={"order": "asc"})).json()["data"]
    assert listed[1:4] == first["output"]
    # The items are part of the second response too.
    await app.delete(f"{PATH}/{first['id']}")
    said = {"type": "item_reference", "id": second["output"][0]["id"]}
    third = [*ASK, *reference, result, said, {"role": "user", "content": "Thanks."}]
    assert (await ask(app, input=third, **known))["status"] == "completed"
    await app.delete(f"{PATH}/{second['id']}")
    gone = await app.post(PATH, json={"input": third, **known})
    error = gone.json()["error"]
    assert (gone.status_code, error["code"], error["param"]) == (404, "item_not_found", "input")
    assert reference[0]["id"] in error["message"]


async def test_an_item_cannot_be_referred_to_twice(app, speaker):
    first = await ask(app, store=True)
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    twice = await app.post(PATH, json={"input": [*ASK, reference, reference]})
    assert (twice.status_code, reference["id"] in twice.json()["error"]["message"]) == (400, True)


async def test_cache_write_tokens_are_found_by_the_next_request(app, speaker):
    def details(answer):
        usage = openai.types.responses.ResponseUsage.model_validate(answer["usage"], strict=True)
        found = usage.input_tokens_details
        return found.cached_tokens, found.cache_write_tokens

    sent = [{"role": "user", "content": "And the weather in Bonn? " * 10}]
    more = [*sent, {"role": "assistant", "content": "Rain."}, *ASK]
    assert details(await ask(app, input=more, cache_prompt=False)) == (0, 0)
    first, second = [details(await ask(app, input=items)) for items in (sent, more)]
    assert first[0] == 0
    assert second[0] == first[1] > 200
    assert details(await ask(app, input=more)) == (sum(second), 0)


@pytest.mark.parametrize(
    ("item", "thought"),
    [
        ({"summary": ["One.", "Two."]}, "One.\nTwo."),
        ({"summary": ["One."], "content": []}, "One."),
        ({"summary": ["One."], "content": ["Two.", "Three."]}, "Two.\nThree."),
        ({"summary": []}, None),
    ],
)
def test_a_summary_stands_for_missing_reasoning(item, thought):
    """Other servers send only a summary."""
    kinds = {"summary": "summary_text", "content": "reasoning_text"}
    parts = {
        name: [{"type": kinds[name], "text": text} for text in texts]
        for name, texts in item.items()
    }
    said = {"role": "assistant", "content": "Yes."}
    body = ResponseRequest.model_validate({"input": [{"type": "reasoning", **parts}, said]})
    (message,) = messages_of(None, body.input)
    assert (message["content"], message.get("reasoning_content")) == ("Yes.", thought)
    assert body.size == len("Yes.") + len(thought or "")


async def test_a_streamed_response_is_stored(app, speaker):
    streamed = await API.ask(app, {**API.body(), "store": None}, streams=True)
    found = (await app.get(f"{PATH}/{streamed['id']}")).json()
    assert (found["status"], found["store"]) == ("completed", True)
    assert found["output"][0]["content"][0]["text"] == "Good day."


async def test_a_stored_response_is_retrieved_and_deleted(app, speaker):
    items = [{"role": "user", "content": str(number)} for number in range(3)]
    answer = await ask(app, input=items, store=True)
    path = f"{PATH}/{answer['id']}"
    assert (await app.get(path)).json() == answer
    assert (await app.get(path, params={"stream": "true"})).status_code == 400

    async def listed(**query):
        found = await app.get(f"{path}/input_items", params=query)
        page = found.json()
        return (
            [item["content"][0]["text"] for item in page["data"]],
            page["has_more"],
            page["last_id"],
        )

    assert (await listed())[0] == ["2", "1", "0"]
    texts, has_more, last = await listed(limit=2)
    assert (texts, has_more, (await listed(after=last))[0]) == (["2", "1"], True, ["0"])
    assert (await listed(limit=3))[1] is False
    assert (await listed(order="asc"))[0] == ["0", "1", "2"]
    for wrong in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "x"}):
        assert (await app.get(f"{path}/input_items", params=wrong)).status_code == 400
    deleted = await app.delete(path)
    assert deleted.json() == {"id": answer["id"], "object": "response", "deleted": True}
    for method, at in (("GET", path), ("DELETE", path), ("GET", f"{path}/input_items")):
        gone = await app.request(method, at)
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "response_not_found")


async def test_store_false_stores_nothing(app, speaker):
    answer = await ask(app, store=False)
    assert not answer["store"]
    assert (await app.get(f"{PATH}/{answer['id']}")).status_code == 404
    again = await app.post(PATH, json={"input": "x", "previous_response_id": answer["id"]})
    assert (again.status_code, again.json()["error"]["param"]) == (404, "previous_response_id")


async def test_a_response_is_visible_to_its_own_key_only(keyed_app, speaker):
    answer = (await keyed_app.post(PATH, json={"input": "x"}, headers=FIRST)).json()
    mine, said = answer["id"], answer["output"][0]["id"]
    for headers, status in ((SECOND, 404), (FIRST, 200)):
        assert (await keyed_app.get(f"{PATH}/{mine}", headers=headers)).status_code == status
        assert (
            await keyed_app.get(f"{PATH}/{mine}/input_items", headers=headers)
        ).status_code == status
        for body in (
            {"input": "y", "previous_response_id": mine},
            {"input": [*ASK, {"type": "item_reference", "id": said}]},
        ):
            assert (await keyed_app.post(PATH, json=body, headers=headers)).status_code == status
    assert (await keyed_app.delete(f"{PATH}/{mine}", headers=SECOND)).status_code == 404
    assert (await keyed_app.get(f"{PATH}/{mine}")).status_code == 401


async def test_a_response_too_large_to_store_has_store_false(app, speaker):
    remembered = app.state.remembered
    remembered.kept.max_root_bytes = 100
    assert (await ask(app, store=True))["store"] is False
    assert remembered.num_bytes == 0


async def test_a_missing_earlier_response_is_named(app, speaker):
    first = await ask(app, store=True)
    second = await ask(app, store=True, previous_response_id=first["id"])
    assert (await app.delete(f"{PATH}/{first['id']}")).status_code == 200
    answer = await app.post(PATH, json={"input": "x", "previous_response_id": second["id"]})
    assert (answer.status_code, first["id"] in answer.json()["error"]["message"]) == (404, True)


def test_stored_turns_are_counted_in_bytes():
    """A stored response keeps bytes and holds no reference to an object of the request."""
    assert StoredResponse(b"{}", b"[]", None).size == 4 + StoredResponse(b"", b"", None).size
