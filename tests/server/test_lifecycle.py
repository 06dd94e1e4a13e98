"""Tests of the server as a process: start, drain on SIGTERM, exit code, and truthful readiness."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from helpers.server.live_servers import serving, wait_until
from helpers.server.server_process import running
from helpers.tools import find_systemd_analyze, must_run
from kvboost_edge.server.__main__ import _close_from_now, _ended_by_signal, main

ROOT = Path(__file__).parents[2]
TEXT = {"prompt": "Hello", "max_tokens": 1500, "ignore_eos": True, "stream": True, "temperature": 0}


def test_sigterm_drains_and_exits_with_0(tmp_path):
    """The warm prompt is cached for every key. During the drain new requests are rejected and
    running ones finish.
    """
    text = "A system prompt that every conversation begins with. " * 6
    (tmp_path / "prompt").write_text(text)
    (tmp_path / "keys").write_text("one\ntwo\n")
    with (
        running(
            "--warm", f"@{tmp_path / 'prompt'}", "--api-key-file", str(tmp_path / "keys")
        ) as server,
        httpx.Client(base_url=server.url(), timeout=60) as client,
    ):
        for key in ("one", "two"):
            client.headers["x-api-key"] = key
            usage = client.post(
                "/v1/completions", json={"prompt": text + "Hi", "max_tokens": 1}
            ).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] > 0.8 * usage["prompt_tokens"]
        assert client.get("/ready").json() == {"status": "ready"}
        with client.stream("POST", "/v1/completions", json=TEXT) as stream:
            events = (line[6:] for line in stream.iter_lines() if line.startswith("data: "))
            first = next(events)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: client.get("/ready").status_code == 503, "ready to say no")
            assert client.get("/health").status_code == 200
            refused = client.post("/v1/completions", json=TEXT)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            rest = list(events)
        assert rest[-1] == "[DONE]"
        finish = [json.loads(event)["choices"][0]["finish_reason"] for event in (first, *rest[:-1])]
        assert [reason for reason in finish if reason] == ["length"]
        assert server.end() == 0
    assert {"draining", "stopped"} <= {json.loads(line)["event"] for line in server.lines}


def test_a_stream_is_cut_off_after_the_drain_time(demo_engine):
    with serving(demo_engine, drain_seconds=0.3) as server, server.client() as client:
        body = {**TEXT, "max_tokens": 1900, "n": 8}  # some seconds of work
        with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.server.handle_exit(signal.SIGINT, None)
            assert "shutting_down" in "\n".join(lines)


@contextlib.contextmanager
def in_a_terminal(*flags):
    """Start a server that logs to a terminal; yield its process and the pieces of its output."""
    terminal, end = os.openpty()
    argv = [
        sys.executable,
        "-m",
        "kvboost_edge.server",
        "--port",
        "0",
        "--num-blocks",
        "512",
        *flags,
    ]
    process = subprocess.Popen(argv, cwd=ROOT, stderr=end, stdout=subprocess.DEVNULL)
    os.close(end)
    pieces = []

    def read():
        with contextlib.suppress(OSError):  # the process has ended
            while piece := os.read(terminal, 4096):
                pieces.append(piece.decode())

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield process, pieces
    finally:
        process.kill()
        process.wait()
        reader.join(timeout=10)
        os.close(terminal)


def test_a_terminal_shows_plain_lines_with_the_address_and_ctrl_c():
    with in_a_terminal() as (process, pieces):
        address = re.compile(r"^Open (http://127\.0\.0\.1:\d+)\r$", re.MULTILINE)
        wait_until(lambda: address.search("".join(pieces)), "the server to listen", 60)
        found = address.search("".join(pieces))
        assert re.search(
            r"^\d\d:\d\d:\d\d loading model=kvboost-edge/demo\r$", "".join(pieces), re.MULTILINE
        )
        body = {**TEXT, "max_tokens": 2000, "n": 16}
        with httpx.stream("POST", f"{found[1]}/v1/completions", json=body, timeout=60) as stream:
            lines = stream.iter_lines()  # while it is held, the client stays
            next(lines)
            process.send_signal(signal.SIGINT)
            wait_until(
                lambda: "30 s to finish (--drain-seconds); press Ctrl-C again" in "".join(pieces),
                "the drain to begin",
                60,
            )
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 128 + signal.SIGINT
        assert "{" not in "".join(pieces)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_shutdown_exits_at_once(number, monkeypatch, caplog):
    """The log does not claim that the model was loading. The signal handlers are restored
    afterwards.
    """

    class Exited(BaseException):
        pass

    def exit_with(code):
        raise Exited(code)

    monkeypatch.setattr(os, "_exit", exit_with)
    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)]
    with _ended_by_signal() as ended:
        _close_from_now(ended)
        with pytest.raises(Exited, match=str(128 + number)):
            signal.raise_signal(number)
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)] == before
    assert [record.message for record in caplog.records] == ["exiting immediately"]


def test_a_port_in_use_exits_with_1_and_one_line(live_server, kept_logging, capfd):
    assert main(["--port", str(live_server.port)]) == 1
    told = capfd.readouterr().err
    assert "Traceback" not in told
    assert f"port={live_server.port}" in told.splitlines()[-1]
    assert "loading" not in told, "the port must be checked before the model is loaded"


def test_sigterm_during_loading_exits_with_0():
    with running() as server:
        wait_until(
            lambda: any('"loading"' in line for line in server.lines), "the model to load", 60
        )
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
    shown = "".join(server.lines)
    assert "Traceback" not in shown
    assert '"stopped while loading"' in shown or '"draining"' in shown
    assert '"listening"' not in shown or '"stopped"' in shown


@pytest.mark.full
def test_two_models_in_one_process(tiny_model_dir, tmp_path):
    """The first request for the second model loads it. It is unloaded when idle, and its prompts
    are restored from disk.
    """
    flags = (
        "--model",
        "first=kvboost-edge/demo",
        "--model",
        f"second,other={tiny_model_dir}",
        "--keep-alive",
        "0.5",
    )
    body = {
        "model": "other",
        "prompt": "Once there was a word. " * 8,
        "max_tokens": 2,
        "temperature": 0,
    }
    with (
        running(*flags, "--disk-cache-dir", str(tmp_path)) as server,
        httpx.Client(base_url=server.url(), timeout=60) as client,
    ):

        def state():
            return next(
                one["state"]
                for one in client.get("/v1/models").json()["data"]
                if one["id"] == "second"
            )

        def ask():
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        assert state() == "not_loaded"
        first = ask()
        assert first["model"] == "second"
        wait_until(lambda: state() == "not_loaded", "the idle model to be unloaded", 60)
        again = ask()
        assert again["choices"] == first["choices"]
        assert again["kvboost"]["hit_tokens"]["disk"] > 64
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
    told = [json.loads(line) for line in server.lines]
    assert [one["model"] for one in told if one["event"] == "model loaded"] == ["second", "second"]
    unloaded = [
        one for one in told if one["event"] == "model unloaded" and one["model"] == "second"
    ]
    assert (unloaded[0]["why"], unloaded[0]["cache"]) == ("idle", "kept in its tiers")
    assert "Traceback" not in "".join(server.lines)


class DrippingHub(BaseHTTPRequestHandler):
    """Server that sends a byte now and then, so that no client times out."""

    asked = threading.Event()
    over = threading.Event()

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        self.asked.set()
        with contextlib.suppress(OSError):
            while not self.over.wait(0.2):
                self.wfile.write(b" ")

    def log_message(self, *_):
        pass


@pytest.mark.full
def test_a_hanging_download_does_not_block_shutdown(monkeypatch, tmp_path):
    hub = ThreadingHTTPServer(("127.0.0.1", 0), DrippingHub)
    thread = threading.Thread(target=hub.serve_forever, args=(0.02,))
    thread.start()
    environment = {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": tmp_path,
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    flags = ("--model", "a=kvboost-edge/demo", "--model", "b=nobody/model", "--drain-seconds", "1")
    answers = []
    try:
        with running(*flags) as server, httpx.Client(base_url=server.url(), timeout=60) as client:
            body = {"model": "b", "prompt": "Hello"}
            asking = threading.Thread(
                target=lambda: answers.append(client.post("/v1/completions", json=body))
            )
            asking.start()
            assert DrippingHub.asked.wait(60)
            assert (
                client.post(
                    "/v1/completions", json={**body, "model": "a", "max_tokens": 1}
                ).status_code
                == 200
            )
            server.process.send_signal(signal.SIGTERM)
            asking.join()
            assert server.end() == 0
    finally:
        DrippingHub.over.set()
        hub.shutdown()
        hub.server_close()
        thread.join()
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (503, "shutting_down")
    told = {one["event"]: one for one in map(json.loads, server.lines)}
    assert told["a loading was abandoned"]["model"] == "b"
    assert "stopped" in told
    assert "Traceback" not in "".join(server.lines)


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_a_live_server_is_healthy_and_ready(live_server, path):
    with live_server.client() as client:
        answer = client.get(path)
        assert answer.status_code == 200
        assert answer.headers["cache-control"] == "no-store"


def test_version_names_the_package(live_server):
    from kvboost_edge import __version__

    with live_server.client() as client:
        assert client.get("/version").json() == {"version": __version__}


@pytest.mark.parametrize(
    "name", ["kvboost-edge.service", "kvboost-edge-board.service", "README.md"]
)
def test_the_deployment_files_use_existing_flags(name, capsys):
    shown = (ROOT / "docs" / "deploy" / name).read_text(encoding="utf-8")
    flags = set(re.findall(r"(?<=[\s`\"])--[a-z][a-z-]+", shown))
    assert main(["--help"]) == 0
    known = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    assert flags - {"--now"} <= known
    assert "kvboost-server" in shown


@pytest.mark.skipif(
    find_systemd_analyze() is None and not must_run(), reason="systemd-analyze is missing"
)
@pytest.mark.parametrize("name", ["kvboost-edge.service", "kvboost-edge-board.service"])
def test_the_systemd_units_are_valid_and_hardened(name, tmp_path):
    text = (ROOT / "docs" / "deploy" / name).read_text(encoding="utf-8")
    unit = tmp_path / name
    unit.write_text(text.replace("/opt/kvboost-edge/bin/kvboost-server", sys.executable))
    for command in (["verify", "--man=no"], ["security", "--offline=true", "--threshold=20"]):
        done = subprocess.run(
            ["systemd-analyze", *command, "--no-pager", str(unit)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert not done.stderr
