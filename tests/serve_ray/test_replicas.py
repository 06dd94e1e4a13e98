"""Real replicas: answers equal one engine's to the bit, with cancellation, kills, and changes of
their number.
"""

import contextlib
import json
import os
import signal

import numpy as np
import pytest

from helpers.raising import assert_raises
from helpers.server.live_servers import wait_until
from kvboost_edge.engine.request.results import GenerationResult
from kvboost_edge.errors import CapacityError, RequestError
from kvboost_edge.serve_ray.in_flight import ReplicaLost

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

PROMPTS = [
    "Hello",
    "The cache keeps what",
    "One two three four five six seven eight nine ten " * 8,
    [5, 6, 7, 8] * 20,
]
CHAT = [{"role": "user", "content": "What is a block?"}]
LONG = {"max_new_tokens": 600, "temperature": 0.0, "ignore_eos": True}


def test_answers_equal_a_single_engines(two, alone):
    asked = [
        (prompt, sampling)
        for prompt in [*PROMPTS, CHAT]
        for sampling in (
            {"temperature": 0.0, "logprobs": 2},
            {"temperature": 0.8, "seed": 7, "stop": ["the"], "logprobs": 0},
            {"max_new_tokens": 4, "temperature": 0.0, "prompt_logprobs": 1},
        )
    ]
    handles = [two.pool.submit(prompt, **sampling) for prompt, sampling in asked]
    for handle, (prompt, sampling) in zip(handles, asked, strict=True):
        found = handle.result(timeout=60)
        expected = alone.submit(prompt, **sampling).result(timeout=60)
        for field in (
            "output_text",
            "output_token_ids",
            "finish_reason",
            "logprobs",
            "prompt_logprobs",
            "prompt",
        ):
            assert getattr(found, field) == getattr(expected, field), field
        assert "".join(event.text for event in handle.events()) == expected.output_text
        assert handle.prompt_logprobs == expected.prompt_logprobs
    wait_until(two.idle, "the blocks to be free")


def test_embeddings_and_documents_equal_a_single_engines(two, alone):
    texts = ["a text", "another one", [4, 5, 6]]
    np.testing.assert_array_equal(two.pool.embed(texts, 8), alone.embed(texts, 8))
    assert_raises(RequestError, "dimensions=0", two.pool.embed, texts, 0)
    assert_raises(RequestError, "yes", two.pool.rerank, "query", ["document"])
    handles = []
    stored = two.pool.warm(documents=["words of a document " * 20], handles=handles)
    assert int(stored)
    assert all(handle.done for handle in handles)
    assert all(
        view.paged_stats()["loaded_chunks"] for view in two.pool.replicas().values()
    )  # every replica holds it
    assert two.pool.reset_cache()
    wait_until(two.idle, "the blocks to be free")


def test_invalid_requests_are_refused_as_by_an_engine(two):
    assert_raises(RequestError, "temperature=-1", two.pool.submit, "x", temperature=-1)
    assert_raises(RequestError, "nonsense", two.pool.submit, "x", nonsense=1)
    assert_raises(RequestError, "vocabulary", two.pool.submit, [10**6])
    # Errors that only a replica can find are raised by the handle.
    refused = two.pool.submit("x", regex="(unclosed", max_new_tokens=4)
    with pytest.raises(RequestError):
        refused.result(timeout=60)
    small = two.pool.submit(list(range(10, 50)), pin=True, max_new_tokens=1, pin_share=1e-9)
    with pytest.raises(CapacityError):
        small.result(timeout=60)


def test_a_pinned_prompt_is_unpinned_on_its_replica(two):
    prompt = (
        "A prompt that is pinned, so that it stays in the pool of its replica until it is "
        "unpinned again. " * 2
    )
    two.pool.warm(prompt, pin=True)
    assert two.pool.paged_stats()["pinned_blocks"] > 0
    assert two.pool.unpin(prompt) > 0
    assert two.pool.paged_stats()["pinned_blocks"] == 0


def test_requests_with_one_prefix_hit_the_cache_of_one_replica(two):
    two.pool.reset_cache()
    shared = [*range(100, 100 + 160)]
    two.pool.submit([*shared, 1], max_new_tokens=1, temperature=0.0).result(timeout=60)
    results = [
        two.pool.submit([*shared, 2, number], max_new_tokens=1, temperature=0.0).result(timeout=60)
        for number in range(2, 8)
    ]
    assert [result.cached_tokens for result in results] == [160] * 6
    other = two.pool.submit(
        [*shared, 9], max_new_tokens=1, temperature=0.0, tenant="another"
    ).result(timeout=60)
    assert other.cached_tokens == 0


def test_a_cancelled_request_ends_and_frees_its_blocks(two):
    handle = two.pool.submit("Count", **LONG)
    next(iter(handle.events()))
    handle.cancel()
    result = handle.result(timeout=60)
    assert result.finish_reason == "cancelled"
    assert result.generated_tokens < LONG["max_new_tokens"]
    wait_until(two.idle, "the blocks to be free")


async def test_a_handle_is_awaitable(two, alone):
    handle = two.pool.submit("Hello", max_new_tokens=8, temperature=0.0)
    batches = [batch async for batch in handle.abatches()]
    assert isinstance(batches[-1][-1], GenerationResult)
    expected = await alone.agenerate("Hello", max_new_tokens=8, temperature=0.0)
    assert (await handle.aresult()).output_token_ids == expected.output_token_ids


def test_the_server_streams_and_reports_each_replica(two, server, alone):
    body = {"messages": CHAT, "max_tokens": 12, "temperature": 0.0}
    expected = alone.generate(CHAT, max_new_tokens=12, temperature=0.0).output_text
    with server.client() as client:
        whole = client.post("/v1/chat/completions", json=body).json()
        with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
            lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
        metrics = client.get("/metrics", headers={"Authorization": "Bearer admin-key"}).text
        assert client.get("/metrics").status_code == 403
    chunks = [json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines[:-1]]
    assert whole["choices"][0]["message"]["content"] == "".join(chunks) == expected
    for name in two.pool.replicas():
        assert (
            f'vllm:num_requests_running{{model_name="kvboost-edge/demo",replica="{name}"}} 0.0'
            in metrics
        )
    assert metrics.count("# TYPE kvboost:blocks gauge") == 1


def test_a_disconnect_frees_the_replica(two, server):
    body = {
        "prompt": "Count",
        "max_tokens": 600,
        "temperature": 0.0,
        "stream": True,
        "ignore_eos": True,
    }
    sock = server.connect()
    sock.sendall(server.request_bytes("/v1/completions", body))
    assert b"200 OK" in sock.recv(65536)
    sock.close()
    wait_until(lambda: server.state.admission.sequences == 0, "the request to end")
    wait_until(two.idle, "the replica to end it")


def test_a_frozen_replica_does_not_block_others(two):
    """Once the frozen replica is known not to answer, figures and answers come from the other one.
    Afterwards it continues in the same process.
    """
    pids = two.pids()
    frozen, other = sorted(pids)
    os.kill(pids[frozen], signal.SIGSTOP)
    try:
        wait_until(lambda: two.pool._replicas.talking == {other}, "its silence to be known", 60)
        assert [*two.pool.replicas()] == [other]
        handles = [
            two.pool.submit([number, 7], max_new_tokens=4, temperature=0.0)
            for number in range(20, 26)
        ]
        assert [handle.result(timeout=60).generated_tokens for handle in handles] == [4] * 6
    finally:
        os.kill(pids[frozen], signal.SIGCONT)
    two.wait_for(2)
    assert two.pids() == pids


def test_a_killed_replica_loses_only_started_answers(two):
    handles = [two.pool.submit([number, *range(200, 240)], **LONG) for number in range(20, 32)]
    victim = sorted(two.pool._replicas.usable)[0]
    wait_until(lambda: any(handle._events for handle in handles), "an answer to begin")
    two.kill(victim)
    lost = 0
    for handle in handles:
        seen = 0
        with contextlib.suppress(ReplicaLost):
            handle.result(timeout=120)
        try:
            for _ in handle.events():
                seen += 1
            assert seen == LONG["max_new_tokens"]
        except ReplicaLost:
            assert seen  # requests that had not begun were computed elsewhere
            lost += 1
    assert lost < len(handles)
    # Ray starts a replacement. Until it is ready, the other replica answers.
    assert two.pool.is_alive()
    assert two.pool.submit("Hello", max_new_tokens=2).result(timeout=60).generated_tokens
    wait_until(lambda: victim not in two.pool._replicas.usable, "the dead replica to be known", 60)
    two.wait_for(2)
    wait_until(two.idle, "the remaining requests to end", 60)


def test_a_stream_of_a_killed_replica_ends_with_an_error_event(two, server):
    body = {
        "prompt": "Count",
        "max_tokens": 1500,
        "temperature": 0.0,
        "stream": True,
        "ignore_eos": True,
    }
    with server.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        [busy] = [name for name, view in two.pool.replicas().items() if view.num_running()]
        two.kill(busy)
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events[-1]["error"]["code"] == "replica_lost"
    assert not any("error" in event for event in events[:-1])
    wait_until(lambda: busy not in two.pool._replicas.usable, "the dead replica to be known", 60)
    two.wait_for(2)
