"""Tests of client disconnects in all APIs: the request's work ends within one step."""

import pytest

from helpers.engine.fake_runner import fake_engine
from helpers.server.api_bodies import GENERATING, MODEL, asked
from helpers.server.live_servers import HeldForward, raw_answer, serving, wait_until
from helpers.server.scripted_model import TEMPLATE

PATHS = [*GENERATING, "/v1/warm"]
BODIES = [(path, {"stream": streams}) for path in GENERATING for streams in (False, True)]
BODIES += [
    ("/v1/completions", {"prompt": ["one", "two"], "n": 2, "ignore_eos": True}),
    ("/v1/chat/completions", {"n": 2, "stream": True, "ignore_eos": True}),
]
PASS_TOKENS = 64
TEXT = "A prompt of more tokens than a few passes compute. " * 10


@pytest.fixture(scope="module")
def server():
    with fake_engine(
        num_blocks=512, max_context=6000, max_batch_tokens=PASS_TOKENS, max_num_seqs=4
    ) as engine:
        engine.tokenizer.chat_template = TEMPLATE
        with serving(engine, model_name=MODEL, max_queue_size=64) as server:
            yield server


@pytest.fixture
def held(server):
    """Forward passes of the model, which wait until the test releases them."""
    runner = server.engine._core._runner
    before = runner.forward
    held = HeldForward(server.engine)
    try:
        yield held
    finally:
        held.release()
        runner.forward = before
        server.engine.reset_cache()


def aborted(server):
    """Return vLLM's count of aborted sequences."""
    labels = {"model_name": MODEL, "finished_reason": "abort"}
    return server.state.metrics.registry.get_sample_value("vllm:request_success_total", labels) or 0


def gone_within_a_step(server, held):
    """Check that the request ends immediately and that at most one more forward pass runs."""
    steps = held.steps
    wait_until(lambda: not server.state.admission.sequences, "the end of the request")
    wait_until(lambda: not server.state.admission.admitted, "the request to be ended")
    held.step()
    wait_until(server.idle, "the end of the work")
    assert held.steps <= steps + 1
    server.engine._scheduler.manager.check_invariants([])


@pytest.mark.parametrize(("path", "more"), BODIES)
def test_a_disconnect_frees_everything_within_one_step(server, held, path, more):
    before = aborted(server)
    sequences = 4 if "prompt" in more else more.get("n", 1)
    with server.connect() as socket:
        limit = 3000 if sequences == 1 else 1000
        socket.sendall(server.request_bytes(path, asked(path, "hello", tokens=limit, **more)))
        held.step(3)
        wait_until(lambda: held.steps == 4, "the fourth pass")
    gone_within_a_step(server, held)
    assert aborted(server) == before + sequences


@pytest.mark.parametrize("path", PATHS)
def test_a_disconnect_during_prefill_cancels_the_prompt(server, held, path):
    before = aborted(server)
    with server.connect() as socket:
        socket.sendall(server.request_bytes(path, asked(path, TEXT, tokens=3000, stream=True)))
        held.step(2)
        wait_until(lambda: held.steps == 3, "the third pass")
        assert held.steps * PASS_TOKENS < len(TEXT)  # a letter is a token
    gone_within_a_step(server, held)
    assert aborted(server) == before + 1


def test_disconnects_in_the_queue_free_their_places(server, held):
    """Queued requests of all APIs leave the queue while a running request is blocked, which then
    completes.
    """
    sockets = [server.connect()]
    body = asked(PATHS[0], TEXT)
    sockets[0].sendall(server.request_bytes(PATHS[0], body, "Connection: close"))
    wait_until(lambda: held.steps == 1, "the first pass")
    for number in range(40):
        path = PATHS[number % len(PATHS)]
        sockets.append(server.connect())
        sockets[-1].sendall(
            server.request_bytes(path, asked(path, f"{number} {TEXT}", tokens=3000))
        )
    wait_until(lambda: server.state.admission.sequences == 41, "all to be in the queue")
    for one in sockets[1:]:
        one.close()
    wait_until(lambda: server.state.admission.sequences == 1, "the others to be out of it")
    held.release()
    with sockets[0] as first:
        assert b"HTTP/1.1 200 OK" in raw_answer(first)
    wait_until(server.idle, "the end of the work")
    assert held.steps <= len(TEXT) // PASS_TOKENS + 1 + 2
