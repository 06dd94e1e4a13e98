"""Options whose KV at the end of a prompt is not shared: sessions, pins and reports of the server
with each of these options.
"""

import dataclasses
import random

import pytest

from helpers.engine.fake_runner import fake_engine, runner_of
from helpers.server.live_servers import app_client
from kvboost_edge import shareable
from kvboost_edge.server.app import create_app
from kvboost_edge.server.settings import ServerSettings

SIZE = 16
PROMPT = random.Random(1).choices(range(256), k=640)  # a multiple of the block size
# Tokens of PROMPT whose KV is shared, by option.
OPTIONS = {"wide": ({"arithmetic": "wide"}, 624), "sparse": ({"prefill": "sparse"}, 512)}
TEMPLATE = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}"
LABELS = {"exact": "wide_arithmetic", "sparse": "sparse_prefill"}  # by prefill
MARK = {"type": "ephemeral"}


@pytest.fixture(params=OPTIONS)
def option(request):
    return OPTIONS[request.param]


@pytest.fixture
async def served(option, monkeypatch):
    """A client, its engine, and the number of tokens of PROMPT that are shared."""
    monkeypatch.setattr(shareable, "FIRST_POSITION", 128)
    with fake_engine(200, 1500, **option[0]) as engine:
        engine.tokenizer.chat_template = TEMPLATE
        app = create_app(engine, ServerSettings(model_name="fake"))
        async with app_client(app, None) as client:
            yield client, engine, option[1]


async def asked(client, path, **body):
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_session_pins_its_shareable_blocks(served):
    client, engine, shared = served
    for name, ids in (("a", PROMPT), ("b", [*PROMPT[:-1], 7])):  # the same shareable blocks
        saved = await asked(client, "/v1/sessions", name=name, tokens=ids)
        assert saved["pinned"] is True
        assert saved["bytes"] < 5000 + shared // SIZE * engine.runner_info.kv_spec.bytes_per_block
    engine.reset_cache()
    again = await asked(client, "/v1/completions", prompt=PROMPT, max_tokens=1)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == shared
    ended = [(await client.delete(f"/v1/sessions/{name}")).json() for name in "ab"]
    assert [one["blocks_unpinned"] for one in ended] == [0, shared // SIZE]
    assert engine.paged_stats()["pinned_blocks"] == 0


async def test_texts_without_a_shareable_block_are_refused_with_the_reason(served):
    client, _, shared = served
    for path, body in (
        ("/v1/sessions", {"name": "short", "tokens": PROMPT[:SIZE]}),
        ("/v1/warm", {"text": "x" * SIZE, "pin": True}),
    ):
        answer = await client.post(path, json=body)
        if shared == OPTIONS["sparse"][1]:
            assert answer.is_success
        else:
            assert answer.status_code == 400
            message = answer.json()["error"]["message"]
            assert "no full block of 16 tokens that later prompts can share" in message


async def test_cache_control_on_the_last_message_pins_its_shareable_blocks(served):
    client, engine, _ = served
    text = {"type": "text", "text": "x" * 634, "cache_control": MARK}  # 641 tokens with the role
    message = {"role": "user", "content": [text]}
    answer = await asked(client, "/v1/messages", messages=[message], max_tokens=2)
    total = answer["usage"]["input_tokens"] + answer["usage"]["cache_creation_input_tokens"]
    end = shareable.shareable_end(engine.config, total)
    assert answer["usage"]["cache_creation_input_tokens"] == end > 0
    assert answer["kvboost"]["pinned_tokens"] == end
    assert engine.paged_stats()["pinned_blocks"] == end // SIZE


@pytest.mark.parametrize("history", [3600, 0])
async def test_the_next_turn_of_a_chat_names_the_tokens_that_are_not_shared(
    option, history, monkeypatch
):
    monkeypatch.setattr(shareable, "FIRST_POSITION", 128)
    with fake_engine(200, 1500, **option[0]) as engine:
        app = create_app(engine, ServerSettings(request_history=history))
        async with app_client(app, None) as client:
            first = engine.generate(PROMPT, 40)
            prompts = (PROMPT, [*PROMPT, *first.output_token_ids, *PROMPT[:200]], PROMPT)
            causes = []
            for prompt in prompts:
                answer = await asked(client, "/v1/completions", prompt=prompt, max_tokens=40)
                causes.append(answer["kvboost"]["cause"])
    assert causes[1] == ("private_tail" if history else "not_compared")
    assert causes[2] == ("tail" if option == OPTIONS["wide"] else "private_tail")


@pytest.mark.parametrize(
    ("path", "field"),
    [("/v1/embeddings", "input"), ("/v1/completions", "prompt"), ("/v1/responses", "input")],
)
async def test_results_name_the_options_that_make_them_approximate(served, path, field):
    client, engine, _ = served
    runner = runner_of(engine)
    runner.info = dataclasses.replace(runner.info, hidden_size=2)
    engine._embedding.size = 2
    prefill = engine.config.prefill
    for length in (len(PROMPT), 200):  # the sparse range of 200 tokens is empty
        answer = await asked(client, path, **{field: "x" * length})
        labels = [] if length == 200 and prefill == "sparse" else [LABELS[prefill]]
        assert answer["kvboost"]["approximations"] == labels
        assert answer["kvboost"]["approximate"] == bool(labels)
        assert answer["usage"].get("approximate", False) == bool(labels)
