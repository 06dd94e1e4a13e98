"""Tests of the cache-miss report over HTTP: the first diverging token among the prompts of an API
key, and the cause.
"""

import asyncio
import io
import json
import threading
import time
from itertools import chain

import pytest

from helpers.engine.fake_runner import fake_engine, hold_passes, runner_of
from helpers.server.cache_miss_cases import (
    CHAT,
    COMPLETIONS,
    EXPLAIN,
    SYSTEM,
    app_of,
    ask,
    complete,
)
from kvboost_edge.server.cache_report.recent_requests import NOT_SAID, History
from kvboost_edge.server.cache_report.tracker import Doctor
from kvboost_edge.server.logs import configure_logging
from kvboost_edge.server.settings import ServerSettings


async def test_a_changed_system_message_is_diagnosed_with_both_texts(
    app, speaker, spoken_engine, monkeypatch
):
    # Times are reported in milliseconds, and a fake forward pass would take none.
    monkeypatch.setattr(runner_of(spoken_engine), "on_forward", lambda batch: time.sleep(0.002))
    first = await ask(app, SYSTEM.format("Tuesday"), "Hello!")
    assert (first["cause"], first["compared_with"], first["hit_tokens"]) == (
        "first_seen",
        "",
        {"pool": 0},
    )
    second = await ask(app, SYSTEM.format("Wednesday"), "Hello!")
    place = len(f"<|system|>{SYSTEM[: SYSTEM.index('{')]}")
    assert (second["cause"], second["position"]) == ("changed_text", place)
    assert (second["field"], second["field_before"]) == ("message 0 (system)", "message 0 (system)")
    assert second["text"].startswith("ay is Wednesday. Answer")
    assert second["text_before"].startswith("ay is Tuesday. Answer")
    assert second["compared_with"] == first["request_id"]
    assert second["hit_tokens"] == {"pool": place // 16 * 16}
    assert second["seconds"] >= 0.002


async def test_the_next_turn_of_a_chat_has_new_text_only(app, speaker):
    first = await ask(app, SYSTEM, "Hello!")
    second = await ask(app, SYSTEM, "Hello!", "Good day.", "And now?")
    assert (second["cause"], second["field_before"]) == ("new_text", "")
    assert second["position"] == first["prompt_tokens"] + len("Good day.")
    assert second["hit_tokens"]["pool"] >= second["position"] - 16
    again = await ask(app, SYSTEM, "Hello!", "Good day.", "And now?")
    assert again["cause"] in ("tail", "none")
    assert again["hit_tokens"]["pool"] >= again["prompt_tokens"] - 16


@pytest.mark.parametrize("stream", [False, True])
async def test_miss_reason_is_the_cause(app, speaker, stream):
    """Both fields agree on every turn of a chat. They once came from two sources and contradicted
    each other.
    """
    turns = ["Hello!", "Good day.", "And now?"]
    causes = []
    for length in (1, 3, 3):
        roles = ("user", "assistant", "user")
        messages = [
            {"role": role, "content": text}
            for role, text in zip(roles, turns[:length], strict=False)
        ]
        system = {"role": "system", "content": SYSTEM}
        body = {"messages": [system, *messages], "max_tokens": 90, "temperature": 0, **EXPLAIN}
        answer = await app.post(CHAT, json={**body, "stream": stream})
        text = answer.text
        if stream:
            chunks = [line[6:] for line in text.split("\n\n") if line.startswith("data: {")]
            text = chunks[-1]
        told = json.loads(text)["kvboost"]
        assert told["cause"] == told["cache"]["cause"]
        assert told["miss_reason"] == ("" if told["cause"] == "none" else told["cause"])
        causes.append(told["cause"])
    assert causes[:2] == ["first_seen", "new_text"]


async def test_a_streams_last_chunk_has_the_diagnosis(spoken_engine, speaker):
    async with app_of(spoken_engine, api_keys=("one", "two")) as app:
        app.headers["x-api-key"] = "one"
        whole = [await ask(app, SYSTEM.format(day), "Hi") for day in ("Monday", "Tuesday")]
        app.headers["x-api-key"] = "two"
        told = []
        for day, options in (
            ("Monday", {}),
            ("Tuesday", {"stream_options": {"include_usage": True}}),
        ):
            messages = [
                {"role": "system", "content": SYSTEM.format(day)},
                {"role": "user", "content": "Hi"},
            ]
            body = {
                "messages": messages,
                "max_tokens": 90,
                "temperature": 0,
                "stream": True,
                **EXPLAIN,
                **options,
            }
            lines = (await app.post(CHAT, json=body)).text.split("\n\n")
            chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            assert ["kvboost" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
            told.append(chunks[-1]["kvboost"]["cache"])
    for mine, theirs in zip(told, whole, strict=True):
        same = ("cause", "position", "field", "text", "text_before", "prompt_tokens")
        assert {name: mine[name] for name in same} == {name: theirs[name] for name in same}


async def test_no_diagnosis_is_sent_unless_requested(app, speaker):
    answer = await app.post(COMPLETIONS, json={"prompt": "Hello", "max_tokens": 1})
    assert "cache" not in answer.json()["kvboost"]


TOOLS = [
    {"type": "function", "function": {"name": name, "description": "x" * 40}}
    for name in ("clock", "maps")
]


async def test_reordered_tools_are_diagnosed_or_normalized(spoken_engine, speaker):
    async with app_of(spoken_engine, normalise=()) as app:
        await ask(app, SYSTEM, "Hi", tools=TOOLS)
        swapped = await ask(app, SYSTEM, "Hi", tools=TOOLS[::-1])
        assert (swapped["cause"], swapped["normalised"]) == ("tool_order", [])
        assert (swapped["field"], swapped["field_before"]) == ("tool 0 (maps)", "tool 0 (clock)")
        fewer = await ask(app, SYSTEM, "Hi", tools=TOOLS[1:])
        assert fewer["cause"] == "tools"
    async with app_of(spoken_engine) as app:
        spoken_engine.reset_cache()
        await ask(app, SYSTEM, "Hi", tools=TOOLS)
        swapped = await ask(app, SYSTEM, "Hi", tools=TOOLS[::-1])
        assert swapped["normalised"] == ["tools"]
        assert swapped["hit_tokens"]["pool"] >= swapped["prompt_tokens"] - 16


async def test_a_billing_line_is_removed_and_reported(spoken_engine, speaker):
    billed = "x-anthropic-billing-header: cc_version=2.1; cch={};\n" + SYSTEM
    async with app_of(spoken_engine) as app:
        await ask(app, billed.format("aaaa", "now"), "Hi")
        second = await ask(app, billed.format("bbbb", "now"), "Hi")
        assert second["normalised"] == ["billing"]
        assert second["hit_tokens"]["pool"] >= second["prompt_tokens"] - 16
    async with app_of(spoken_engine, normalise=("tools",)) as app:
        await ask(app, billed.format("cccc", "now"), "Hi")
        second = await ask(app, billed.format("dddd", "now"), "Hi")
        assert (second["cause"], second["field"], second["normalised"]) == (
            "changed_text",
            "message 0 (system)",
            [],
        )


async def test_retokenized_text_is_diagnosed(demo_engine):
    tokenizer = demo_engine.tokenizer
    ids = tokenizer.encode(
        "The tokens of one word in this longer text are others, and all the rest is as it was. " * 2
    )
    at = next(
        number
        for number in range(20, len(ids))
        if len(tokenizer.decode(ids[number : number + 1])) > 2
    )
    spelled = [tokenizer.encode(letter, False) for letter in tokenizer.decode([ids[at]])]
    async with app_of(demo_engine) as app:
        await complete(app, ids)
        found = await complete(app, [*ids[:at], *chain.from_iterable(spelled), *ids[at + 1 :]])
    assert (found["cause"], found["position"], found["field"]) == ("retokenized", at, "prompt")


async def test_evicted_blocks_are_diagnosed():
    with fake_engine(num_blocks=12) as engine:
        async with app_of(engine) as app:
            prompt = "A text of 64 characters, which is four full blocks of the pool.."
            await complete(app, prompt)
            for number in range(3):
                await complete(app, f"{number:04d}" * 40)
            found = await complete(app, prompt + " And more")
    assert (found["cause"], found["evicted_from"], found["position"]) == ("evicted", ["pool"], 0)


async def test_requests_of_other_keys_and_salts_are_never_compared(spoken_engine, speaker):
    async with app_of(spoken_engine, api_keys=("one", "two")) as app:
        one, two = ({"x-api-key": key} for key in ("one", "two"))
        secret = "The secret of the first tenant is long enough for a block."
        mine = await complete(app, secret, headers=one)
        salted = await complete(app, secret, headers=one, cache_salt="salt")
        theirs = await complete(app, secret, headers=two)
        for found in (mine, salted, theirs):
            assert (found["cause"], found["compared_with"], found["text_before"]) == (
                "first_seen",
                "",
                "",
            )
        path = f"/v1/requests/{mine['request_id']}/cache"
        assert (await app.get(path, headers=one)).json() == mine
        refused = await app.get(path, headers=two)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")
        assert "secret" not in refused.text
        listed = [(await app.get("/v1/requests", headers=headers)).json() for headers in (one, two)]
        assert [[entry["request_id"] for entry in answer["data"]] for answer in listed] == [
            [salted["request_id"], mine["request_id"]],
            [theirs["request_id"]],
        ]
        last = await app.get("/v1/requests/last/cache", headers=two)
        assert (last.json(), last.headers["cache-control"]) == (theirs, "no-store")
        assert (await app.get("/v1/requests")).status_code == 401


async def test_request_history_0_keeps_nothing(spoken_engine, speaker):
    async with app_of(spoken_engine, request_history=0) as app:
        for _ in range(2):
            found = await ask(app, SYSTEM, "Hi", tools=TOOLS)
        assert found["cause"] in ("none", "tail")
        found = await ask(app, SYSTEM + "!", "Hi")
        assert (found["cause"], found["text_before"], found["compared_with"]) == (
            "not_compared",
            "",
            "",
        )
        assert (await app.get("/v1/requests")).json() == {
            "object": "list",
            "data": [],
            "kept_seconds": 0,
        }
        answer = await app.get(f"/v1/requests/{found['request_id']}/cache")
        assert answer.status_code == 404
        assert "--request-history 0" in answer.json()["error"]["message"]
        assert app._transport.app.state.kv.first.doctor.history.nbytes == 0


async def test_the_first_of_several_prompts_is_diagnosed(app, speaker, spoken_engine):
    prompts = [
        "The first of these prompts is about cats and dogs.",
        "The second is about the sea and ships.",
    ]
    found = await complete(app, prompts, n=2)
    assert (found["cause"], found["prompt_tokens"]) == ("first_seen", len(prompts[0]))
    found = await complete(app, prompts[0] + " Go on.")
    assert (found["cause"], found["field"]) in {("changed_text", "prompt"), ("new_text", "prompt")}


async def test_embeddings_are_not_in_the_request_history(tiny_app):
    assert (await tiny_app.post("/v1/embeddings", json={"input": "hello"})).status_code == 200
    assert (await tiny_app.get("/v1/requests")).json()["data"] == []


async def test_prompts_are_compared_with_warmed_texts(app, speaker):
    messages = [{"role": "system", "content": SYSTEM}]
    answer = await app.post("/v1/warm", json={"messages": messages, "tools": TOOLS})
    found = await ask(app, SYSTEM, "Hi", tools=TOOLS)
    assert (found["cause"], found["compared_with"]) == ("new_text", answer.headers["x-request-id"])
    assert found["position"] == answer.json()["token_count"]
    listed = (await app.get("/v1/requests")).json()["data"]
    assert [entry["cause"] for entry in listed] == ["new_text", "first_seen"]


async def test_cancelled_requests_are_compared_only_if_they_computed(speaker):
    """The next request is compared with a cancelled one only if that one was computing. A cancelled
    request from the queue leaves no record.
    """
    running, waiting = (
        f"{kind} is the text of a client that goes away, {'x' * 40}" for kind in ("This", "Such")
    )
    with fake_engine(num_blocks=512, max_context=4000, max_num_seqs=1) as engine:
        go = threading.Event()
        seen = threading.Event()

        def hold(batch):
            seen.set()
            assert go.wait(30)

        async with app_of(engine) as app:
            runner_of(engine).on_forward = hold
            tasks = [
                asyncio.ensure_future(complete(app, text, max_tokens=500))
                for text in (running, waiting)
            ]
            while not (seen.is_set() and engine.num_waiting()):
                await asyncio.sleep(0.001)
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(end) for end in ends] == [asyncio.CancelledError] * 2
            assert (await app.get("/v1/requests")).json()["data"] == []
            runner_of(engine).on_forward = None
            go.set()
            while engine.num_running() + engine.num_waiting():
                await asyncio.sleep(0.001)
            found = [await complete(app, text + " zzz") for text in (running, waiting)]
            listed = (await app.get("/v1/requests")).json()["data"]
    assert [entry["cause"] for entry in listed[::-1]] == ["first_seen", "new_text", "first_seen"]
    assert [one["compared_with"] for one in found] == [listed[-1]["request_id"], ""]


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_that_time_out_before_a_token_are_listed(speaker, stream):
    """Such a request is explained. Later prompts are compared with it only if it had started."""
    running, waiting = (f"{kind} is the text of a slow client, {'x' * 200}" for kind in "ab")
    with fake_engine(num_blocks=512, max_context=4000, max_num_seqs=1, max_batch_tokens=64) as one:
        async with app_of(one, request_timeout=0.3) as app:
            go = threading.Event()
            hold_passes(one, go)
            try:
                tasks = []
                for text in (running, waiting):
                    body = {"prompt": text, "max_tokens": 2, "stream": stream}
                    tasks.append(asyncio.ensure_future(app.post(COMPLETIONS, json=body)))
                    while one.num_running() + one.num_waiting() < len(tasks):
                        await asyncio.sleep(0.001)
                ended = [await task for task in tasks]
            finally:
                runner_of(one).on_forward = None
                go.set()
            while one.num_running() + one.num_waiting():
                await asyncio.sleep(0.001)
            listed = (await app.get("/v1/requests")).json()["data"][::-1]
            found = [await complete(app, text) for text in (waiting, running)]
    assert [answer.status_code for answer in ended] == [504, 504]
    assert [one["request_id"] for one in listed] == [one.headers["x-request-id"] for one in ended]
    assert [(one["cause"], one["computed_tokens"]) for one in listed] == [
        ("first_seen", 64),
        ("not_started", 0),
    ]
    assert [(one["cause"], one["compared_with"]) for one in found] == [
        ("first_seen", ""),
        ("not_kept", listed[0]["request_id"]),
    ]
    assert found[1]["hit_tokens"] == {"pool": 64}


async def test_a_request_that_the_engine_stops_at_its_deadline_is_listed():
    with fake_engine(num_blocks=64) as engine:
        causes = []
        doctor = Doctor(engine, "fake", History(60), causes.append)
        watch = doctor.watch("late", None, None, range(40), NOT_SAID)
        handle = engine.submit(list(range(40)), deadline=time.monotonic())
        assert handle.result(timeout=30).finish_reason == "timeout"
        doctor.left(watch, handle, is_late=False)
        doctor.settle()
    (found,) = doctor.history.latest(None)
    assert (found.request_id, found.diagnosis.computed_tokens, causes) == (
        "late",
        0,
        ["not_started"],
    )


async def test_running_requests_have_no_diagnosis(app, spoken_engine, speaker):
    go = threading.Event()
    hold_passes(spoken_engine, go)
    try:
        tasks = [
            asyncio.ensure_future(complete(app, "The same text at the same time, of two clients"))
            for _ in "ab"
        ]
        while spoken_engine.num_running() + spoken_engine.num_waiting() < 2:
            await asyncio.sleep(0.001)
        assert (await app.get("/v1/requests")).json()["data"] == []
        assert (await app.get("/v1/requests/last/cache")).status_code == 404
    finally:
        runner_of(spoken_engine).on_forward = None
        go.set()
    causes = sorted([(await task)["cause"] for task in tasks])
    assert causes[0] == "first_seen"
    assert causes[1] in ("none", "not_kept", "tail")


async def test_no_text_of_a_prompt_is_in_the_log_and_causes_are_counted(app, speaker, kept_logging):
    stream = io.StringIO()
    secret = "Ann-Nym"
    configure_logging(ServerSettings(log_level="debug"), stream)
    for end in "ab":
        found = await ask(app, SYSTEM, f"Write about {end}, which is {secret}")
    assert secret in (await app.get(f"/v1/requests/{found['request_id']}/cache")).text
    assert stream.getvalue()
    assert secret not in stream.getvalue()
    metrics = (await app.get("/metrics")).text
    for cause in ("first_seen", "other_message"):
        assert f'kvboost:prompt_causes_total{{cause="{cause}",model_name="fake"}} 1.0' in metrics
    assert secret not in metrics


async def test_history_records_expire_without_new_requests(spoken_engine, speaker):
    async with app_of(spoken_engine, request_history=0.05) as app:
        await ask(app, SYSTEM, "Hi")
        history = app._transport.app.state.kv.first.doctor.history
        until = time.monotonic() + 10
        while history.nbytes and time.monotonic() < until:
            await asyncio.sleep(0.01)
        assert history.nbytes == 0


@pytest.mark.alone
async def test_comparing_a_long_prompt_does_not_block_the_event_loop(app, spoken_engine, speaker):
    """The new prompt is compared with the full history of a tenant, whose prompts differ only at
    their ends. This takes less than 5 ms.
    """
    doctor = app._transport.app.state.kv.first.doctor
    ids = list(range(30_000))
    for number in range(256):
        doctor.watch(f"r{number}", None, None, [*ids, number], NOT_SAID)
    took = []
    for number in range(5):
        watch = doctor.watch(f"m{number}", None, None, [*ids, 999], NOT_SAID)
        before = time.perf_counter()
        _, common = doctor.history.closest(None, None, watch._record)[0]
        took.append(time.perf_counter() - before)
        assert common == 30_000 + (number > 0)
    assert min(took) < 0.005
