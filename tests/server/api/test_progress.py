"""Tests of progress before the first token, with a model that takes one step at a time when the
test allows it.
"""

import asyncio
import contextlib
import json
import logging

import openai
import pytest

from helpers.server.live_servers import HeldForward, serving, wait_until
from kvboost_edge import CPUPagedEngine
from kvboost_edge.server.api import generation
from kvboost_edge.server.api.chat_requests import ChatChoice
from kvboost_edge.server.api_errors import ShuttingDown
from kvboost_edge.server.work import bridge

MODEL = "kvboost-edge/demo"
CHUNK = 64  # tokens per step
PROMPT = [number % 200 for number in range(300)]
CHAT = [{"role": "user", "content": "The mill grinds corn. " * 20}]
PATHS = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 3},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 3},
    "/completion": {"prompt": PROMPT, "n_predict": 3},
    "/v1/messages": {"messages": CHAT, "max_tokens": 3},
}
FIGURES = {"total", "cache", "processed", "time_ms", "estimated_ms"}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with CPUPagedEngine.from_pretrained(
        "kvboost-edge/demo",
        num_blocks=256,
        max_num_seqs=2,
        max_batch_tokens=CHUNK,
        target_tpot=0.0,  # a slow step must not make the next one smaller
        reuse_gate="off",
    ) as engine:
        engine.generate("warm", max_new_tokens=2)
        yield engine


@pytest.fixture(scope="module")
def server(engine):
    with serving(engine) as server:
        yield server


@pytest.fixture
def held(server, monkeypatch):
    """Forward passes that wait until the test releases them, with progress reports every 10 ms."""
    monkeypatch.setattr(generation, "_PROGRESS_SECONDS", 0.01)
    monkeypatch.setattr("kvboost_edge.engine.schedule.progress_estimate._BOARD_SECONDS", 0.0)
    server.engine.reset_cache()
    runner = server.engine._core._runner
    before = runner.forward
    held = HeldForward(server.engine)
    yield held
    held.release()
    runner.forward = before
    wait_until(server.idle, "the server to be idle")


class Told:
    """Reader of a stream that collects its events and their progress reports."""

    def __init__(self, answer):
        self._lines = answer.iter_lines()
        self.events = []
        self.progress = []

    def next(self):
        """Read the next event; return None at the end."""
        for line in self._lines:
            if line.startswith("data: {"):
                self.events.append(json.loads(line.removeprefix("data: ")))
                if "prompt_progress" in self.events[-1]:
                    self.progress.append(self.events[-1]["prompt_progress"])
                return self.events[-1]
        return None

    def until(self, processed, *, newer=False):
        """Read until this many tokens are processed; return the progress report."""
        last = {}
        while last.get("processed") != processed:
            assert self.next() is not None, (
                f"the stream ended before {processed} tokens were processed"
            )
            last = self.progress[-1] if "prompt_progress" in self.events[-1] else last
        return last

    def rest(self):
        while self.next() is not None:
            pass


@contextlib.contextmanager
def asking(server, path, **more):
    body = {**PATHS[path], "stream": True, "return_progress": True, "temperature": 0, **more}
    with server.client(headers={}) as client, client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200, answer.read()
        yield Told(answer)


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_reports_prompt_progress_at_each_step(server, held, path):
    with asking(server, path) as told:
        first = told.until(0)
        total = first["total"]
        assert first["estimated_ms"] is None or first["estimated_ms"] > 0
        left = []
        for done in range(CHUNK, total, CHUNK):
            held.step()
            told.until(done)
            left.append(told.progress[-1]["estimated_ms"])
        held.release()
        told.rest()
    assert all(set(one) == FIGURES and one["total"] == total for one in told.progress)
    processed = [one["processed"] for one in told.progress]
    assert processed == sorted(processed)
    assert all(one["cache"] <= one["processed"] for one in told.progress)
    times = [one["time_ms"] for one in told.progress]
    assert times == sorted(times)
    last = told.progress[-1]
    assert (last["processed"], last["estimated_ms"]) == (total, 0)
    assert all(number is not None and number >= 0 for number in left)
    # All progress reports precede the first token.
    where = [number for number, event in enumerate(told.events) if "prompt_progress" in event]
    assert where == list(range(len(where)))
    assert len(told.events) > len(where)


def test_a_long_prefill_is_logged_until_its_first_token(server, held, monkeypatch, caplog):
    monkeypatch.setattr(bridge, "_PREFILL_LOG_SECONDS", 0.01)
    monkeypatch.setattr(logging.getLogger("kvboost_edge.server"), "propagate", True)

    def lines():
        found = [one.facts for one in caplog.records if one.getMessage() == "reading a prompt"]
        return [one for one in found if one["tokens"]]

    with caplog.at_level(logging.INFO), asking(server, "/v1/completions") as told:
        told.until(0)
        held.step()
        wait_until(lambda: len(lines()) >= 2, "the log to tell of the first step")
        line = lines()[-1]
        assert line["tokens"] <= CHUNK
        assert (line["of"], line["request_id"][:4]) == (len(PROMPT), "req-")
        assert 0 < line["tokens_per_second"] < 1e6
        held.release()
        told.rest()


def test_the_estimated_time_falls_during_prefill(server, held):
    """Every step is reported to take 10 ms per token, so the remaining time is known exactly."""
    estimate = server.engine._core._estimate
    observe = estimate.observe
    estimate._recent = {}
    estimate.observe = lambda plan, seconds: observe(
        plan, 0.01 * sum(one.stop - one.start for one in plan.work)
    )
    try:
        with asking(server, "/v1/completions") as told:
            left = []
            for done in range(CHUNK, len(PROMPT), CHUNK):
                held.step()
                left.append(told.until(done)["estimated_ms"])
            held.release()
            told.rest()
    finally:
        estimate.observe = observe
        estimate._recent = {}
        estimate._known = []
    assert left == pytest.approx(
        [10 * (len(PROMPT) - done) for done in range(CHUNK, len(PROMPT), CHUNK)], abs=2
    )


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_progress_chunks_have_llama_cpps_format(server, held, path):
    with asking(server, path, stream_options={"include_usage": True}) as told:
        told.until(0)
        held.release()
        told.rest()
    for event in told.events[: len(told.progress)]:
        assert set(event) == {
            *(
                "id",
                "object",
                "created",
                "model",
                "system_fingerprint",
                "choices",
                "prompt_progress",
                "usage",
            ),
        }
        assert event["usage"] is None
        (choice,) = event["choices"]
        content = (
            {"text": ""} if "text" in choice else {"delta": {"role": "assistant", "content": None}}
        )
        assert choice == {"index": 0, **content, "logprobs": None, "finish_reason": None}
    assert told.events[-1]["usage"]["prompt_tokens"] == told.progress[-1]["total"]
    assert (
        told.events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
        == told.progress[-1]["cache"]
        == 0
    )


def test_completion_progress_has_llama_cpps_format(server, held):
    with asking(server, "/completion", return_tokens=True) as told:
        told.until(0)
        held.release()
        told.rest()
    for event, progress in zip(told.events, told.progress, strict=False):
        head = {"index": 0, "content": "", "tokens": [], "stop": False, "id_slot": -1}
        counts = {"tokens_predicted": 0, "tokens_evaluated": len(PROMPT)}
        assert event == {**head, **counts, "prompt_progress": progress}
    assert len(told.events[-1]["tokens"]) <= 3


def test_cached_tokens_count_as_processed(server, held):
    held.release()
    with asking(server, "/v1/completions") as told:
        told.rest()
    with asking(server, "/v1/completions", stream_options={"include_usage": True}) as told:
        told.rest()
    last = told.progress[-1]
    assert (
        last["cache"] == told.events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 288
    )
    assert last["processed"] == last["total"] == len(PROMPT)


def test_a_short_prefill_has_one_progress_event(server, held, monkeypatch):
    monkeypatch.setattr(generation, "_PROGRESS_SECONDS", 60)
    held.release()
    with asking(server, "/v1/chat/completions") as told:
        told.rest()
    assert len(told.progress) == 1
    assert told.progress[0]["processed"] == told.progress[0]["total"]


@pytest.mark.parametrize("path", PATHS)
def test_progress_is_sent_on_request_and_does_not_change_the_answer(server, held, path):
    """Responses that are not streamed omit progress, as in llama.cpp. The field is accepted and has
    no effect.
    """
    held.release()
    found = []
    for value in (True, False, None):
        with asking(server, path, return_progress=value) as told:
            told.rest()
        if not value:
            assert not told.progress
            assert not any(event.get("type") == "ping" for event in told.events)
        found.append(texts(event for event in told.events if "prompt_progress" not in event))
    assert found == [found[0]] * 3 != [""] * 3
    body = {**PATHS[path], "temperature": 0}
    with server.client() as client:
        wholes = [
            client.post(path, json={**body, "return_progress": value}) for value in (True, False)
        ]
    assert [whole.status_code for whole in wholes] == [200, 200]
    assert [set(whole.json()) for whole in wholes] == [set(wholes[1].json())] * 2
    assert "prompt_progress" not in wholes[0].text


def texts(events):
    """Return the text of a stream of any API."""
    found = ""
    for event in events:
        for choice in event.get("choices", ()):
            found += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        found += event.get("content") or (event.get("delta") or {}).get("text") or ""
    return found


def test_a_queued_request_gets_progress_events(server, held):
    running = [{"prompt": [at, *PROMPT], "max_tokens": 2, "ignore_eos": True} for at in range(2)]
    with contextlib.ExitStack() as stack:
        before = []
        for body in running:
            before.append(stack.enter_context(asking(server, "/v1/completions", **body)))
            before[-1].until(0)
        held.step()
        wait_until(lambda: server.engine.num_running() == 2, "both places to be taken")
        told = stack.enter_context(asking(server, "/v1/completions", prompt=[7, *PROMPT]))
        for _ in range(5):
            assert told.next()["prompt_progress"]
        held.step(2)  # steps have been measured now
        while told.progress[-1]["estimated_ms"] is None:
            told.next()
        waiting = told.progress[-1]
        assert (waiting["cache"], waiting["processed"], waiting["time_ms"]) == (0, 0, 0)
        assert waiting["estimated_ms"] > 0
        assert set(waiting) == FIGURES, "progress must not contain figures of other requests"
        held.release()
        for one in (*before, told):
            one.rest()
    assert told.progress[-1]["processed"] == len(PROMPT) + 1
    assert told.progress[-1]["time_ms"] > 0


def test_progress_of_several_prompts_is_separate(server, held):
    prompts = [PROMPT, [1, *PROMPT[:200]]]
    with asking(server, "/v1/completions", prompt=prompts, n=2) as told:
        told.until(0)
        for _ in range(12):
            held.step()
        held.release()
        told.rest()
    found = {}
    for event in told.events:
        if "prompt_progress" in event:
            found.setdefault(event["choices"][0]["index"], []).append(event["prompt_progress"])
    assert set(found) == {0, 2}
    for index, prompt in ((0, prompts[0]), (2, prompts[1])):
        processed = [one["processed"] for one in found[index]]
        assert processed == sorted(processed)
        assert found[index][-1]["processed"] == found[index][-1]["total"] == len(prompt)
        own = [
            event
            for event in told.events
            if event.get("choices") and event["choices"][0]["index"] == index
        ]
        where = [number for number, event in enumerate(own) if "prompt_progress" in event]
        assert where == list(range(len(where))), (
            "progress events must precede the first token of their prompt"
        )


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/v1/chat/completions", lambda event: event["error"]["code"]),
        ("/v1/completions", lambda event: event["error"]["code"]),
        ("/completion", lambda event: event["error"]["code"]),
        ("/v1/messages", lambda event: event["error"]["type"]),
    ],
)
def test_an_error_after_the_first_progress_event_is_an_event(server, held, path, error):
    with asking(server, path) as told:
        told.until(0)
        for admission in list(server.state.admission.admitted):
            admission._task.get_loop().call_soon_threadsafe(
                admission.cancel, ShuttingDown()
            )  # as a shutdown does
        wait_until(lambda: not server.state.admission.admitted, "the requests to be ended")
        held.release()
        told.rest()
    assert error(told.events[-1]) in ("shutting_down", 503, "overloaded_error")
    assert not texts(told.events[:-1])


@pytest.mark.parametrize("path", PATHS)
def test_errors_found_before_the_first_event_keep_their_status(server, held, path):
    wrong = (
        {"prompt": PROMPT * 400}
        if "prompt" in PATHS[path]
        else {"messages": [{**CHAT[0], "content": "x " * 70000}]}
    )
    with server.client() as client:
        answer = client.post(
            path, json={**PATHS[path], **wrong, "stream": True, "return_progress": True}
        )
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"


def asking_openai(server):
    return openai.OpenAI(
        base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=60
    )


def test_openai_client_ignores_progress_events(server, held):
    held.release()
    with asking_openai(server) as client:
        stream = client.chat.completions.create(
            model="kvboost-edge/demo",
            messages=CHAT,
            max_tokens=3,
            stream=True,
            extra_body={"return_progress": True},
            temperature=0,
        )
        chunks = list(stream)
    found = [
        chunk.model_extra["prompt_progress"]
        for chunk in chunks
        if "prompt_progress" in (chunk.model_extra or {})
    ]
    assert found
    assert found[-1]["processed"] == found[-1]["total"]
    assert chunks[-1].choices[0].finish_reason


PINGS = {
    "/v1/completions": ": ping",
    "/v1/chat/completions": ": ping",
    "/completion": ": ping",
    "/v1/messages": 'data: {"type":"ping"}',
}


def without_pings(path, lines):
    return [line for line in lines if line not in ("", PINGS[path], "event: ping")]


@pytest.mark.parametrize("path", PINGS)
def test_a_silent_stream_sends_pings(server, held, monkeypatch, path):
    """Pings are sent before the first token and after it. They change nothing else."""
    body = {**PATHS[path], "stream": True, "temperature": 0}
    for name in {"max_tokens", "n_predict"} & set(body):
        body[name] = 30
    lines = []
    monkeypatch.setattr(generation, "_PING_SECONDS", 0.01)
    with server.client() as client, client.stream("POST", path, json=body, timeout=60) as answer:
        assert answer.status_code == 200
        found = answer.iter_lines()

        def read_pings():
            before = lines.count(PINGS[path])
            while lines.count(PINGS[path]) < before + 3:
                lines.append(next(found))

        read_pings()
        assert without_pings(path, lines) == []
        tokens = server.engine.paged_stats()["generated_tokens"]
        while server.engine.paged_stats()["generated_tokens"] == tokens:
            steps = held.steps
            held.step()
            wait_until(lambda: held.steps > steps, "the next step")  # noqa: B023
        while not without_pings(path, lines):
            read_pings()
        read_pings()
        held.release()
        lines += found
    monkeypatch.undo()
    with server.client() as client:
        plain = client.post(path, json=body, timeout=60).text.split("\n")
    assert PINGS[path] not in plain
    assert len(without_pings(path, lines)) == len(without_pings(path, plain))
    assert texts(events_of(lines)) == texts(events_of(plain)) != ""


def events_of(lines):
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_a_silent_ollama_stream_sends_empty_lines(server, held, monkeypatch, path):
    monkeypatch.setattr(generation, "_PING_SECONDS", 0.01)
    given = {"prompt": CHAT[0]["content"]} if path == "/api/generate" else {"messages": CHAT}
    body = {**given, "model": MODEL, "options": {"num_predict": 3}}
    with server.client() as client, client.stream("POST", path, json=body, timeout=60) as answer:
        found = answer.iter_lines()
        for _ in range(3):
            line = json.loads(next(found))
            said = line.get("message", line)
            assert (said.get("content", said.get("response")), line["done"]) == ("", False)
        held.release()
        assert json.loads(list(found)[-1])["done"]


def test_pings_are_sent_while_text_is_held_back(server, held, monkeypatch):
    """Tokens arrive, but none has text to send, as in the middle of a tool call."""
    held.release()
    monkeypatch.setattr(ChatChoice, "push", lambda self, event: None)
    # So many tokens that they do not all arrive together with the result, which needs no ping.
    body = {"messages": CHAT, "max_tokens": 200, "stream": True, "ignore_eos": True}
    path = "/v1/chat/completions"
    with server.client() as client, client.stream("POST", path, json=body, timeout=60) as answer:
        assert PINGS[path] not in list(answer.iter_lines())
    # No reminder arrives within 60 seconds, so only tokens can cause pings.
    monkeypatch.setattr(generation, "_PING_SECONDS", 60.0)
    real = generation.merged

    def without_reminders(*arguments, **options):
        monkeypatch.setattr(generation, "_PING_SECONDS", 0.0)
        return real(*arguments, **options)

    monkeypatch.setattr(generation, "merged", without_reminders)
    with server.client() as client, client.stream("POST", path, json=body, timeout=60) as answer:
        assert PINGS[path] in list(answer.iter_lines())


def test_openai_client_waits_through_pings(server, held, monkeypatch):
    monkeypatch.setattr(generation, "_PING_SECONDS", 0.01)
    with asking_openai(server) as client:
        stream = client.chat.completions.create(
            model=MODEL, messages=CHAT, max_tokens=3, stream=True
        )
        completion = client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=3, stream=True
        )
        held.release()
        for chunks in (list(stream), list(completion)):
            assert chunks[-1].choices[0].finish_reason


def test_an_error_after_the_first_ping_is_an_event(server, held, monkeypatch):
    monkeypatch.setattr(generation, "_PING_SECONDS", 0.01)
    body = {"messages": CHAT, "stream": True}
    path = "/v1/chat/completions"
    with server.client() as client, client.stream("POST", path, json=body) as answer:
        found = answer.iter_lines()
        assert next(found) == PINGS[path]
        for admission in list(server.state.admission.admitted):
            admission._task.get_loop().call_soon_threadsafe(admission.cancel, ShuttingDown())
        last = without_pings(path, found)
    assert answer.status_code == 200
    assert json.loads(last[0].removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert last[1:] == ["data: [DONE]"]


def test_a_silent_responses_stream_sends_in_progress_events(server, held, monkeypatch):
    monkeypatch.setattr(generation, "_PING_SECONDS", 0.01)
    with asking_openai(server) as client:
        events = iter(
            client.responses.create(
                model=MODEL, input=CHAT[0]["content"], max_output_tokens=3, stream=True
            )
        )
        kinds = [next(events).type for _ in range(4)]
        held.release()
        kinds += [event.type for event in events]
    assert kinds[:4] == ["response.created", *["response.in_progress"] * 3]
    assert kinds.count("response.created") == 1
    assert "response.in_progress" not in kinds[kinds.index("response.output_item.added") :]
    assert kinds[-1] in ("response.completed", "response.incomplete")


def test_anthropic_client_waits_through_pings(server, held):
    anthropic = pytest.importorskip("anthropic")

    async def read():
        async with anthropic.AsyncAnthropic(
            base_url=server.base_url, api_key="none", max_retries=0
        ) as client:
            extra = {"return_progress": True}
            async with client.messages.stream(
                model=MODEL, messages=CHAT, max_tokens=3, extra_body=extra
            ) as stream:
                held.release()
                message = await stream.get_final_message()
                return message.type, message.usage.output_tokens

    kind, tokens = asyncio.run(read())
    assert kind == "message"
    assert 1 <= tokens <= 3
