"""Whoever goes takes his work with him, within a step, whatever API he asked."""

from __future__ import annotations

from typing import Any

import pytest

from engine.fake_runner import fake_engine
from live_servers import HeldForward, LiveServer, serving, wait_until
from server.api.test_tools import TEMPLATE

LONG = {"max_output_tokens": 3000, "top_k": 1}
MESSAGES = [{"role": "user", "content": "hello"}]
OPTIONS = {"num_predict": 3000, "top_k": 1}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/responses", {"input": "hello", "stream": False, **LONG}),
    ("/v1/responses", {"input": "hello", "stream": True, **LONG}),
    ("/api/chat", {"model": "fake", "messages": MESSAGES, "stream": False, "options": OPTIONS}),
    ("/api/chat", {"model": "fake", "messages": MESSAGES, "options": OPTIONS}),
    ("/api/generate", {"model": "fake", "prompt": "hello", "options": OPTIONS}),
    ("/api/generate", {"model": "fake", "prompt": "hello", "raw": True, "options": OPTIONS}),
    ("/completion", {"prompt": "hello", "n_predict": 3000, "top_k": 1}),
    ("/completion", {"prompt": "hello", "n_predict": 3000, "top_k": 1, "stream": True}),
]


@pytest.fixture(scope="module")
def server() -> Any:
    with fake_engine(num_blocks=512, max_context=4000) as engine:
        engine.tokenizer.chat_template = TEMPLATE
        with serving(engine, model_name="fake") as server:
            yield server


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_client_that_goes_frees_all_within_a_step(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    runner = server.engine._core._runner
    before, held = runner.forward, HeldForward(server.engine)
    try:
        with server.connect() as socket:
            socket.sendall(server.request_bytes(path, body))
            held.step(3)
            wait_until(lambda: held.steps == 4, "the fourth pass")
        wait_until(lambda: not server.state.admission.sequences, "the end of the request")
        held.step()
        wait_until(server.idle, "the end of what nobody waits for")
        assert held.steps <= 5
    finally:
        held.release()
        runner.forward = before
