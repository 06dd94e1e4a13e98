"""Tests of a model whose chat template would run forever: the server loads it, answers other
requests, and stops.
"""

import contextlib
import json
import shutil
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

import kvboost_edge
from helpers.server.server_process import running

DEMO = Path(kvboost_edge.__path__[0]) / "assets" / "demo"
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
# The maximum number of iterations, each with the maximum work of one operation.
LOOPS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% set x = range(99999)|sort %}{% endfor %}{% endfor %}"
)


def hostile_model(tmp_path, source):
    model = tmp_path / "hostile"
    shutil.copytree(DEMO, model)
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": source}))
    return str(model)


@pytest.mark.parametrize(
    "source",
    [
        # The format detection and each of three chats use their full time limit.
        pytest.param(LOOPS, marks=pytest.mark.full, id="loops"),
        pytest.param("{{ 'a' * 3000000000 }}", id="text"),
    ],
)
def test_an_endless_template_does_not_block_other_requests(tmp_path, source):
    with (
        running("--model", hostile_model(tmp_path, source)) as server,
        httpx.Client(base_url=server.url(), timeout=20) as client,
    ):
        answers = []

        def chat():
            with contextlib.suppress(httpx.TransportError):  # at the server's end
                answers.append(client.post("/v1/chat/completions", json=CHAT))

        asking = [threading.Thread(target=chat) for _ in range(2)]
        for thread in asking:
            thread.start()
        waited = []
        while any(thread.is_alive() for thread in asking):
            started = time.perf_counter()
            assert client.get("/health").status_code == 200
            waited.append(time.perf_counter() - started)
            time.sleep(0.02)
        assert [answer.status_code for answer in answers] == [400, 400]
        error = answers[0].json()["error"]
        assert error["param"] == "messages"
        assert "the chat template of hostile exceeded its limits" in error["message"]
        assert max(waited, default=0) < 2  # the maximum time of a chat
        text = client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 1})
        assert text.status_code == 200
        last = threading.Thread(target=chat)
        last.start()
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
        last.join()
    refusal = [line for line in server.lines if "refuses a plain message" in line]
    assert len(refusal) == 1
