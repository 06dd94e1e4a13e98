"""`return_progress` as a field: a switch, where an API has room for what it asks."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.server.live_servers import LiveServer

CHAT = [{"role": "user", "content": "What grinds the corn?"}]
PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 3},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 3},
    "/completion": {"prompt": "x", "n_predict": 3},
    "/infill": {"input_prefix": "x", "input_suffix": "y"},
    "/v1/messages": {"messages": CHAT, "max_tokens": 3},
}
WITHOUT: dict[str, dict[str, Any]] = {
    "/api/chat": {"messages": CHAT},
    "/api/generate": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages/count_tokens": {"messages": CHAT},
    "/v1/embeddings": {"input": "x"},
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("value", ["true", 1, 0, 1.0, [], {}, [True], ""])
def test_what_is_no_switch_is_refused_by_name(live_server: LiveServer, path: str, value: Any) -> None:
    with live_server.client() as client:
        answer = client.post(path, json={**PATHS[path], "stream": True, "return_progress": value})
    assert answer.status_code == 400, answer.text
    body = answer.json()
    assert "return_progress" in body["error"]["message"]
    llama = {"code", "message", "type"}
    keys = {"/completion": llama, "/infill": llama, "/v1/messages": {"type", "message"}}
    assert set(body["error"]) == keys.get(path, {"message", "type", "param", "code"})


@pytest.mark.parametrize("path", WITHOUT)
def test_apis_without_room_for_it_refuse_it_by_name(live_server: LiveServer, path: str) -> None:
    body = {"model": "kvboost-edge/demo", **WITHOUT[path], "return_progress": True}
    with live_server.client() as client:
        answer = client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert "return_progress" in answer.text
