"""Responses that are remembered: continued, looked at, forgotten, and nobody else's."""

from __future__ import annotations

from typing import Any

import httpx

from kvboost_edge.server.api.dialects.responses.answers import DeletedResponse, ItemList
from kvboost_edge.server.work.remembered import Turn
from server.api.dialects.test_responses import PATH, TOOLS, ask
from server.api.test_tools import CALL, Speaker

FIRST, SECOND = ({"Authorization": f"Bearer {key}"} for key in ("first-key", "second-key"))


async def test_a_conversation_goes_on_by_its_last_response(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = CALL
    first = await ask(app, tools=TOOLS, store=True, instructions="Be brief.")
    result = [{"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "Rain."}]
    speaker.text = "It rains."
    known = {"tools": TOOLS, "instructions": "Be brief."}
    second = await ask(app, input=result, previous_response_id=first["id"], store=True, **known)
    whole = await ask(app, input=[{"role": "user", "content": "And the weather?"}, *first["output"], *result], **known)
    assert second["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert second["previous_response_id"] == first["id"]
    third = await ask(app, input="Thanks.", previous_response_id=second["id"], **known)
    assert third["usage"]["input_tokens"] > second["usage"]["total_tokens"]
    # Instructions are of one response, and do not go on.
    without = await ask(app, input=result, previous_response_id=first["id"], tools=TOOLS)
    assert without["usage"]["input_tokens"] < second["usage"]["input_tokens"]


async def test_a_stream_is_remembered_too(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = "Sun."
    answer = await app.post(PATH, json={"input": "hello", "stream": True, "temperature": 0})
    name = answer.text.split('"id":"', 1)[1].split('"', 1)[0]
    found = (await app.get(f"{PATH}/{name}")).json()
    assert (found["id"], found["status"], found["store"]) == (name, "completed", True)
    assert found["output"][0]["content"][0]["text"] == "Sun."


async def test_a_remembered_response_is_shown_and_forgotten(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = "Sun."
    items = [{"role": "user", "content": str(number)} for number in range(3)]
    answer = await ask(app, input=items, store=True)
    path = f"{PATH}/{answer['id']}"
    assert (await app.get(path)).json() == answer
    assert (await app.get(path, params={"stream": "true"})).status_code == 400
    listed_as = await app.get(f"{path}/input_items")
    ItemList.model_validate_json(listed_as.content, strict=True)
    listed = (await app.get(f"{path}/input_items", params={"limit": 2})).json()
    assert [item["content"][0]["text"] for item in listed["data"]] == ["2", "1"]
    assert listed["has_more"]
    rest = (await app.get(f"{path}/input_items", params={"after": listed["last_id"]})).json()
    assert [item["content"][0]["text"] for item in rest["data"]] == ["0"]
    rising = (await app.get(f"{path}/input_items", params={"order": "asc"})).json()
    assert [item["content"][0]["text"] for item in rising["data"]] == ["0", "1", "2"]
    for wrong in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "x"}):
        assert (await app.get(f"{path}/input_items", params=wrong)).status_code == 400
    deleted = await app.delete(path)
    DeletedResponse.model_validate_json(deleted.content, strict=True)
    assert deleted.json() == {"id": answer["id"], "object": "response", "deleted": True}
    for method, at in (("GET", path), ("DELETE", path), ("GET", f"{path}/input_items")):
        gone = await app.request(method, at)
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "response_not_found")


async def test_store_false_keeps_nothing(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = "Sun."
    answer = await ask(app, store=False)
    assert not answer["store"]
    assert (await app.get(f"{PATH}/{answer['id']}")).status_code == 404
    again = await app.post(PATH, json={"input": "x", "previous_response_id": answer["id"]})
    assert again.status_code == 404
    assert again.json()["error"]["param"] == "previous_response_id"


async def test_a_response_of_another_key_is_not_there(keyed_app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = "Sun."
    mine = (await keyed_app.post(PATH, json={"input": "x"}, headers=FIRST)).json()["id"]
    for headers, status in ((SECOND, 404), (FIRST, 200)):
        assert (await keyed_app.get(f"{PATH}/{mine}", headers=headers)).status_code == status
        assert (await keyed_app.get(f"{PATH}/{mine}/input_items", headers=headers)).status_code == status
        body = {"input": "y", "previous_response_id": mine}
        assert (await keyed_app.post(PATH, json=body, headers=headers)).status_code == status
    assert (await keyed_app.delete(f"{PATH}/{mine}", headers=SECOND)).status_code == 404
    assert (await keyed_app.get(f"{PATH}/{mine}")).status_code == 401


async def test_a_response_larger_than_the_memory_says_that_it_is_not_kept(
    app: httpx.AsyncClient, speaker: Speaker
) -> None:
    remembered = app._transport.app.state.kv.shared.remembered  # type: ignore[attr-defined]
    remembered.max_bytes = 100
    speaker.text = "Sun."
    answer = await ask(app, store=True)
    assert answer["store"] is False
    assert remembered.num_bytes == 0


async def test_a_turn_that_left_the_memory_is_named(app: httpx.AsyncClient, speaker: Speaker) -> None:
    speaker.text = "Sun."
    first = await ask(app, store=True)
    second = await ask(app, store=True, previous_response_id=first["id"])
    assert (await app.delete(f"{PATH}/{first['id']}")).status_code == 200
    answer = await app.post(PATH, json={"input": "x", "previous_response_id": second["id"]})
    error: dict[str, Any] = answer.json()["error"]
    assert answer.status_code == 404
    assert first["id"] in error["message"]


def test_turns_are_bytes() -> None:
    """No object of a request is held by what is remembered."""
    assert Turn(b"{}", b"[]", None).size == 4 + Turn(b"", b"", None).size
