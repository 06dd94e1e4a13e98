"""Whoever goes takes his work with him, within a step, whatever API he asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from helpers.engine.fake_runner import fake_engine
from helpers.server.api_bodies import GENERATING, MODEL, asked
from helpers.server.live_servers import HeldForward, LiveServer, serving, wait_until
from server.api.test_tools import TEMPLATE

PATHS = [*GENERATING, "/v1/warm"]
BODIES = [(path, streams) for path in GENERATING for streams in (False, True)]
PASS_TOKENS = 64
TEXT = "A prompt of more tokens than a few passes compute. " * 10


@pytest.fixture(scope="module")
def server() -> Any:
    with fake_engine(num_blocks=512, max_context=6000, max_batch_tokens=PASS_TOKENS, max_num_seqs=4) as engine:
        engine.tokenizer.chat_template = TEMPLATE
        with serving(engine, model_name=MODEL, max_queue_size=64) as server:
            yield server


@pytest.fixture
def held(server: LiveServer) -> Iterator[HeldForward]:
    """Passes of the model go when the test lets them."""
    runner = server.engine._core._runner
    before, held = runner.forward, HeldForward(server.engine)
    try:
        yield held
    finally:
        held.release()
        runner.forward = before
        server.engine.reset_cache()


def gone_within_a_step(server: LiveServer, held: HeldForward) -> None:
    """Nobody waits any more: the request ends at once, and the pass that runs is the last."""
    steps = held.steps
    wait_until(lambda: not server.state.admission.sequences, "the end of the request")
    held.step()
    wait_until(server.idle, "the end of what nobody waits for")
    assert held.steps <= steps + 1


@pytest.mark.parametrize(("path", "streams"), BODIES)
def test_a_client_that_goes_frees_all_within_a_step(
    server: LiveServer, held: HeldForward, path: str, streams: bool
) -> None:
    with server.connect() as socket:
        socket.sendall(server.request_bytes(path, asked(path, "hello", tokens=3000, stream=streams)))
        held.step(3)
        wait_until(lambda: held.steps == 4, "the fourth pass")
    gone_within_a_step(server, held)


@pytest.mark.parametrize("path", PATHS)
def test_a_client_that_goes_before_the_first_token_ends_the_prompt(
    server: LiveServer, held: HeldForward, path: str
) -> None:
    with server.connect() as socket:
        socket.sendall(server.request_bytes(path, asked(path, TEXT, tokens=3000, stream=True)))
        held.step(2)
        wait_until(lambda: held.steps == 3, "the third pass")
        assert held.steps * PASS_TOKENS < len(TEXT)  # a letter is a token
    gone_within_a_step(server, held)


def test_who_goes_while_many_wait_takes_his_place_along(server: LiveServer, held: HeldForward) -> None:
    """Requests of all APIs that wait behind one that runs: they leave the queue though nothing computes."""
    sockets = []
    for number in range(40):
        path = PATHS[number % len(PATHS)]
        sockets.append(server.connect())
        sockets[-1].sendall(server.request_bytes(path, asked(path, f"{number} {TEXT}", tokens=3000)))
    wait_until(lambda: server.state.admission.sequences == 40, "all to be in the queue")
    for one in sockets:
        one.close()
    wait_until(lambda: not server.state.admission.sequences, "all to be out of it")
    held.step(2)
    wait_until(server.idle, "the end of what nobody waits for")
    assert held.steps <= 2
