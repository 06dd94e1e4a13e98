"""Tests of `kvboost-edge launch`: a shell accepts its output, and a started client gets the
environment.
"""

import json
import os
import shlex
import socket
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvboost_edge.cli.launch import CLIENTS

MODELS = [
    {"id": "a model's name", "max_model_len": 4096},
    {"id": "alias", "max_model_len": 4096},
    {"id": "bare"},
]


@pytest.fixture
def server(monkeypatch):
    """URL of a server that lists its models to clients with the right key."""
    monkeypatch.delenv("KVBOOST_API_KEY", raising=False)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args):
            """Log nothing."""

        def do_GET(self):
            known = (
                self.headers.get("authorization") in (None, "Bearer a'key")
                and self.path == "/v1/models"
            )
            content = json.dumps(
                {"data": MODELS} if known else {"error": {"message": "the key is wrong"}}
            ).encode()
            self.send_response(200 if known else 401)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


@pytest.fixture
def launched(printed):
    """Function `launched(*argv)` that returns the environment that a shell builds from the output,
    and the command.
    """

    def call(*argv):
        out = printed("launch", *argv).out
        shell = subprocess.run(
            ["sh", "-c", f"{out}\nenv -0"], env={}, capture_output=True, check=True
        )
        pairs = [pair.partition("=") for pair in shell.stdout.decode().split("\0") if pair]
        environment = {
            name: value for name, _, value in pairs if name not in ("PWD", "_", "SHLVL", "OLDPWD")
        }
        return environment, shlex.split(out.splitlines()[-1].removeprefix("# "))

    return call


def test_launch_configures_claude(server, launched):
    environment, command = launched(
        "claude", "--url", f"{server}/v1/", "--api-key", "a'key", "--", "-p", "x y"
    )
    assert command == ["claude", "-p", "x y"]
    assert environment["ANTHROPIC_BASE_URL"] == server
    assert environment["ANTHROPIC_AUTH_TOKEN"] == "a'key"
    assert {environment[name] for name in environment if name.endswith("_MODEL")} == {
        "a model's name"
    }
    assert environment["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    assert environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "4096"


def test_launch_configures_codex(server, launched):
    environment, command = launched(
        "codex", "--url", server, "--model", "alias", "--api-key", "a'key"
    )
    assert (command[0], set(command[1::2])) == ("codex", {"-c"})
    settings = tomllib.loads("\n".join(command[2::2]))
    provider = settings["model_providers"][settings["model_provider"]]
    assert (settings["model"], settings["model_context_window"]) == ("alias", 4096)
    assert (provider["base_url"], provider["wire_api"]) == (f"{server}/v1", "responses")
    assert environment == {provider["env_key"]: "a'key"}
    environment, command = launched("codex", "--url", server, "--model", "bare")
    assert environment == {}
    assert "context" not in " ".join(command)


def test_launch_configures_opencode(server, launched):
    environment, command = launched("opencode", "--url", server)
    config = json.loads(environment["OPENCODE_CONFIG_CONTENT"])
    provider, _, model = config["model"].partition("/")
    assert (command, model) == (["opencode"], "a model's name")
    assert config["provider"][provider]["options"]["baseURL"] == f"{server}/v1"
    assert config["provider"][provider]["models"][model]["limit"]["context"] == 4096


def test_launch_configures_open_webui(server, launched):
    environment, command = launched("openwebui", "--url", server)
    assert command == ["open-webui", "serve"]
    assert environment["OPENAI_API_BASE_URL"] == f"{server}/v1"


def test_exec_starts_the_client(server, tmp_path):
    """The client is found on PATH and receives the environment and arguments. The command returns
    its exit status.
    """
    client = tmp_path / "claude"
    client.write_text('#!/bin/sh\necho "$ANTHROPIC_BASE_URL $ANTHROPIC_MODEL" "$@"\nexit 3\n')
    client.chmod(0o755)
    command = [
        sys.executable,
        "-m",
        "kvboost_edge",
        "launch",
        "claude",
        "--exec",
        "--url",
        server,
        "--",
        "-p",
        "x y",
    ]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.returncode) == (f"{server} a model's name -p x y\n", 3), done.stderr


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.some(2)
def test_errors_name_a_remedy(server, client, printed, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
        cases = {
            ("--url", nobody): ("is the server running?", 1),
            ("--url", "127.0.0.1:8000"): ("must begin with http://", 2),
            ("--url", server, "--api-key", "other"): ("does not accept the API key", 2),
            ("--url", server, "--model", "other"): ("'other' is not served", 2),
            ("--url", server, "--exec"): ("is not installed or", 1),
        }
        for argv, (said, code) in cases.items():
            out, err = printed("launch", client, *argv, code=code)
            assert said in err
            assert not out
    printed("launch", "emacs", code=2)
