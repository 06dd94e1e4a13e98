"""The Ray Serve deployment of the replicas. This module imports Ray."""

from __future__ import annotations

import logging
import os

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.schema import LoggingConfig

from kvboost_edge.config import GenerationMode
from kvboost_edge.engine.engine import CPUPagedEngine
from kvboost_edge.host.memory import available_bytes, set_own_share
from kvboost_edge.serve_ray.ray_router import TargetRouter
from kvboost_edge.serve_ray.replica import EngineReplica, EngineStuck, ReplicaOptions, own_options
from kvboost_edge.server.logs import configure_logging, log_facts
from kvboost_edge.server.settings import ServerSettings
from kvboost_edge.server.work.engine_warmup import prepare

__all__ = ["NAME", "RayReplica", "replica_deployment"]

NAME = "engine"
_HEALTH_SECONDS = 2.0  # a replica whose engine died is replaced after this time
# After the drain period: time to cancel requests and to store blocks in the tiers.
_LAST_SECONDS = 5.0
_MOST_AT_ONCE = 1_000_000  # the ingress limits requests in flight, and the engine queues them


class RayReplica(EngineReplica):
    """A replica in a process started by Ray."""

    def __init__(self, options: ReplicaOptions) -> None:
        configure_logging(ServerSettings())
        assigned = ray.get_runtime_context().get_assigned_resources()
        cpus = assigned.get("CPU", 0.0)
        memory = int(assigned.get("memory", 0))
        set_own_share(_share(cpus, memory))
        engine = own_options(options.engine, cpus, memory)

        def ready(engine: CPUPagedEngine) -> None:
            # The ingress rejects modes that the model does not support.
            can_reuse = engine.default_reuse_refusal is None
            mode = options.mode if can_reuse else GenerationMode.PREFIX_CACHE
            prepare(
                engine,
                options.warm,
                options.warm_documents,
                options.tenants,
                mode,
                warm_systems=options.warm_systems,
            )
            engine.read_ahead()

        name = serve.get_replica_context().replica_id.unique_id
        super().__init__(options._replace(engine=engine), name, ready)

    async def check_health(self) -> None:
        """Check the replica's health. If its engine is stuck, end this process at once."""
        # Requests of this process are retried on other replicas or fail, so Ray need not wait for
        # them.
        try:
            await super().check_health()
        except EngineStuck as error:
            log_facts(logging.ERROR, "stopping replica", replica=self.name, reason=str(error))
            os._exit(1)

    def __del__(self) -> None:
        """Close the engine. Ray calls this after the replica's requests have ended."""
        if hasattr(self, "_engine"):
            self.close()


def _share(cpus: float, memory: int) -> float:
    """Return a replica's share of this machine's memory: as reserved, else by its CPUs."""
    if memory:
        return min(1.0, memory / available_bytes())
    here = ray.get_runtime_context().get_node_id()
    most = next(
        (node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["NodeID"] == here), 0.0
    )
    return min(1.0, cpus / most) if cpus and most else 1.0


def replica_deployment(
    options: ReplicaOptions, *, workers: int, cpus: int, ingress: str, drain_seconds: float
) -> serve.Application:
    """Build the deployment of `workers` replicas with `cpus` CPUs each.

    Args:
        options: Parameters of each replica.
        workers: Number of replicas.
        cpus: Number of CPUs that each replica reserves.
        ingress: Name of the ingress, see `TargetRouter`.
        drain_seconds: Time that running requests get before a replica is closed.
    """
    made = serve.deployment(
        RayReplica,
        name=NAME,
        num_replicas=workers,
        ray_actor_options={"num_cpus": cpus},
        max_ongoing_requests=_MOST_AT_ONCE,
        max_constructor_retry_count=1,
        health_check_period_s=_HEALTH_SECONDS,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=drain_seconds + _LAST_SECONDS,
        request_router_config=RequestRouterConfig(
            request_router_class=TargetRouter, request_router_kwargs={"ingress": ingress}
        ),
        logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
    )
    return made.bind(options)
