"""Tests with requests recorded from litellm 1.106, which cannot be installed next to the other
clients.

Its providers for the APIs of OpenAI, Anthropic and Ollama get responses with the members that they
read.
"""

import json
from pathlib import Path

import pytest

from helpers.server.compat_apis import APIS
from helpers.server.live_servers import KEYS

RECORDED = json.loads(
    (Path(__file__).parents[3] / "data" / "agents" / "litellm.json").read_text(encoding="utf-8")
)
CASES = {f"{number} {one['case']}": one for number, one in enumerate(RECORDED)}
MODEL = "kvboost-edge/demo"


def sent(server, case, **more):
    """Send a recorded request with the test's model name and an API key; return the response."""
    headers = {name: value.replace("KEY", KEYS[0]) for name, value in case["headers"].items()}
    if not {"authorization", "x-api-key"} & headers.keys():
        headers["authorization"] = f"Bearer {KEYS[0]}"  # as its `headers` option gives Ollama one
    name = "name" if case["path"] == "/api/show" else "model"
    with server.client(headers=headers) as client:
        return client.post(
            case["path"], content=json.dumps({**case["body"], name: MODEL, **more}).encode()
        )


def text_of(api, answer):
    """Return the text of a complete or streamed response."""
    whole = answer.headers["content-type"].startswith("application/json")
    told = answer.json() if whole else api.gather(api.events(answer))
    shown = told.get("choices", [told])[0]
    found = next(
        shown[place] for place in ("text", "response", "content", "message") if place in shown
    )
    if isinstance(found, list):
        return "".join(block.get("text", "") for block in found)
    return str(found["content"] if isinstance(found, dict) else found)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.some(2)
def test_recorded_requests_are_answered_whole_and_streamed(keyed_server, name):
    case = CASES[name]
    answer = sent(keyed_server, case)
    assert answer.status_code == 200, answer.text
    if "stream" in case["body"] or case["path"] in ("/v1/chat/completions", "/v1/messages"):
        other = sent(keyed_server, case, stream=not case["body"].get("stream", False))
        api = APIS[case["path"]]
        assert text_of(api, answer) == text_of(api, other)


def test_usage_ids_and_finish_reasons_are_in_the_fields_litellm_reads(keyed_server):
    found = {
        case["case"]: sent(keyed_server, case).json()
        for case in RECORDED
        if not case["body"].get("stream")
    }
    whole = found["openai whole"]
    assert whole["usage"]["total_tokens"] == sum(
        whole["usage"][f"{name}_tokens"] for name in ("prompt", "completion")
    )
    assert whole["choices"][0]["finish_reason"] in ("stop", "length")
    message = found["anthropic whole"]
    assert message["stop_reason"] in ("end_turn", "max_tokens")
    assert {"input_tokens", "output_tokens", "cache_read_input_tokens"} <= message["usage"].keys()
    chat = found["ollama_chat whole"]
    assert (chat["done"], chat["eval_count"] > 0, chat["prompt_eval_count"] > 0) == (
        True,
        True,
        True,
    )
    assert found["hosted_vllm whole"]["choices"] == whole["choices"], (
        "both provider names must give the same answer"
    )
    assert len(found["openai embedding"]["data"][0]["embedding"]) > 0
    assert found["openai responses"]["output"][0]["type"] == "message"
    shown = next(answer for name, answer in found.items() if name.endswith(": show"))
    assert {"template", "model_info", "capabilities"} <= shown.keys()


@pytest.mark.parametrize("provider", ["openai", "anthropic", "ollama_chat"])
def test_errors_have_the_status_codes_litellm_maps(keyed_server, provider):
    case = next(case for case in RECORDED if case["case"] == f"{provider} whole")
    unknown = sent(keyed_server, case, model="nobody")
    assert (unknown.status_code, "nobody" in unknown.text) == (404, True)
    bad = sent(keyed_server, case, messages="x")
    assert (bad.status_code, "messages" in bad.text) == (400, True)
    wrong = {name: "wrong" for name in case["headers"] if name == "x-api-key"} or {
        "authorization": "Bearer wrong"
    }
    assert sent(keyed_server, {**case, "headers": case["headers"] | wrong}).status_code == 401
