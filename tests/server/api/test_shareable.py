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
# Engine options, tokens of PROMPT whose KV is shared, and the prefill that requests choose.
OPTIONS = {
    "wide": ({"arithmetic": "wide"}, 624, None),
    "sparse": ({"prefill": "sparse"}, 512, None),
    "on-request": ({"prefill": "on-request"}, 512, "sparse"),
}
TEMPLATE = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}"
MARK = {"type": "ephemeral"}


@pytest.fixture(params=OPTIONS)
def option(request):
    return OPTIONS[request.param]


@pytest.fixture
async def served(option, monkeypatch):
    """A client, its engine, the number of tokens of PROMPT that are shared, and the fields of the
    cache's requests and of generating requests that choose the prefill.
    """
    monkeypatch.setattr(shareable, "FIRST_POSITION", 128)
    with fake_engine(200, 1500, **option[0]) as engine:
        engine.tokenizer.chat_template = TEMPLATE
        app = create_app(engine, ServerSettings(model_name="fake"))
        async with app_client(app, None) as client:
            yield client, engine, option[1], *fields_of(option[2])


def fields_of(prefill):
    return (
        ({}, {}) if prefill is None else ({"prefill": prefill}, {"kvboost": {"prefill": prefill}})
    )


async def asked(client, path, **body):
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_session_pins_its_shareable_blocks(served):
    client, engine, shared, ours, chosen = served
    for name, ids in (("a", PROMPT), ("b", [*PROMPT[:-1], 7])):  # the same shareable blocks
        saved = await asked(client, "/v1/sessions", name=name, tokens=ids, **ours)
        assert saved["pinned"] is True
        assert saved["bytes"] < 5000 + shared // SIZE * engine.runner_info.kv_spec.bytes_per_block
    engine.reset_cache()
    again = await asked(client, "/v1/completions", prompt=PROMPT, max_tokens=1, **chosen)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == shared
    await asked(client, "/v1/sessions/a/restore")
    assert engine.paged_stats()["pinned_blocks"] == shared // SIZE
    ended = [(await client.delete(f"/v1/sessions/{name}")).json() for name in "ab"]
    assert [one["blocks_unpinned"] for one in ended] == [0, shared // SIZE]
    assert engine.paged_stats()["pinned_blocks"] == 0


async def test_texts_without_a_shareable_block_are_refused_with_the_reason(served):
    client, _, shared, ours, _ = served
    for path, body in (
        ("/v1/sessions", {"name": "short", "tokens": PROMPT[:SIZE], **ours}),
        ("/v1/warm", {"text": "x" * SIZE, "pin": True, **ours}),
    ):
        answer = await client.post(path, json=body)
        if shared == OPTIONS["sparse"][1]:
            assert answer.is_success
        else:
            assert answer.status_code == 400
            message = answer.json()["error"]["message"]
            assert "no full block of 16 tokens that later prompts can share" in message


@pytest.mark.parametrize("option", ["wide", "sparse"], indirect=True)
async def test_cache_control_on_the_last_message_pins_its_shareable_blocks(served):
    client, engine, *_ = served
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
            first = engine.generate(PROMPT, 40, prefill=option[2])
            chosen = fields_of(option[2])[1]
            prompts = (PROMPT, [*PROMPT, *first.output_token_ids, *PROMPT[:200]], PROMPT)
            causes = []
            for prompt in prompts:
                answer = await asked(
                    client, "/v1/completions", prompt=prompt, max_tokens=40, **chosen
                )
                causes.append(answer["kvboost"]["cause"])
    assert causes[1] == ("private_tail" if history else "not_compared")
    assert causes[2] == ("tail" if option == OPTIONS["wide"] else "private_tail")


@pytest.mark.parametrize(
    ("path", "field"),
    [("/v1/embeddings", "input"), ("/v1/completions", "prompt"), ("/v1/responses", "input")],
)
async def test_results_name_the_options_that_make_them_approximate(served, path, field):
    client, engine, _, _, chosen = served
    runner = runner_of(engine)
    runner.info = dataclasses.replace(runner.info, hidden_size=2)
    engine._embedding.size = 2
    is_wide = engine.config.arithmetic == "wide"
    if path == "/v1/embeddings":  # has no field for the prefill
        chosen = {}
    is_sparse = bool(chosen) or engine.config.prefill == "sparse"
    for length in (len(PROMPT), 200):  # the sparse range of 200 tokens is empty
        answer = await asked(client, path, **{field: "x" * length}, **chosen)
        labels = ["wide_arithmetic"] * is_wide + ["sparse_prefill"] * (is_sparse and length > 200)
        assert answer["kvboost"]["approximations"] == labels
        assert answer["kvboost"]["approximate"] == bool(labels)
        assert answer["usage"].get("approximate", False) == bool(labels)


@pytest.fixture
async def on_request(monkeypatch):
    """A client of a server whose requests choose their prefill, and its engine."""
    monkeypatch.setattr(shareable, "FIRST_POSITION", 128)
    with fake_engine(200, 1500, prefill="on-request") as engine:
        engine.tokenizer.chat_template = TEMPLATE
        app = create_app(engine, ServerSettings(model_name="fake"))
        async with app_client(app, None) as client:
            yield client, engine


async def test_blocks_are_found_and_unpinned_only_with_their_prefill(on_request):
    client, engine = on_request
    text = "x" * len(PROMPT)
    kinds = {"sparse": 512, "exact": 640}
    for prefill, pinned in kinds.items():
        warmed = await asked(client, "/v1/warm", text=text, pin=True, prefill=prefill)
        assert warmed["kvboost"]["hit_tokens"]["pool"] == 0
        assert warmed["pinned_tokens"] == pinned
        assert warmed["chunks_stored"] == pinned // 128
    for prefill, pinned in kinds.items():
        chosen = {"prefill": prefill}
        found = await asked(client, "/v1/completions", prompt=text, max_tokens=1, kvboost=chosen)
        assert found["kvboost"]["hit_tokens"]["pool"] == min(pinned, 639)
        ended = await asked(client, "/v1/unpin", text=text, prefill=prefill)
        assert ended["blocks_unpinned"] == pinned // SIZE
    assert engine.paged_stats()["pinned_blocks"] == 0


async def test_the_report_of_a_miss_compares_requests_of_the_same_prefill(on_request):
    client, _ = on_request
    causes = []
    for prefill in ("exact", "sparse", "sparse", "exact"):
        answer = await asked(
            client, "/v1/completions", prompt=PROMPT, kvboost={"prefill": prefill}, max_tokens=1
        )
        causes.append(answer["kvboost"]["cause"])
    assert causes == ["first_seen", "first_seen", "private_tail", "none"]


async def test_a_prefill_that_the_server_does_not_have_is_refused_by_every_route():
    with fake_engine(200, 1500) as engine:
        engine.tokenizer.chat_template = TEMPLATE
        app = create_app(engine, ServerSettings(model_name="fake"))
        messages = {"messages": [{"role": "user", "content": "hello"}]}
        chosen = {"kvboost": {"prefill": "sparse"}}
        ours = {"prefill": "sparse"}
        async with app_client(app, None) as client:
            for path, body, param in (
                ("/v1/chat/completions", {**messages, **chosen}, "kvboost"),
                ("/v1/completions", {"prompt": "hello", **chosen}, "kvboost"),
                ("/v1/responses", {"input": "hello", **chosen}, "kvboost"),
                ("/v1/warm", {"text": "hello", **ours}, "prefill"),
                ("/v1/warm", {"documents": ["hello"], **ours}, "prefill"),
                ("/v1/unpin", {**messages, **ours}, "prefill"),
                ("/v1/sessions", {"name": "one", **messages, **ours}, "prefill"),
            ):
                answer = await client.post(path, json=body)
                assert answer.status_code == 400, path
                error = answer.json()["error"]
                assert error["param"] == param, path
                assert "start it with prefill='on-request' (--prefill on-request)" in str(error)


async def test_a_sparse_session_is_refused_by_a_server_without_sparse_prefill(on_request):
    client, engine = on_request
    messages = [{"role": "user", "content": "x" * 640}]
    await asked(client, "/v1/sessions", name="a", messages=messages, prefill="sparse")
    object.__setattr__(engine.config, "prefill", "exact")  # as after a restart
    for path, body in (
        ("/v1/sessions/a/restore", {}),
        ("/slots/0?action=restore", {"filename": "a"}),
    ):
        answer = await client.post(path, json=body)
        assert answer.status_code == 400
        assert "'a' was saved with prefill='sparse'" in answer.json()["error"]["message"]


async def test_a_slot_is_saved_and_restored_with_the_prefill_of_its_request(on_request):
    client, engine = on_request
    chosen = {"prefill": "sparse"}
    await asked(client, "/v1/completions", prompt=PROMPT, max_tokens=1, kvboost=chosen)
    for action in ("save", "restore"):
        engine.reset_cache()
        await asked(client, f"/slots/0?action={action}", filename="one")
        assert engine.paged_stats()["pinned_blocks"] == 512 // SIZE
    again = await asked(client, "/v1/completions", prompt=PROMPT, max_tokens=1, kvboost=chosen)
    assert again["kvboost"]["hit_tokens"]["pool"] == 512
    ended = (await client.delete("/v1/sessions/one")).json()
    assert ended["blocks_unpinned"] == 512 // SIZE


async def test_a_session_stays_pinned_if_its_prefill_is_named_later(on_request):
    client, engine = on_request
    for fields, pinned in (({}, 640), ({"prefill": "exact"}, 640), ({"prefill": "sparse"}, 512)):
        await asked(client, "/v1/sessions", name="one", tokens=PROMPT, **fields)
        assert engine.paged_stats()["pinned_blocks"] == pinned // SIZE
