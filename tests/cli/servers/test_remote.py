"""Tests of `chat --url` with a scripted server: streams, figures, and absent or faulty servers."""

import json
import re
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from helpers.server.live_servers import ENGINE_OPTIONS, KEYS, serving
from kvboost_edge import CPUPagedEngine
from kvboost_edge.cli.servers.remote import RemoteAnswer, RemoteToolCall, ServerClient, Thought
from kvboost_edge.errors import BackendUnavailable, ConfigError, RequestError, install_extra

USAGE = {
    "prompt_tokens": 30,
    "completion_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 16},
}


def chunk(text=None, finish=None, **more):
    delta = {} if text is None else {"content": text}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more}


GOOD = [
    chunk(""),
    chunk("Hel"),
    chunk("lo"),
    chunk(finish="stop"),
    {"choices": [], "usage": USAGE},
    "[DONE]",
]


class Script:
    """Responses of the scripted server, and the requests that it received."""

    def __init__(self):
        self.url = ""
        self.key = ""
        self.status = 200
        self.events = GOOD
        self.raw = None
        self.models = {"data": [{"id": "a-model"}]}
        self.bodies = []


@pytest.fixture
def server():
    script = Script()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args):
            """Log nothing."""

        def _send(self, status, content, kind="application/json"):
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _allowed(self):
            if script.key and self.headers["authorization"] != f"Bearer {script.key}":
                self._send(
                    401,
                    b'{"error": {"message": "Incorrect API key", "type": "invalid_request_error"}}',
                )
                return False
            return True

        def do_GET(self):
            if self._allowed():
                answer = (
                    script.models if self.path == "/v1/models" else {"cache": {"hit_rate": 0.5}}
                )
                self._send(
                    200, answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                )

        def do_POST(self):
            script.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            if not self._allowed():
                return
            if script.status != 200:
                self._send(
                    script.status, json.dumps({"error": {"message": "no such model 'x'"}}).encode()
                )
                return
            lines = [e if isinstance(e, str) else json.dumps(e) for e in script.events]
            stream = "".join(f": comment\n\ndata: {line}\n\n" for line in lines).encode()
            self._send(200, script.raw if script.raw is not None else stream, "text/event-stream")

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = False
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    script.url = f"http://127.0.0.1:{http.server_address[1]}"
    yield script
    http.shutdown()
    http.server_close()
    thread.join()


def ask(server, **options):
    with ServerClient(server.url, **options) as remote:
        return list(
            remote.stream([{"role": "user", "content": "Hi"}], {"max_tokens": 5, "top_k": 3})
        )


def test_an_answer_streams_and_ends_with_its_statistics(server):
    *pieces, answer = ask(server)
    assert pieces == ["Hel", "lo"]
    assert isinstance(answer, RemoteAnswer)
    assert answer[:5] == ("Hello", "stop", 30, 16, 2)
    assert 0 < answer.ttft_ms <= answer.total_ms
    assert "30 prompt tokens, 16 from the cache" in answer.timing_line
    (body,) = server.bodies
    assert (body["model"], body["max_tokens"], body["top_k"], body["stream"]) == (
        "a-model",
        5,
        3,
        True,
    )
    server.events = [
        *GOOD[:-2],
        {**GOOD[-2], "kvboost": {"hit_tokens": {"pool": 0, "disk": 10, "redis": 6}}},
        GOOD[-1],
    ]
    assert "16 from the cache (10 from disk, 6 from redis) · " in ask(server)[-1].timing_line
    assert "draft" not in ask(server)[-1].timing_line
    server.events = [*GOOD[:-2], {**GOOD[-2], "timings": {"draft_n": 9, "draft_n_accepted": 7}}]
    server.events.append("[DONE]")
    assert " · 7 of 9 draft tokens accepted · stop" in ask(server)[-1].timing_line
    server.url += "/v1/"
    assert ask(server, model="other")[:2] == ["Hel", "lo"]
    assert server.bodies[-1]["model"] == "other"


def test_missing_statistics_are_omitted(server):
    server.events = [chunk("x"), chunk(finish="length"), "[DONE]"]
    answer = ask(server)[-1]
    assert isinstance(answer, RemoteAnswer)
    assert "prompt tokens" not in answer.timing_line
    assert " · length: token limit (-n)" in answer.timing_line


def test_the_key_is_sent_and_a_wrong_one_is_named(server, monkeypatch):
    server.key = "sk-right"
    assert ask(server, api_key="sk-right")[0] == "Hel"
    monkeypatch.setenv("KVBOOST_API_KEY", "sk-right")
    assert ask(server)[0] == "Hel"
    monkeypatch.delenv("KVBOOST_API_KEY")
    for key in ("", "sk-wrong"):
        with pytest.raises(
            ConfigError, match=r"does not accept the API key .*Incorrect API key.*--api-key"
        ) as caught:
            ask(server, api_key=key)
        assert not key or key not in str(caught.value)


STOPPED = [chunk("x"), {"error": {"message": "the engine stopped"}}]


@pytest.mark.parametrize(
    ("said", "answer", "kind", "message"),
    [
        ("status", 404, ConfigError, "does not know the model 'a-model'.*--model"),
        ("status", 503, RequestError, "answered 503"),
        ("events", STOPPED, RequestError, "ended the answer with an error: the engine stopped"),
        ("raw", b"data: {nonsense\n\n", RequestError, "not a JSON object"),
        *(
            ("models", other, RequestError, "not as an OpenAI-compatible server")
            for other in (b"<html>", {"data": []}, [1], {})
        ),
    ],
)
def test_a_servers_refusal_is_an_error(server, said, answer, kind, message):
    setattr(server, said, answer)
    with pytest.raises(kind, match=message):
        ask(server)


def test_an_unreachable_server_is_an_error():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (
        ServerClient(f"http://127.0.0.1:{port}") as client,
        pytest.raises(BackendUnavailable, match=r"no server answers at .*kvboost-edge serve"),
    ):
        client.models()


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://x", "http://[::1"])
def test_invalid_urls_are_refused(url):
    with pytest.raises(ConfigError, match="--url"):
        ServerClient(url)


def test_a_missing_httpx_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(BackendUnavailable, match=re.escape(install_extra("server"))):
        ServerClient("http://127.0.0.1:1")


def test_a_remote_conversation(server, typed, printed):
    typed("Hi\n/stats\nMore\n/reset\nAgain\n/quit\n")
    argv = [
        "chat",
        "--url",
        server.url,
        "--system",
        "Be brief.",
        "-n",
        "7",
        "-s",
        "temperature=0.5",
        "-s",
        "stop=END",
    ]
    out = printed(*argv).out
    assert out.count("Hello") == 3
    assert "hit_rate" in out
    assert out.count("16 from the cache") == 3
    roles = [[message["role"] for message in body["messages"]] for body in server.bodies]
    assert roles == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
        ["system", "user"],
    ]
    assert server.bodies[1]["messages"][2]["content"] == "Hello"
    assert {"max_tokens": 7, "temperature": 0.5, "stop": ["END"]}.items() <= server.bodies[
        0
    ].items()


def test_a_conversation_with_a_real_server(typed, printed):
    with (
        CPUPagedEngine.from_pretrained("kvboost-edge/demo", **ENGINE_OPTIONS) as engine,
        serving(engine, api_keys=KEYS) as live,
    ):
        typed("Hello there, how are you today?\nAnd now?\n/stats\n/quit\n")
        chat = ["chat", "--url", live.base_url, "--api-key"]
        out, refused = printed(*chat, KEYS[0], "-n", "8", "-s", "temperature=0")
        assert "admin" in refused, (
            "/stats must be refused to one of several keys without ending the chat"
        )
        cached = [int(count) for count in re.findall(r"(\d+) from the cache", out)]
        assert len(cached) == 2
        assert cached[1] > cached[0]
        assert "does not accept the API key" in printed(*chat, "wrong", code=2).err


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--url", "http://127.0.0.1:1", "-o", "num_blocks=8"], "num_blocks"),
        (["--url", "http://127.0.0.1:1", "--kv-cache-bits", "8"], "kv_cache_bits"),
        (["--api-key", "sk-x"], "--api-key"),
    ],
)
def test_engine_options_are_refused_for_a_remote_server(argv, named, printed):
    assert named in printed("chat", *argv, code=2).err


def test_cache_options_are_sent_and_reuse_is_reported(server, printed, typed):
    told = {"hit_tokens": {"pool": 16}, "reused_span_tokens": 9, "recomputed_tokens": 3}
    server.events = [*GOOD[:-2], {**GOOD[-2], "kvboost": told}, GOOD[-1]]
    argv = [
        "chat",
        "--url",
        server.url,
        "--mode",
        "chunk_kv_reuse",
        "--recompute-strategy",
        "cacheblend",
    ]
    for more, asked in (
        ([], {}),
        (
            ["--recompute-overlap", "0", "--recompute-ratio", "0.5"],
            {"recompute_overlap": 0, "recompute_ratio": 0.5},
        ),
    ):
        typed("Hi\n")
        said = " ".join(printed(*argv, *more).out.split())
        expected = {"mode": "chunk_kv_reuse", "recompute_strategy": "cacheblend", **asked}
        assert server.bodies[-1]["kvboost"] == expected
        assert not expected.keys() & server.bodies[-1].keys()
        assert "approximate: 9 tokens reused at other positions, 3 recomputed" in said
    typed("Hi\n")
    printed("chat", "--url", server.url)
    assert "kvboost" not in server.bodies[-1]


def delta(**fields):
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def call(index, arguments, name=None):
    named = {} if name is None else {"name": name}
    return delta(tool_calls=[{"index": index, "function": {**named, "arguments": arguments}}])


THINKING = [
    delta(reasoning_content="Two "),
    delta(reasoning_content="and two."),
    chunk("Fo"),
    chunk("ur"),
    "[DONE]",
]
CALLING = [
    chunk("Wait."),
    call(0, "", "get_weather"),
    call(0, '{"city":\n'),
    call(1, "{}", "get_time"),
    call(0, ' "Wien"}'),
    chunk(finish="tool_calls"),
    "[DONE]",
]


def test_reasoning_is_separate_from_the_answer(server):
    server.events = THINKING
    *pieces, answer = ask(server)
    assert pieces == [Thought("Two "), Thought("and two."), "Fo", "ur"]
    assert isinstance(answer, RemoteAnswer)
    assert (answer.text, answer.reasoning, answer.tool_calls) == ("Four", "Two and two.", ())


def test_streamed_tool_calls_are_joined(server):
    server.events = CALLING
    *pieces, answer = ask(server)
    assert pieces == ["Wait."]
    assert isinstance(answer, RemoteAnswer)
    assert answer.finish_reason == "tool_calls"
    assert answer.tool_calls == (
        RemoteToolCall("get_weather", '{"city":\n "Wien"}'),
        RemoteToolCall("get_time", "{}"),
    )


def test_reasoning_and_tool_calls_are_shown(server, typed, printed):
    server.events = THINKING
    typed("2 + 2?\nSure?\n")
    assert "Two and two.\nFour\n" in printed("chat", "--url", server.url).out
    said = {"role": "assistant", "content": "Four", "reasoning_content": "Two and two."}
    assert server.bodies[-1]["messages"][1] == said
    for first, begin in ((CALLING[0], "Wait.\n"), (chunk(""), "")):
        server.events = [first, *CALLING[1:]]
        typed("Weather?\n")
        lines = f'{begin}calls get_weather {{"city": "Wien"}}\ncalls get_time {{}}\nfirst token'
        assert lines in printed("chat", "--url", server.url).out


ERROR = {"error": {"message": "the deadline has passed"}}


def test_a_remote_answer_that_ends_with_an_error_is_kept(server, typed, printed):
    server.events = [delta(reasoning_content="Hm"), chunk("Hel"), chunk("lo"), ERROR]
    typed("Hi\nGo on\n")
    err = printed("chat", "--url", server.url, code=1).err
    said = {"role": "assistant", "content": "Hello", "reasoning_content": "Hm"}
    assert server.bodies[-1]["messages"] == [
        {"role": "user", "content": "Hi"},
        said,
        {"role": "user", "content": "Go on"},
    ]
    assert err.count("an error: the deadline has passed; the part received was kept\n") == 2


@pytest.mark.parametrize("first", [[], [delta(reasoning_content="Hm")], [chunk("\n")]])
def test_a_remote_turn_without_a_part_of_the_answer_is_removed(server, typed, printed, first):
    server.events = [*first, ERROR]
    typed("Hi\nAgain\n")
    assert printed("chat", "--url", server.url, code=1).err.count("this turn was refused: ") == 2
    assert server.bodies[-1]["messages"] == [{"role": "user", "content": "Again"}]


def test_a_schema_is_sent_to_the_server(server, typed, printed, tmp_path):
    schema = {"type": "object", "properties": {"größe": {"type": "integer"}}}
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(schema), encoding="utf-8")
    typed("Hi\n")
    printed("chat", "--url", server.url, "--json-schema", path)
    expected = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    assert server.bodies[-1]["response_format"] == expected
    assert "json_schema" not in server.bodies[-1]
