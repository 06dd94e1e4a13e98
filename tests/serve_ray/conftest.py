"""Two replicas of the bundled model on a Ray of this machine's own, and the same model alone, for one module."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from live_servers import LiveServer, serving, wait_until

NUM_CPUS = 4  # Ray's own count: replicas share what CPUs there are
OPTIONS = {"num_blocks": 512, "max_num_seqs": 8, "num_threads": 1, "reuse_gate": "off"}


@dataclasses.dataclass
class Running:
    """Replicas, and how the tests change them."""

    pool: Any
    name: str
    options: Any

    def scale(self, workers: int) -> None:
        """Have Ray run so many, and wait until the pool knows it."""
        from ray import serve

        from kvboost_edge.serve_ray.deployment import replica_deployment
        from kvboost_edge.serve_ray.start import replica_options

        application = replica_deployment(
            replica_options(self.options), workers=workers, cpus=1, ingress=self.name, drain_seconds=20.0
        )
        serve.run(application, name=self.name, route_prefix=None)
        self.wait_for(workers)

    def wait_for(self, count: int) -> None:
        """Until the pool uses so many replicas, and each answers."""
        wait_until(lambda: len(self.pool._replicas.usable) == count, f"{count} replicas to be used", 120)
        wait_until(lambda: len(self.pool.replicas()) == count, f"{count} replicas to answer", 60)

    def pids(self) -> dict[str, int]:
        """The process of each replica."""
        return {one.replica: one.pid for one in self.pool._replicas.ask("describe", seconds=20)}

    def kill(self, replica: str) -> None:
        os.kill(self.pids()[replica], signal.SIGKILL)

    def idle(self) -> bool:
        """No replica runs or holds anything."""
        stats = [view.paged_stats() for view in self.pool.replicas().values()]
        return not any(one["used_blocks"] or one["num_running"] or one["num_waiting"] for one in stats)


@pytest.fixture(scope="session")
def serve_options() -> Any:
    from kvboost_edge.server.flags import parse_flags

    argv = ["--num-blocks", "512", "--num-threads", "1", "--disk-cache-dir", "off", "--reuse-gate", "off"]
    return parse_flags([*argv, "--max-batch-size", "8", "--workers", "2", "--drain-seconds", "20"], "test")


@pytest.fixture(scope="module")
def ray_cluster(isolated_cache: Any) -> Iterator[None]:
    with warnings.catch_warnings():
        # Ray Serve's own models are written for an older pydantic.
        warnings.filterwarnings("ignore", "Using extra keyword arguments on `Field`", DeprecationWarning)
        pytest.importorskip("ray.serve")
    from kvboost_edge.serve_ray.start import own_cluster

    with own_cluster(NUM_CPUS):
        yield


@pytest.fixture(scope="module")
def running(ray_cluster: None, serve_options: Any) -> Iterator[Running]:
    from kvboost_edge.config import EngineConfig
    from kvboost_edge.serve_ray.model import open_tokenizer
    from kvboost_edge.serve_ray.start import deployed, pooled

    config = EngineConfig.from_options(**serve_options.engine)
    tokenizer, digest = open_tokenizer(serve_options.model, config)
    name = "test"
    with contextlib.ExitStack() as stack:
        handle = stack.enter_context(deployed(serve_options, name, 1))
        pool = stack.enter_context(pooled(handle, name, tokenizer, digest, config))
        found = Running(pool, name, serve_options)
        found.wait_for(2)
        yield found


@pytest.fixture
def two(running: Running) -> Running:
    """With two replicas, whatever a test before did."""
    running.wait_for(2)
    return running


@pytest.fixture(scope="module")
def alone(isolated_cache: Any) -> Iterator[Any]:
    """The same model and settings in this process."""
    from kvboost_edge import CPUPagedEngine

    with CPUPagedEngine.from_pretrained("kvboost-edge/demo", **OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(running: Running) -> Iterator[LiveServer]:
    """The server over the replicas, with two tenants' keys."""
    with serving(running.pool, api_keys=("first-key", "second-key"), admin_api_keys=("admin-key",)) as live:
        yield live
