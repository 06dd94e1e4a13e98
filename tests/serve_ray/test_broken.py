"""Replicas that differ from the others, break, or cannot load: the reports, and the replicas that
answer meanwhile.
"""

import contextlib
import logging
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from helpers.serve_ray.replica_cases import options_of, replica_processes, running_replicas
from helpers.server.live_servers import wait_until
from kvboost_edge.config import EngineConfig
from kvboost_edge.errors import BackendUnavailable, ConfigError, KVBoostError
from kvboost_edge.kvcache.hashing import encode_tokens
from kvboost_edge.models.locate import locate_model

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

NAME = "broken"
SMALL_BLOCKS = 32
SAMPLING = {"max_new_tokens": 4, "temperature": 0.0}


def breakable(folder):
    """Return a class of replicas that break on request. Ray copies it to its processes.

    It also obeys files in a folder:

    - "small": the next replica has a small pool
    - "other": the next replica has KV of 8 bits
    - "dies": processes are killed while they load
    """
    from kvboost_edge.serve_ray.deployment import RayReplica

    class Breakable(RayReplica):
        still_seconds = 2.0

        def __init__(self, options):
            if (folder / "dies").exists():
                os.kill(os.getpid(), signal.SIGKILL)
            for name, changes in {
                "small": {"num_blocks": SMALL_BLOCKS},
                "other": {"kv_cache_bits": 8},
            }.items():
                with contextlib.suppress(FileNotFoundError):
                    (folder / name).rename(folder / "taken")
                    options = options._replace(engine={**options.engine, **changes})
            super().__init__(options)

        async def ask(self, asked):
            if not asked.method.startswith("be_"):
                return await super().ask(asked)
            if self.name in asked.targets:
                getattr(self, asked.method)()
                return True
            return None

        def be_dead(self):
            def fail():
                raise RuntimeError("the bookkeeping of this engine is broken")

            self._engine._core._plan = fail
            self._engine._core.cancel(-1)  # wakes its thread

        def be_still(self):
            self._engine._core._runner.forward = lambda batch: threading.Event().wait()

        def be_slow(self):
            real = self._engine._core._runner.forward

            def forward(batch):
                # At most half a second per pass: on a busy machine, a pass of two seconds would
                # count as stalled.
                time.sleep(1e-3 * len(batch.token_ids))
                return real(batch)

            self._engine._core._runner.forward = forward

    return Breakable


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("breakable")


@pytest.fixture(scope="module")
def model(folder):
    """Copy of the bundled model, to be modified."""
    return Path(shutil.copytree(locate_model("kvboost-edge/demo"), folder / "model"))


@pytest.fixture(scope="module")
def breakable_class(ray_cluster, folder):
    from kvboost_edge.serve_ray import deployment

    real = deployment.replica_deployment
    broken = breakable(folder)

    def deployment_of(options, **given):
        return real(options, **given)._bound_deployment.options(func_or_class=broken).bind(options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deployment, "replica_deployment", deployment_of)
        yield


@pytest.fixture(scope="module")
def broken(breakable_class, folder, model):
    (folder / "small").touch()
    with running_replicas(options_of("--model", str(model)), NAME) as found:
        yield found


@pytest.fixture
def pool(broken):
    """Pool with two replicas, whatever the previous test did."""
    broken.wait_for(2)
    return broken.pool


def ask_to(pool, what, replica):
    """Make one replica break."""
    assert pool._replicas.ask(what, seconds=20, among=[replica]) == [True]


def computed(pool):
    """Return the number of prompt tokens that each replica has computed."""
    return {name: view.paged_stats()["miss_tokens"] for name, view in pool.replicas().items()}


def prompts(first, count, num_tokens):
    """Return prompts that share no prefix."""
    return [[20 + number, *range(20, 19 + num_tokens)] for number in range(first, first + count)]


def status():
    """Return the status of the deployment and its reason, as Ray reports them."""
    from ray import serve

    found = serve.status().applications[NAME].deployments["engine"]
    return str(found.status.value), found.message


def test_a_request_too_large_for_one_pool_runs_on_a_larger_one(pool):
    """A prompt that no replica holds is refused as by one engine."""
    sizes = sorted(view.paged_stats()["num_blocks"] for view in pool.replicas().values())
    assert sizes == [SMALL_BLOCKS, 512]
    too_large = [[20 + number] * (16 * SMALL_BLOCKS + 16) for number in range(8)]
    for handle in [pool.submit(prompt, **SAMPLING) for prompt in too_large]:
        assert handle.result(timeout=120).generated_tokens == 4


def test_slower_replicas_get_fewer_requests(pool):
    """Once measured, a slow replica is chosen only while the other one is busy."""
    sizes = {name: view.paged_stats()["num_blocks"] for name, view in pool.replicas().items()}
    slow, fast = sorted(sizes, key=lambda name: sizes[name])
    ask_to(pool, "be_slow", slow)
    start = computed(pool)[slow]
    # The other replica may answer the first batches alone if requests arrive slowly.
    for batch in range(10):
        first = 1000 + 16 * batch
        for handle in [pool.submit(prompt, **SAMPLING) for prompt in prompts(first, 16, 200)]:
            handle.result(timeout=120)
        if computed(pool)[slow] > start:
            break
    assert computed(pool)[slow] > start, "the slow replica must have answered a request"
    before = computed(pool)
    for prompt in prompts(50, 10, 200):
        pool.submit(prompt, **SAMPLING).result(timeout=120)
    after = computed(pool)
    assert after[fast] - before[fast] == 10 * 200
    assert after[slow] == before[slow]


@pytest.mark.parametrize("what", ["be_dead", "be_still"])
def test_a_dead_or_stalled_engine_is_replaced(pool, broken, what):
    """The engine's thread has died, or does nothing although it has a request. The request is
    recomputed elsewhere.
    """
    prompt = prompts(100, 1, 300)[0]
    expected = pool.submit(prompt, **SAMPLING).result(timeout=60)
    before = broken.pids()
    data = encode_tokens(prompt)
    held = {
        name: pool._replicas.ask("warm_result", data, {}, seconds=20, among=[name])
        for name in before
    }
    holder = max(held, key=lambda name: int(held[name][0]))
    ask_to(pool, what, holder)
    found = pool.submit(prompt, **SAMPLING).result(timeout=120)
    assert found.output_token_ids == expected.output_token_ids
    wait_until(lambda: holder not in pool._replicas.usable, "the broken replica to be gone", 120)
    broken.wait_for(2)
    assert len(set(before.values()) & set(broken.pids().values())) == 1
    wait_until(broken.idle, "the blocks to be free", 60)


def test_incompatible_replicas_are_refused_and_the_others_serve(
    pool, broken, folder, model, tmp_path, caplog
):
    """One replica has other options, one has other files, and one cannot read them. The log or Ray
    gives the reason. With the right files there are two replicas again.
    """
    from kvboost_edge.serve_ray.model_files import model_digest
    from kvboost_edge.serve_ray.replicas import Replicas
    from kvboost_edge.serve_ray.watch.members import _members

    config = model / "config.json"
    right = config.read_bytes()
    _, other = sorted(pool._replicas.usable)
    kept = broken.pids()[other]

    def replace_the_other_one():
        for process in replica_processes(NAME, "engine"):
            if process.pid != kept:
                process.kill()

    def wait_for_refusal(what):
        def reasons():
            return [
                r.facts["reason"] for r in caplog.records if r.getMessage() == "replica refused"
            ]

        wait_until(
            lambda: any(what in reason for reason in reasons()),
            f"a replica to be refused: {what}",
            120,
        )
        assert pool._replicas.usable == {other}
        assert pool.submit("Hello", **SAMPLING).result(timeout=60).generated_tokens

    with caplog.at_level(logging.ERROR):
        (folder / "other").touch()
        replace_the_other_one()
        wait_for_refusal("has other settings or another processor")
        config.write_bytes(right + b"\n")
        replace_the_other_one()
        wait_for_refusal("serves another model: its files have the digest")

    # A server whose files differ from those of all replicas does not start.
    shutil.copytree(model, tmp_path / "third")
    (tmp_path / "third" / "config.json").write_bytes(right + b"\n\n")
    third = Replicas(pool._replicas._handle, model_digest(str(tmp_path / "third"), EngineConfig()))
    third.members_changed(_members[NAME])
    with pytest.raises(ConfigError, match="serves another model"):
        third.open(60)
    third.close()

    config.write_bytes(b"{")
    replace_the_other_one()
    wait_until(lambda: "config.json" in status()[1], "Ray to say why", 120)
    assert status()[0] in ("UNHEALTHY", "UPDATING")
    assert pool.submit("Hello", **SAMPLING).result(timeout=60).generated_tokens
    config.write_bytes(right)
    broken.wait_for(2)
    wait_until(lambda: status()[0] == "HEALTHY", "the deployment to be healthy", 120)


def test_a_replica_killed_while_loading_fails_the_start(broken, folder):
    (folder / "dies").touch()
    try:
        with (
            pytest.raises(BackendUnavailable, match="a replica ended while it was loading"),
            running_replicas(options_of("--workers", "1"), "dying"),
        ):
            pass
    finally:
        (folder / "dies").unlink()


def test_replicas_waiting_for_cpus_are_reported(broken, caplog):
    """Another application has reserved the CPUs. The start waits until they are free or until it is
    ended.
    """
    from ray import serve

    ended = []

    def start():
        try:
            with running_replicas(options_of("--workers", "3"), "waiting"):
                pass
        except KVBoostError as error:
            ended.append(error)

    def told():
        return [
            r.facts["reason"] for r in caplog.records if r.getMessage() == "waiting for replicas"
        ]

    with caplog.at_level(logging.WARNING):
        thread = threading.Thread(target=start)
        thread.start()
        try:
            wait_until(
                lambda: any("to be scheduled" in reason for reason in told()),
                "the log to say it",
                120,
            )
        finally:
            serve.delete("waiting")
            thread.join()
    assert 'Resources required for each replica: {"CPU": 1' in told()[-1]
    assert isinstance(ended[0], BackendUnavailable)
    assert "deleted while they were starting" in str(ended[0])
