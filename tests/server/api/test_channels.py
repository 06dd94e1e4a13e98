"""Tests of forced tool calls with a tiny gpt-oss, whose turns are channels, by the grammar of its
template.
"""

import json

import numpy as np
import pytest

from helpers.models.gpt_oss_files import save_gpt_oss
from helpers.server.compat_apis import APIS
from helpers.server.live_servers import app_client
from helpers.server.scripted_model import FORMATS
from kvboost_edge import CPUPagedEngine
from kvboost_edge.server.app import create_app
from kvboost_edge.server.settings import ServerSettings

HARMONY = FORMATS["harmony"]
PING = {
    "name": "ping",
    "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
}


@pytest.mark.parametrize("form", ["harmony"], indirect=True)
async def test_json_is_in_the_final_channel(app, speaker):
    speaker.text = (
        HARMONY.thought.format("Hm.") + '<|channel|>final <|constrain|>json<|message|>{"a": 1}'
    )
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    chat = APIS["/v1/chat/completions"]
    assert chat.said(await chat.ask(app, chat.body(form=schema, limit=200))).text == '{"a": 1}'


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Engine of a tiny gpt-oss whose logits favour the first letter of a call, and white space."""
    directory = save_gpt_oss(
        tmp_path_factory.mktemp("gpt-oss"),
        mxfp4=True,
        markers=HARMONY.markers,
        template=HARMONY.template,
    )
    with CPUPagedEngine.from_pretrained(str(directory), num_blocks=64, backend="cpu") as engine:
        runner = engine._parts.runner
        bias = np.zeros(engine.runner_info.vocab_size, np.float32)
        for text, number in {"<|channel|>": 30, "c": 60, " ": 20}.items():
            bias[engine.tokenizer.encode(text, False)[-1]] = number
        forward = runner.forward
        runner.forward = lambda batch: forward(batch) + bias
        yield engine


@pytest.mark.parametrize("path", [path for path, api in APIS.items() if "choice" in api.has])
async def test_a_required_call_is_enforced_with_channels(path, tiny):
    """The grammar forces the call up to a token that ends the turn."""
    assert tiny.runner_info.architecture == "gpt_oss"
    api = APIS[path]
    async with app_client(create_app(tiny, ServerSettings(model_name="fake"))) as client:
        body = api.body(
            tools=[{"type": "function", "function": PING}], choice="required", limit=120
        )
        said = api.said(await api.ask(client, body))
    assert (said.reason, [(name, json.loads(text)) for name, text in said.calls]) == (
        "tool_calls",
        [("ping", {})],
    )


def test_call_and_return_tokens_end_a_turn_and_end_does_not(tiny):
    ends = {tiny.tokenizer.decode([one], False) for one in tiny._parts.eos_token_ids}
    assert ends == {"<eos>", "<|call|>", "<|return|>"}
