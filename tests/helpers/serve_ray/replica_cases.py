"""Replicas on a real Ray instance for tests, with methods to deploy and inspect them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from collections.abc import Iterator
from typing import Any

import psutil

from helpers.server.live_servers import wait_until


@dataclasses.dataclass
class Running:
    """Running replicas and the pool that uses them."""

    pool: Any
    name: str
    options: Any

    def deploy(self, workers: int, options: Any = None) -> None:
        """Make Ray replace the current replicas by `workers` new ones, and wait until the pool
        knows them.
        """
        from ray import serve

        from kvboost_edge.serve_ray.deployment import replica_deployment
        from kvboost_edge.serve_ray.start import replica_options

        self.options = options or self.options
        before = self.pool._replicas.usable
        application = replica_deployment(
            replica_options(self.options),
            workers=workers,
            cpus=1,
            ingress=self.name,
            drain_seconds=self.options.settings.drain_seconds,
        )
        serve.run(application, name=self.name, route_prefix=None)
        wait_until(
            lambda: not before & self.pool._replicas.usable,
            "the replicas of before to be gone",
            120,
        )
        self.wait_for(workers)

    def wait_for(self, count: int) -> None:
        """Wait until the pool uses `count` replicas and each of them answers."""
        wait_until(
            lambda: len(self.pool._replicas.usable) == count, f"{count} replicas to be used", 120
        )
        wait_until(lambda: len(self.pool.replicas()) == count, f"{count} replicas to answer", 60)

    def pids(self) -> dict[str, int]:
        """Return the process id of each replica."""
        return {one.replica: one.pid for one in self.pool._replicas.ask("describe", seconds=20)}

    def kill(self, replica: str) -> None:
        os.kill(self.pids()[replica], signal.SIGKILL)

    def idle(self) -> bool:
        """Return whether no replica runs requests or holds blocks."""
        stats = [view.paged_stats() for view in self.pool.replicas().values()]
        return not any(
            one["used_blocks"] or one["num_running"] or one["num_waiting"] for one in stats
        )


def options_of(*flags: str) -> Any:
    """Return the options of a command with these flags, for replicas small enough to share this
    machine.
    """
    from kvboost_edge.server.flags import parse_flags

    argv = [
        "--num-blocks",
        "512",
        "--num-threads",
        "1",
        "--disk-cache-dir",
        "off",
        "--reuse-gate",
        "off",
    ]
    return parse_flags(
        [*argv, "--max-batch-size", "8", "--workers", "2", "--drain-seconds", "20", *flags], "test"
    )


@contextlib.contextmanager
def running_replicas(options: Any, name: str) -> Iterator[Running]:
    """Yield replicas with these options and a pool over them."""
    from kvboost_edge.config import EngineConfig
    from kvboost_edge.serve_ray.model_files import open_tokenizer
    from kvboost_edge.serve_ray.start import connect_pool, deploy_replicas

    config = EngineConfig.from_options(**options.engine)
    tokenizer, digest = open_tokenizer(options.model, config)
    with (
        deploy_replicas(options, name, 1) as handle,
        connect_pool(handle, name, tokenizer, digest, config) as pool,
    ):
        found = Running(pool, name, options)
        found.wait_for(options.workers)
        yield found


def replica_processes(application: str, deployment: str) -> list[psutil.Process]:
    """Return the processes of this process's Ray that run a deployment's replicas, including
    replicas that are loading.
    """
    name = f"ray::ServeReplica:{application}:{deployment}"
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[:1] and process.cmdline()[0].startswith(name):
                found.append(process)
    return found
