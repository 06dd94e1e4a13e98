"""A replica without Ray: the fields sent with a request, and the reports about itself."""

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from helpers.models.tiny_models import save_tiny_model
from helpers.serve_ray.router_beliefs import beliefs, check_router
from helpers.server.live_servers import wait_until
from helpers.tiers.redis_servers import running_redis
from kvboost_edge import shareable
from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.handle import RequestHandle
from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.engine.request.results import GenerationResult
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.errors import RequestError
from kvboost_edge.kvcache.hashing import encode_tokens, prefix_hashes
from kvboost_edge.serve_ray.messages import CallOutcome, ReplicaCall, ReplicaUpdate, Sent
from kvboost_edge.serve_ray.pool import ReplicatedEngine
from kvboost_edge.serve_ray.replica import EngineReplica, ReplicaOptions
from kvboost_edge.serve_ray.routing.prompt_chain import PromptChain
from kvboost_edge.serve_ray.routing.router import PrefixRouter

PROMPT = [
    10 + number % 200 for number in range(1003)
]  # 62 full blocks, of which a router is told about 16
OPTIONS = {"num_blocks": 128, "max_num_seqs": 4, "num_threads": 1, "reuse_gate": "off"}


@pytest.fixture
def open_replica(isolated_cache, tmp_path):
    """Function that creates replicas of the bundled model sharing one disk. All are closed at the
    end.
    """
    made = []

    def open_one(name, **more):
        options = ReplicaOptions(
            "kvboost-edge/demo", {**OPTIONS, "disk_cache_dir": tmp_path / "tier", **more}
        )
        made.append(EngineReplica(options, name))
        return made[-1]

    yield open_one
    for replica in made:
        replica.close()


def sent(prompt, hashes=b"", hints=(), **more):
    sampling = SamplingParams(max_new_tokens=4, temperature=0.0)
    terms = Terms(snapshot_hints=hints)
    return Sent(
        "r",
        (),
        encode_tokens(prompt),
        sampling,
        terms,
        None,
        0.0,
        None,
        len(prompt),
        hashes=hashes,
        **more,
    )


def answer(replica, request):
    async def run():
        found = [came async for came in replica.generate(request)]
        assert found[-1].failure is None, found[-1].failure
        assert isinstance(found[-1].result, GenerationResult)
        return found[-1].result

    return asyncio.run(run())


def tell(replica, router, now):
    """Update the router from a replica, as an ingress does ten times a second."""
    asked = ReplicaCall((replica.name,), "tell", (router.cursor(replica.name),))
    told = asyncio.run(replica.ask(asked))
    assert isinstance(told, ReplicaUpdate)
    assert router.take_events(replica.name, told.batches, now)
    router.take_report(replica.name, told.report, now)


def chain_of(replica, prompt):
    engine = replica._engine
    root = engine.cache_root
    size = engine.config.block_size
    has_states = bool(engine.runner_info.kv_spec.states)
    hashes = prefix_hashes(prompt, root, size)
    return b"".join(hashes), PromptChain.of_hashes(
        hashes, len(prompt), size, root, has_states=has_states
    )


def test_a_prompt_is_looked_up_by_its_given_hashes(open_replica, monkeypatch):
    """The lookup of a prompt hashes nothing. Wrong hashes cost only the hits that they hide, and
    change no answer.
    """
    replica = open_replica("a")
    hashes, _ = chain_of(replica, PROMPT)
    expected = answer(replica, sent(PROMPT)).output_token_ids
    index = replica._engine._parts.manager._index
    plain = index._hash_fn
    counted = []

    def counting(parent, tokens):
        counted.append(tokens)
        return plain(parent, tokens)

    monkeypatch.setattr(index, "_hash_fn", counting)
    known = answer(replica, sent(PROMPT, hashes))
    assert not counted
    assert (known.output_token_ids, known.cached_tokens) == (expected, 992)
    unknown = answer(replica, sent(PROMPT))
    assert len(counted) >= 62
    assert (unknown.output_token_ids, unknown.cached_tokens) == (expected, 992)
    # The tier has the prompt anyway: it is asked by hashes that are computed here.
    replica._engine.reset_cache()
    lies = chain_of(replica, PROMPT[::-1])[0]
    wrong = answer(replica, sent(PROMPT, lies))
    assert wrong.output_token_ids == expected
    assert answer(replica, sent(PROMPT, hashes)).output_token_ids == expected


@pytest.mark.parametrize("size", [32, 8])
def test_hashes_of_another_block_size_are_ignored(open_replica, size):
    """An ingress learns the options of a newer version only some time after its replicas are
    running.
    """
    replica = open_replica("a")
    hashes, _ = chain_of(replica, PROMPT)
    expected = answer(replica, sent(PROMPT, hashes)).output_token_ids
    others = b"".join(prefix_hashes(PROMPT, replica._engine.cache_root, size))
    found = answer(replica, sent(PROMPT, others))
    assert (found.output_token_ids, found.cached_tokens) == (expected, 992)


def test_an_ingress_knows_the_root_of_each_prefill_that_a_replica_has(open_replica, monkeypatch):
    monkeypatch.setattr(shareable, "FIRST_POSITION", 512)
    settings = set()
    for option in ("exact", "on-request", "sparse"):
        replica = open_replica(option, prefill=option)
        told = asyncio.run(replica.ask(ReplicaCall((option,), "describe")))
        assert told.settings == replica.record_replica_metadata()["root"]
        settings.add(told.settings)
        pool = ReplicatedEngine(SimpleNamespace(about=told), None, EngineConfig())
        for choice in (None, "exact", "sparse"):
            roots = []
            for one in (pool, replica._engine):
                with contextlib.suppress(RequestError):
                    roots.append(one.kept_answers(tenant="a", cache_salt="s", prefill=choice).root)
            is_refused = (option, choice) == ("exact", "sparse")
            assert len(roots) == (0 if is_refused else 2)
            assert len(set(roots)) <= 1
    assert len(settings) == 3, "replicas with different options must not serve one pool"


def test_a_sparse_prompt_is_unpinned_by_its_prefill(open_replica, monkeypatch):
    monkeypatch.setattr(shareable, "FIRST_POSITION", 512)
    replica = open_replica("a", prefill="on-request")
    whose = {"tenant": "a", "cache_salt": None, "prefill": "sparse"}
    replica._engine.pin(PROMPT, **whose)

    def asked(method, *arguments):
        call = ReplicaCall(("a",), method, (encode_tokens(PROMPT), *arguments))
        return asyncio.run(replica.ask(call))

    shared = shareable.sparse_end(len(PROMPT), 16)
    assert asked("warm_result", {**whose, "prefill": None}).chunks_stored == 0
    assert asked("warm_result", whose).chunks_stored == shared // 128
    assert asked("unpin", {**whose, "prefill": "exact"}, None) == 0
    assert asked("unpin", whose, None) == shared // 16


def test_disk_blocks_are_published_and_their_reads_measured(open_replica):
    """A replica computes a prompt, and a new one finds it on their disk. The router expects the new
    one to read it, and the measured time becomes the expectation for the next read.
    """
    first = open_replica("a")
    hashes, chain = chain_of(first, PROMPT)
    router = PrefixRouter()
    router.set_members("ab")
    tell(first, router, 0.0)
    expected = answer(first, sent(PROMPT, hashes)).output_token_ids
    wait_until(
        lambda: first._engine.paged_stats()["tiers"]["disk"]["written_blocks"] >= 62,
        "the prompt to be on the disk",
    )
    second = open_replica("b")
    assert router.choose(chain, 1.0, among="b")[0].restored_tokens == 0
    for replica in (first, second):
        tell(replica, router, 1.0)
    told = 16 * chain.disk.ends[-1]
    held, choice = (router.choose(chain, 1.0, among=name)[0] for name in "ab")
    assert (held.matched_tokens, held.restored_tokens) == (992, 0)
    assert (choice.matched_tokens, choice.restored_tokens) == (0, told)
    assert choice.missing_tokens == len(PROMPT) - told
    guessed = second._meter.report(0.0, free_blocks=1).disk_token_seconds
    result = answer(second, sent(PROMPT, hashes, restored_tokens=choice.restored_tokens))
    assert result.output_token_ids == expected
    assert result.hit_tokens["disk"] == 992
    assert second._meter.report(0.0, free_blocks=1).disk_token_seconds != guessed
    tell(second, router, 2.0)
    assert router.choose(chain, 2.0, among="b")[0].matched_tokens == 992
    check_router(router)


def test_replicas_share_the_weights_of_a_packed_file_only(isolated_cache):
    def weights_of(pack_cache):
        options = ReplicaOptions("kvboost-edge/demo", {**OPTIONS, "pack_cache": pack_cache})
        with contextlib.closing(EngineReplica(options, "a")) as replica:
            return asyncio.run(replica._figures()).weights

    first, second, alone = (weights_of(pack_cache) for pack_cache in (True, True, False))
    assert first == second
    assert list(first) == ["weight_bytes"]
    assert alone.get("weight_bytes") != first["weight_bytes"]


def test_a_model_without_states_publishes_only_block_keys(open_replica):
    replica = open_replica("a")
    hashes, chain = chain_of(replica, PROMPT)
    assert chain.states == ()
    router = PrefixRouter()
    router.set_members("a")
    tell(replica, router, 0.0)
    answer(replica, sent(PROMPT, hashes))
    told = asyncio.run(replica.ask(ReplicaCall(("a",), "tell", (router.cursor("a"),))))
    epoch, serial, is_whole, published, evicted = told.batches[0]
    assert (serial, is_whole, evicted) == (router.cursor("a").serial + 1, False, b"")
    pieces = sorted(published[at : at + 8] for at in range(0, len(published), 8))
    assert pieces == sorted(hashes[at : at + 8] for at in range(0, len(hashes), 32))
    assert epoch == router.cursor("a").epoch


def test_a_hybrid_prompt_is_read_from_redis(isolated_cache, tmp_path, monkeypatch):
    """A replica on another machine, which never saw the prompt, reads as many tokens as the router
    expects.
    """
    monkeypatch.setenv("KVBOOST_EDGE_REDIS_SECRET", "a secret of the test suite")
    prompt = [10 + number % 200 for number in range(500)]
    name = str(save_tiny_model("lfm2", tmp_path / "model"))
    router = PrefixRouter()
    router.set_members("ab")
    with contextlib.ExitStack() as opened:
        redis_url = opened.enter_context(running_redis()).url
        replicas = {}
        for who in "ab":
            replicas[who] = EngineReplica(
                ReplicaOptions(name, {**OPTIONS, "redis_url": redis_url}), who
            )
            opened.callback(replicas[who].close)
            tell(replicas[who], router, 0.0)
        hashes, chain = chain_of(replicas["a"], prompt)
        expected = answer(replicas["a"], sent(prompt, hashes)).output_token_ids
        written = lambda: replicas["a"]._engine.paged_stats()["tiers"]["redis"]["written_blocks"]  # noqa: E731
        wait_until(
            lambda: written() >= 31 + 1, "the prompt's blocks and its state to be on the server"
        )

        def restored():
            """Return the tokens that the router expects to be read. Tier events arrive some time
            after the counters.
            """
            tell(replicas["a"], router, 1.0)
            return router.choose(chain, 1.0, among="b")[0].restored_tokens

        wait_until(lambda: restored() == 496, "the router to know the blocks on the server")
        assert router.choose(chain, 1.0, among="b")[0].matched_tokens == 0
        result = answer(replicas["b"], sent(prompt, hashes, restored_tokens=496))
        assert (result.output_token_ids, result.hit_tokens) == (expected, {"pool": 0, "redis": 496})
    check_router(router)


def test_the_replica_with_the_state_is_chosen(isolated_cache, tmp_path):
    """Two replicas have computed the same prompt, but only one kept the state after its head, in
    its pool and on disk. For other prompts with that head, the router's expectation equals the
    tokens that each replica finds.
    """
    head = [10 + number % 200 for number in range(320)]
    name = str(save_tiny_model("qwen3_5_text", tmp_path / "model"))
    filled, asked, other, last = (
        [*head, *range(start, start + 40)] for start in (10, 60, 110, 160)
    )
    router = PrefixRouter()
    router.set_members("abc")
    with contextlib.ExitStack() as opened:

        def open_one(who, **options):
            replica = EngineReplica(ReplicaOptions(name, {**OPTIONS, **options}), who)
            opened.callback(replica.close)
            return replica

        disk = {"disk_cache_dir": tmp_path / "tier"}
        a = open_one("a", **disk)
        b = open_one("b")
        for replica, hints in ((a, (len(head),)), (b, ())):
            answer(replica, sent(filled, hints=hints))
            tell(replica, router, 0.0)

        def expected(prompt, now):
            chain = chain_of(a, prompt)[1]
            found = [router.choose(chain, now, among=who)[0] for who in "abc"]
            return [(one.matched_tokens, one.restored_tokens) for one in found]

        described = asyncio.run(a.ask(ReplicaCall(("a",), "describe")))
        assert described.info.kv_spec.states, "the description must contain the state layout"
        blocks = [set(beliefs(router, who)) & set(chain_of(a, filled)[1].keys) for who in "ab"]
        assert blocks[0] == blocks[1]
        assert len(blocks[0]) == 22
        assert expected(asked, 1.0) == [(320, 0), (0, 0), (0, 0)]
        assert router.choose(chain_of(a, asked)[1], 1.0, among="ab")[0].replica_id == "a"
        results = [answer(replica, sent(asked)) for replica in (a, b)]
        assert [one.cached_tokens for one in results] == [320, 0]
        assert results[1].miss_reason == "state"
        # By now the second replica has kept the state. The first one drops it but keeps its blocks.
        manager = a._engine._parts.manager
        assert manager.states is not None
        with a._engine._core.reading():
            manager.states.slots.drop(manager.pins.published(filled, a._engine.cache_root)[19])
        tell(b, router, 2.0)

        def is_told():
            tell(a, router, 2.0)
            return expected(other, 2.0) == [(0, 320), (320, 0), (0, 0)]

        wait_until(is_told, "the state to be on the disk alone, and the other one's to be told of")
        c = open_one("c", **disk)
        tell(c, router, 3.0)
        assert expected(last, 3.0) == [(0, 320), (320, 0), (0, 320)]
        assert answer(b, sent(last)).hit_tokens == {"pool": 320}
        assert answer(c, sent(last, restored_tokens=320)).hit_tokens == {"pool": 0, "disk": 320}
    check_router(router)


def test_events_of_an_abandoned_poll_are_sent_with_the_next(open_replica, monkeypatch):
    """An ingress abandons a poll after two seconds, but the engine reports each cache event only
    once.
    """
    replica = open_replica("a")
    hashes, chain = chain_of(replica, PROMPT)
    router = PrefixRouter()
    router.set_members("a")
    tell(replica, router, 0.0)
    answer(replica, sent(PROMPT, hashes))
    plain = replica._engine.take_cache_events
    taken = threading.Event()
    goes_on = threading.Event()

    def slow():
        events = plain()
        taken.set()
        goes_on.wait()
        return events

    monkeypatch.setattr(replica._engine, "take_cache_events", slow)

    async def ask_twice():
        asked = ReplicaCall(("a",), "tell", (router.cursor("a"),))
        first = asyncio.ensure_future(replica.ask(asked))
        try:
            assert await asyncio.to_thread(taken.wait, 60)
            first.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await first
            assert first.cancelled()
        finally:
            goes_on.set()
        return await replica.ask(asked)

    assert router.take_events("a", asyncio.run(ask_twice()).batches, 1.0)
    assert router.choose(chain, 1.0)[0].matched_tokens == 992


async def computed_by(replica):
    found = [one async for one in replica.compute(sent([]), "embed", ([[1, 2, 3]],), {})]
    assert found[0] is None
    assert isinstance(found[-1], CallOutcome)
    return found[-1]


def test_long_calls_do_not_block_health_checks(open_replica, monkeypatch):
    replica = open_replica("a")
    goes_on = threading.Event()
    monkeypatch.setattr(replica._engine, "embed", lambda *_, **__: goes_on.wait() and 7)

    async def run():
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        calls = [asyncio.ensure_future(computed_by(replica)) for _ in range(3)]
        try:
            await asyncio.wait_for(replica.check_health(), 60)
            assert not any(call.done() for call in calls)
        finally:
            goes_on.set()
        return list(await asyncio.gather(*calls))

    assert [one.value for one in asyncio.run(run())] == [7, 7, 7]
    # A closed replica computes nothing, but another one may.
    replica.close()
    closed = asyncio.run(computed_by(replica))
    assert closed.failure is not None
    assert closed.failure.has_died


def test_an_abandoned_call_cancels_its_later_requests(open_replica, monkeypatch):
    replica = open_replica("a")
    left = threading.Event()
    cancelled = []

    def embed(*_, handles, **__):
        handles.append(RequestHandle(0, cancelled.append))
        assert left.wait(60)
        handles.append(RequestHandle(1, cancelled.append))

    monkeypatch.setattr(replica._engine, "embed", embed)

    async def run():
        call = replica.compute(sent([]), "embed", ([[1, 2, 3]],), {})
        assert await anext(call) is None
        leaving = asyncio.ensure_future(call.aclose())
        while not cancelled:
            await asyncio.sleep(0.001)
        assert not leaving.done(), "the call must not end before its computation"
        left.set()
        await leaving

    asyncio.run(asyncio.wait_for(run(), 60))
    assert cancelled == [0, 1]
