"""Tests of the bounded queue, the deadline, the batch window, and the cancellation of abandoned
work.
"""

import asyncio
import contextlib
import gc
import http.client
import json
import re
import socket
import threading
import time
import weakref

import openai
import pytest
from fastapi.routing import APIRoute

from helpers.server.live_servers import HeldForward, raw_answer, serving, wait_until
from kvboost_edge import CPUPagedEngine
from kvboost_edge.server.api import bodies
from kvboost_edge.server.app import ROUTERS
from kvboost_edge.server.http.middleware import ADMIN_PATHS, ADMITTED_PATHS, is_admitted
from kvboost_edge.server.work.admission import Admission
from kvboost_edge.server.work.grouping import PrefixGroups

MODEL = "kvboost-edge/demo"
CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 40,
    "ignore_eos": True,
}
TEXT = {"model": MODEL, "prompt": "Hello", "max_tokens": 40, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def held(tiny_engine):
    """Tiny engine, blocked inside its forward pass after a first run that compiles missing kernels."""
    tiny_engine.generate("warm", max_new_tokens=2)
    hold = HeldForward(tiny_engine)
    yield hold
    hold.release()


@contextlib.contextmanager
def posting(server, body, path="/v1/completions", **options):
    """Post in a thread while the block runs; the yielded list holds the response after it."""
    answers = []

    def post():
        with server.client(**options) as client:
            answers.append(client.post(path, json=body))

    thread = threading.Thread(target=post)
    thread.start()
    yield answers
    thread.join(timeout=30)
    assert not thread.is_alive()


def finished(server, reason):
    """Return vLLM's count of requests that ended for this reason."""
    labels = {"model_name": MODEL, "finished_reason": reason}
    return server.state.metrics.registry.get_sample_value("vllm:request_success_total", labels) or 0


@pytest.mark.parametrize("body", [TEXT, {**TEXT, "prompt": "x" * 200_000}], ids=["small", "large"])
def test_a_full_queue_answers_503_at_once(tiny_engine, held, monkeypatch, body):
    """The request is rejected while the model is blocked, before its body is parsed or tokenized."""
    read = []
    with serving(tiny_engine, max_batch_size=1, max_queue_size=1) as server:
        with (
            posting(server, TEXT) as first,
            posting(server, TEXT) as second,
            server.client() as client,
        ):
            wait_until(lambda: server.state.admission.sequences == 2, "two requests in flight")
            # The first request must be past tokenization, which the patches below replace.
            wait_until(lambda: held.steps == 1, "the model to stand still")
            with monkeypatch.context() as patch:
                patch.setattr(bodies, "parse_json", read.append)
                patch.setattr(tiny_engine.tokenizer.codec, "encode", read.append)
                refused = client.post("/v1/completions", json=body)
            assert (refused.status_code, read, held.steps) == (503, [], 1)
            held.release()
        error = refused.json()["error"]
        assert error["code"] == "queue_full"
        assert error["message"] == (
            "2 requests are in flight (limit: 2); try again later, or raise --max-queue-size"
        )
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert [answer.status_code for answer in (*first, *second)] == [200, 200]
        assert server.state.admission.refused == 1
        wait_until(server.idle, "the server to be idle")


def test_the_queue_is_bounded_by_tokens(tiny_engine, held):
    with serving(tiny_engine, max_queue_tokens=100) as server, server.client() as client:
        with posting(server, {**TEXT, "max_tokens": 60}) as first:
            wait_until(lambda: server.state.admission.sequences == 1, "a request in flight")
            refused = client.post("/v1/completions", json={**TEXT, "max_tokens": 60})
            held.release()
        never = client.post("/v1/completions", json={**TEXT, "max_tokens": 200})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
        assert refused.json()["error"]["message"].endswith("or raise --max-queue-tokens")
        assert (never.status_code, never.json()["error"]["code"]) == (400, "request_too_large")
        assert "--max-queue-tokens" in never.json()["error"]["message"]
        assert first[0].status_code == 200


def test_the_deadline_ends_a_request_with_504_and_its_work(tiny_engine, held):
    with serving(tiny_engine, request_timeout=0.3) as server, server.client() as client:
        started = time.perf_counter()
        answer = client.post("/v1/completions", json=TEXT)
        assert time.perf_counter() - started < 5
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert finished(server, "abort") == 1
        steps = held.steps
        held.release()
        wait_until(server.idle, "the work to stop")
        assert held.steps <= steps + 1


def test_the_deadline_covers_the_queue(tiny_model_dir):
    options = {"num_blocks": 64, "backend": "cpu", "dtype": "float32", "max_num_seqs": 1}
    with CPUPagedEngine.from_pretrained(str(tiny_model_dir), **options) as engine:
        engine.generate("warm", max_new_tokens=2)
        held = HeldForward(engine)
        with (
            serving(engine, request_timeout=0.3, max_batch_size=1) as server,
            server.client() as client,
        ):
            with posting(server, TEXT) as first:
                wait_until(lambda: held.steps == 1, "the first to run")
                answer = client.post("/v1/completions", json=TEXT)
                held.release()
            assert answer.status_code == 504
            assert first[0].status_code == 504
            wait_until(server.idle, "the work to stop")


@pytest.mark.parametrize("steps", [0, 3])
def test_clients_do_not_retry_an_answer_whose_decoding_takes_too_long(tiny_engine, held, steps):
    """They retry if the prompt took too long, because its computed part is cached."""
    with (
        serving(tiny_engine, request_timeout=1.0) as server,
        openai.OpenAI(
            base_url=f"{server.base_url}/v1", api_key="none", max_retries=1, timeout=30
        ) as client,
    ):
        refused = []
        client._client.event_hooks["response"] = [lambda answer: refused.append(answer.headers)]
        held.step(steps)
        with pytest.raises(openai.InternalServerError):
            client.completions.create(
                model=MODEL, prompt="Hello", max_tokens=40, extra_body={"ignore_eos": True}
            )
        assert len(refused) == (1 if steps else 2)
        assert {headers.get("x-should-retry") for headers in refused} == (
            {"false"} if steps else {None}
        )
        held.release()
        wait_until(server.idle, "the work to stop")


def test_a_stream_past_its_deadline_ends_with_an_error_event(tiny_engine, held):
    with serving(tiny_engine, request_timeout=0.5) as server, server.client() as client:
        held.step(3)
        with client.stream("POST", "/v1/completions", json={**TEXT, "stream": True}) as answer:
            assert answer.status_code == 200
            events = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
        errors = [json.loads(event)["error"] for event in events if event.startswith('{"error"')]
        assert [error["code"] for error in errors] == ["deadline_exceeded"]
        assert errors[0]["message"].startswith("the stream paused for more than 0.5 seconds")
        held.release()
        wait_until(server.idle, "the work to stop")


def test_a_stream_without_a_token_ends_at_its_deadline(tiny_engine, held):
    with serving(tiny_engine, request_timeout=0.3) as server, server.client() as client:
        answer = client.post("/v1/completions", json={**TEXT, "stream": True})
        assert answer.status_code == 504
        assert answer.json()["error"]["message"].startswith("the request took longer than 0.3 s")
        held.release()
        wait_until(server.idle, "the work to stop")


def test_the_deadline_of_a_stream_moves_with_each_token(tiny_engine, held, monkeypatch):
    terms = []
    submit = tiny_engine.submit
    monkeypatch.setattr(
        tiny_engine, "submit", lambda *a, **kw: terms.append(kw["terms"]) or submit(*a, **kw)
    )
    with serving(tiny_engine) as server, server.client() as client:
        held.step(3)
        with client.stream("POST", "/v1/completions", json={**TEXT, "stream": True}) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            wait_until(lambda: held.steps == 4, "the model to stand still")
            (admission,) = server.state.admission.admitted
            before = admission.deadline
            # The first timer, which was set before the deadline moved, must not end the stream.
            server.server.servers[0].get_loop().call_soon_threadsafe(admission._expire)
            held.step()
            wait_until(lambda: admission.deadline > before, "the deadline to move")
            held.release()
            assert [line for line in lines if line][-1] == "data: [DONE]"
        wait_until(server.idle, "the work to stop")
    assert [one.deadline for one in terms] == [None], "the engine would end the stream"


def test_the_deadline_of_a_stream_moves_while_its_prompt_advances(tiny_model_dir):
    options = {"num_blocks": 64, "dtype": "float32", "max_batch_tokens": 16}
    with CPUPagedEngine.from_pretrained(str(tiny_model_dir), **options) as engine:
        engine.generate("warm", max_new_tokens=2)
        held = HeldForward(engine)
        body = {**TEXT, "prompt": list(range(1, 100)), "stream": True}
        with (
            serving(engine, request_timeout=1.0) as server,
            posting(server, body) as answers,
        ):
            wait_until(lambda: held.steps == 1, "the prompt to run")
            (admission,) = server.state.admission.admitted
            for number in (2, 3):
                before = admission.deadline
                held.step()
                wait_until(lambda n=number: held.steps == n, "the next part of the prompt")
                wait_until(lambda d=before: admission.deadline > d, "the deadline to move")
            wait_until(lambda: not server.state.admission.admitted, "the stream to end")
            held.release()
    assert answers[0].status_code == 504, "a prompt that stands still must end"


@pytest.mark.parametrize(
    ("header", "rest"),
    [
        ("X-A: b", b"\r\n"),
        ("X-A: b", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20),
        ("Upgrade: h2c\r\nConnection: Upgrade", b""),
    ],
    ids=["line feed", "pipelined", "upgrade"],
)
def test_a_disconnect_is_noticed_after_pipelined_bytes(tiny_engine, held, header, rest):
    with serving(tiny_engine) as server:
        with server.connect() as sock:
            sock.sendall(server.request_bytes("/v1/completions", TEXT, header) + rest)
            wait_until(lambda: held.steps == 1, "the step to begin")
            sock.sendall(rest)
        wait_until(lambda: not server.state.admission.admitted, "the request to be ended")
        held.release()
        wait_until(server.idle, "the work to stop")


def half_closed(server, held, **body):
    """Open a connection, send a request, close the sending side, and wait until the model is
    blocked in it.
    """
    sock = server.connect()
    sock.sendall(server.request_bytes("/v1/completions", {**TEXT, **body}))
    sock.shutdown(socket.SHUT_WR)
    wait_until(lambda: held.steps == 1, "the step to begin")
    assert sock.recv(1000).startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
    return sock


@pytest.mark.parametrize("stream", [False, True])
def test_a_half_closed_client_gets_its_answer(tiny_engine, held, stream):
    more = {"stream": stream, "max_tokens": 500}  # many steps may pass before the first event
    with serving(tiny_engine) as server, half_closed(server, held, **more) as sock:
        if stream:
            until_it_is_asked(sock, held)
        held.release()
        response = http.client.HTTPResponse(sock)
        with contextlib.closing(response):
            response.begin()  # like every client it skips interim responses
            answer = response.read()
        with server.client() as client:
            whole = client.post("/v1/completions", json={**TEXT, **more}).content
    assert response.status == 200
    assert texts(answer) == texts(whole) != ""


def until_it_is_asked(sock, held):
    """Step the model until a stream has begun; then wait for a keep-alive chunk between two events."""
    received = b""

    def peek(end):
        nonlocal received
        received = sock.recv(1_000_000, socket.MSG_PEEK)
        return re.search(end, received)

    wait_until(lambda: held.step() or peek(rb"data: "), "the stream to begin")
    wait_until(lambda: peek(rb"\r\n0+$"), "a sign")


def texts(answer):
    """Return the text of a response or of the events of a stream."""
    events = [line.removeprefix(b"data: ") for line in answer.splitlines() if line]
    return "".join(
        json.loads(event)["choices"][0]["text"] for event in events if event != b"[DONE]"
    )


def test_a_half_closed_clients_disconnect_is_noticed(tiny_engine, held):
    """The client disconnects while its prompt is computed."""
    with serving(tiny_engine) as server:
        half_closed(server, held).close()
        wait_until(lambda: not server.state.admission.admitted, "the request to be ended")
        assert held.steps == 1
        held.release()
        wait_until(server.idle, "the work to stop")


def test_a_half_closed_clients_disconnect_ends_its_stream(tiny_engine, held):
    """The stream ends long before its token limit."""
    with serving(tiny_engine) as server:
        with half_closed(server, held, stream=True, max_tokens=500) as sock:
            until_it_is_asked(sock, held)
        wait_until(lambda: not server.state.admission.admitted, "the request to be ended")
        assert held.steps < 400
        held.release()
        wait_until(server.idle, "the work to stop")


def test_requests_with_one_prefix_start_together(tiny_engine, held):
    prompt = "The same beginning of every prompt, " * 3
    with serving(tiny_engine, batch_window_ms=10_000) as server, contextlib.ExitStack() as posts:
        answers = [
            posts.enter_context(posting(server, {**TEXT, "prompt": prompt + "a", "max_tokens": 4}))
        ]
        wait_until(lambda: held.steps == 1, "the first prompt to be computed")
        for tail in "bc":
            answers.append(
                posts.enter_context(
                    posting(server, {**TEXT, "prompt": prompt + tail, "max_tokens": 4})
                )
            )
        wait_until(lambda: server.state.admission.groups.held == 2, "both to be held")
        alone = posts.enter_context(posting(server, {**TEXT, "prompt": "another", "max_tokens": 4}))
        wait_until(
            lambda: server.engine._core._live and len(server.engine._core._live) == 2,
            "the other not to be held",
        )
        started = time.perf_counter()
        held.release()  # the leader's first token releases them, long before the window ends
        posts.close()
        assert time.perf_counter() - started < 5
        texts = [answer[0].json()["choices"][0]["text"] for answer in answers]
        assert alone[0].status_code == 200
        wait_until(server.idle, "the server to be idle")
    for tail, text in zip("abc", texts, strict=True):
        sampled = tiny_engine.generate(
            prompt + tail, max_new_tokens=4, temperature=0, ignore_eos=True, mode="baseline"
        )
        assert text == sampled.output_text


async def test_the_batch_window_bounds_the_wait():
    groups = PrefixGroups(window_seconds=0.05, block_size=4)
    prompt = [1, 2, 3, 4, 5]
    first = await groups.join("tenant", prompt)
    started = time.perf_counter()
    second = await groups.join("tenant", prompt)
    assert time.perf_counter() - started > 0.04
    assert first == second is not None
    assert groups.held == 1
    # A wait for another key's prompt would reveal that prompt.
    others = [await groups.join(tenant, prompt) for tenant in ("another tenant", None)]
    assert (len({first, *others}), groups.held) == (3, 1)
    for key in (first, second, *others):
        groups.leave(key)
    assert not groups._groups


@pytest.mark.parametrize(
    ("window", "ids"), [(0.0, [1, 2, 3, 4, 5]), (5.0, [1, 2, 3, 4])], ids=["off", "short"]
)
async def test_requests_without_a_window_or_a_full_block_are_not_held(window, ids):
    groups = PrefixGroups(window_seconds=window, block_size=4)
    for _ in range(3):
        assert await asyncio.wait_for(groups.join(None, ids), 1) is None
    assert groups.held == 0


def test_a_dead_engine_fails_its_requests_and_readiness(tiny_model_dir):
    from kvboost_edge import CPUPagedEngine

    options = {"num_blocks": 64, "backend": "cpu", "dtype": "float32"}
    with CPUPagedEngine.from_pretrained(str(tiny_model_dir), **options) as engine:
        engine.generate("warm", max_new_tokens=2)
        held = HeldForward(engine)
        engine._core._take = _explode
        with serving(engine) as server, server.client() as client:
            streamed = server.connect()
            streamed.sendall(
                server.request_bytes(
                    "/v1/completions", {**TEXT, "stream": True}, "Connection: close"
                )
            )
            with posting(server, TEXT) as first:
                wait_until(
                    lambda: server.state.admission.sequences == 2 and held.steps, "both in flight"
                )
                assert client.get("/ready").status_code == 200
                held.release()
            assert (first[0].status_code, first[0].json()["error"]["code"]) == (
                500,
                "engine_stopped",
            )
            assert "gone" not in first[0].text
            assert b"engine_stopped" in raw_answer(streamed)
            streamed.close()
            for path in ("/health", "/ready"):
                answer = client.get(path)
                assert answer.status_code == 503
                assert "the engine stopped" in answer.json()["error"]["message"]
            assert client.get("/version").status_code == 200
            assert (
                'kvboost:engine_alive{model_name="kvboost-edge/demo"} 0.0'
                in client.get("/metrics").text
            )
            after = client.post("/v1/completions", json=TEXT)
            assert (after.status_code, after.json()["error"]["code"]) == (503, "engine_stopped")
            for method, path in (
                ("GET", "/v1/stats"),
                ("GET", "/v1/blocks"),
                ("POST", "/cache/reset"),
            ):
                answer = client.request(method, path)
                assert (answer.status_code, answer.json()["error"]["code"]) == (
                    503,
                    "engine_stopped",
                ), path
            wait_until(lambda: not server.state.admission.admitted, "the requests to be ended")


def _explode(*arguments):
    from kvboost_edge.errors import CacheCorruption

    raise CacheCorruption("gone")


@pytest.mark.parametrize(
    "keys", [(), ("one",), ("one", "two")], ids=["no key", "one key", "two keys"]
)
def test_priorities_across_tenants_are_refused(tiny_engine, keys):
    with serving(tiny_engine, api_keys=keys) as server, server.client() as client:
        for path, body in (
            ("/v1/completions", TEXT),
            ("/v1/chat/completions", CHAT),
            ("/v1/warm", {"text": "a"}),
        ):
            assert (
                client.post(path, json={**body, "model": MODEL, "priority": 5}).status_code == 200
            )
            answer = client.post(path, json={**body, "model": MODEL, "priority": -1})
            if len(keys) < 2:
                assert answer.status_code == 200
            else:
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")


def test_a_keys_weight_applies_to_its_requests(tiny_engine, held):
    """The scheduler divides the work among tenants by these weights."""
    with (
        serving(tiny_engine, api_keys=("heavy weight=4", "light")) as server,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(held.release)
        for number, key in enumerate(("heavy", "light"), start=1):
            stack.enter_context(posting(server, TEXT, headers={"x-api-key": key}))
            wait_until(lambda: len(tiny_engine._core._live) == number, "the request to be queued")  # noqa: B023
        weights = [sequence.request.terms.weight for sequence in tiny_engine._core._live.values()]
        held.release()
    assert weights == [4.0, 1.0]


async def test_a_cancelled_waiter_does_not_release_others():
    """The other waiters wait until the leader has computed the prefix or the window ends."""
    groups = PrefixGroups(30.0, 2)
    key = await groups.join("t", [1, 2, 3])
    waiters = [asyncio.create_task(groups.join("t", [1, 2, 3 + index])) for index in range(3)]
    while groups.held < 3:
        await asyncio.sleep(0)
    waiters[0].cancel()
    await asyncio.wait([waiters[0]])
    for _ in range(5):
        await asyncio.sleep(0)
    assert [task.done() for task in waiters] == [True, False, False]
    assert key is not None
    groups.leave(key)
    for found in await asyncio.gather(*waiters[1:]):
        groups.leave(found)
    assert not groups._groups


@pytest.mark.parametrize("stream", [False, True])
def test_a_finished_request_is_freed_without_the_garbage_collector(
    live_server, monkeypatch, stream
):
    """The admission holds all objects of a request. A reference cycle through the task that watches
    the client would keep it alive.
    """

    admissions = []
    begin = Admission.__init__

    def noted(self, *arguments, **options):
        begin(self, *arguments, **options)
        admissions.append(weakref.ref(self))

    monkeypatch.setattr(Admission, "__init__", noted)
    gc.disable()
    try:
        with live_server.client() as client:
            for _ in range(5):
                assert client.post(
                    "/v1/completions", json={**TEXT, "max_tokens": 3, "stream": stream}
                ).is_success
            # An open connection holds its last request.
            assert len(admissions) == 5
            wait_until(
                lambda: sum(one() is not None for one in admissions) <= 1,
                "the admissions to be freed",
            )
    finally:
        gc.enable()


def test_the_admission_lists_cover_every_route():
    """A full queue rejects requests to every route with a body, except those of admins and the
    batch API, which compute nothing.
    """
    routes = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
    assert {route.path for route in routes} >= ADMIN_PATHS
    posted = {route.path for route in routes if "POST" in route.methods}
    stored = {path for path in posted if path.startswith(("/v1/files", "/v1/batches"))}
    computing = posted - stored - ADMIN_PATHS
    assert {path for path in computing if "{" not in path} == ADMITTED_PATHS
    named = {re.sub(r"\{.*?\}", "x", path) for path in computing if "{" in path}
    assert len(named) == 2
    assert all(map(is_admitted, named))


def test_one_key_cannot_fill_the_queue(tiny_engine, held):
    """One of four places is reserved for each of two keys; the other two are first come, first
    served.
    """
    limits = {"max_batch_size": 1, "max_queue_size": 3}
    greedy = {"headers": {"x-api-key": "greedy"}}
    patient = {"headers": {"x-api-key": "patient"}}
    with (
        serving(tiny_engine, api_keys=("greedy", "patient"), **limits) as server,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(held.release)
        answers = [stack.enter_context(posting(server, TEXT, **greedy)) for _ in range(3)]
        wait_until(lambda: server.state.admission.sequences == 3, "three requests in flight")
        with server.client(**greedy) as client:
            refused = client.post("/v1/completions", json=TEXT)
            never = client.post("/v1/completions", json={**TEXT, "n": 4})
        answers.append(stack.enter_context(posting(server, TEXT, **patient)))
        wait_until(
            lambda: server.state.admission.sequences == 4, "the other key's request in flight"
        )
        with server.client(**patient) as client:
            second = client.post("/v1/completions", json=TEXT)
        held.release()
    assert [answer.status_code for answers_of_one in answers for answer in answers_of_one] == [
        200
    ] * 4
    assert (refused.status_code, never.status_code, second.status_code) == (503, 503, 503)
    said = "requests of this API key are in flight (its share is 1, and no more is free); "
    assert refused.json()["error"]["message"].startswith(f"3 {said}")
    assert second.json()["error"]["message"].startswith(f"1 {said}")
    assert server.state.admission.sequences == 0


def test_a_request_above_its_keys_share_is_400(tiny_engine):
    settings = {"api_keys": ("one", "two"), "max_queue_tokens": 200}
    with (
        serving(tiny_engine, **settings) as server,
        server.client(headers={"x-api-key": "one"}) as client,
    ):
        fits = client.post("/v1/completions", json={**TEXT, "max_tokens": 100})
        never = client.post("/v1/completions", json={**TEXT, "max_tokens": 160})
    assert (fits.status_code, never.status_code) == (200, 400)
    assert "the limit is 150" in never.json()["error"]["message"]
