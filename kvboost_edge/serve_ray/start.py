"""`kvboost-edge serve --workers N`: a server with replicas, on its own Ray or on a cluster."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import secrets
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvboost_edge import errors
from kvboost_edge.config import EngineConfig, GenerationMode
from kvboost_edge.errors import BackendUnavailable, ConfigError, KVBoostError
from kvboost_edge.host.processor import default_num_threads
from kvboost_edge.serve_ray.cluster_cpus import check_address, cpus_of_each
from kvboost_edge.serve_ray.model_files import open_tokenizer
from kvboost_edge.serve_ray.replica import ReplicaOptions
from kvboost_edge.serve_ray.run_directory import STORE_BYTES, ray_directory
from kvboost_edge.serve_ray.watch.members import watch_members
from kvboost_edge.server.logs import log_facts
from kvboost_edge.server.settings import tenant_of_key

if TYPE_CHECKING:
    from kvboost_edge.serve_ray.pool import ReplicatedEngine
    from kvboost_edge.server.serve_options import ServeOptions
    from kvboost_edge.text.tokenizer import Tokenizer

__all__ = [
    "FLAGS_VARIABLE",
    "cluster",
    "connect_pool",
    "deploy_replicas",
    "flags_of",
    "loading_error",
    "log_replicas",
    "own_cluster",
    "replica_options",
    "start_replicas",
]

FLAGS_VARIABLE = "KVBOOST_EDGE_SERVE_FLAGS"
# Not allowed in a serve.yaml: its cluster and port are those of Ray.
_REFUSED = ("ray_address", "port")

_OPENING_SECONDS = 60.0  # from the deployment to the first replica's answer
_ENDING_SECONDS = 10.0  # for killed processes to end
_WAITING_SECONDS = 0.1  # polling interval while replicas start
_MOST_REASON = 500  # taken from the end of Ray's message
# One token per process, because Ray keeps the first one.
_TOKEN = secrets.token_hex(32)
_LOOPBACK = "127.0.0.1"
# Environment of a Ray instance on this machine. None unsets a variable.
_OWN: dict[str, str | None] = {
    "RAY_ADDRESS": None,
    "RAY_AUTH_MODE": None,  # Ray's default requires tokens.
    "RAY_AUTH_TOKEN": _TOKEN,
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # loopback only, on all systems
    "RAY_USAGE_STATS_ENABLED": "0",
}
_ERRORS = {kind.__name__ for kind in vars(errors).values() if isinstance(kind, type)}
_LINE = re.compile(r"(?:[\w.]+\.)?(?P<kind>[A-Z]\w+): (?P<text>.*)")


def replica_options(options: ServeOptions) -> ReplicaOptions:
    """Return the parameters of each replica."""
    tenants: tuple[str | None, ...] = tuple(tenant_of_key(key) for key in options.settings.all_keys)
    return ReplicaOptions(
        options.model,
        options.engine,
        options.warm,
        options.warm_documents,
        tenants or (None,),
        GenerationMode(options.settings.mode),
        options.warm_systems,
    )


def flags_of(arguments: Mapping[str, Any]) -> list[str]:
    """Convert the arguments of a serve.yaml or `serve run` to flags of `kvboost-edge serve`.

    Examples are `num_threads: 4`, a list for a repeatable flag, and true for a flag without a
    value. Without arguments, flags are read from the environment variable KVBOOST_EDGE_SERVE_FLAGS.

    Raises:
        ConfigError: An argument belongs to Ray's own configuration.
    """
    if not arguments:
        return shlex.split(os.environ.get(FLAGS_VARIABLE, ""))
    flags: list[str] = []
    for name, value in arguments.items():
        if name.replace("-", "_") in _REFUSED:
            raise ConfigError(f"{name}={value!r} is set by Ray's own configuration; leave it out")
        flag = f"--{name.replace('_', '-')}"
        for one in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
            if one is True:
                flags.append(flag)
            elif one is not False and one is not None:
                flags += [flag, str(one)]
    return flags


@contextlib.contextmanager
def start_replicas(options: ServeOptions) -> Iterator[ReplicatedEngine]:
    """Start the replicas, and yield them as one engine. They end afterwards."""
    config = EngineConfig.from_options(**options.engine)
    # Done before Ray starts, to report invalid options and files at once.
    tokenizer, digest = open_tokenizer(options.model, config)
    threads = options.engine.get("num_threads")
    with cluster(options.ray_address, options.workers, threads) as each:
        name = f"kvboost-edge-{secrets.token_hex(4)}"
        with (
            deploy_replicas(options, name, each) as handle,
            connect_pool(handle, name, tokenizer, digest, config) as pool,
        ):
            yield pool


@contextlib.contextmanager
def connect_pool(
    handle: Any,
    name: str,
    tokenizer: Tokenizer,
    digest: str,
    config: EngineConfig,
    *,
    seconds: float = _OPENING_SECONDS,
    is_settled: Callable[[], bool] = lambda: True,
) -> Iterator[ReplicatedEngine]:
    """Yield the replicas of a handle as one engine, once the first one is ready.

    Raises the errors of `Replicas.open`.

    Args:
        handle: Ray's handle of the deployment.
        name: Name of the ingress, see `TargetRouter`.
        tokenizer: The model's tokenizer.
        digest: Digest of the model's files, see `open_tokenizer`.
        config: Configuration of the engines.
        seconds: Longest time to wait, see `Replicas.open`.
        is_settled: See `Replicas.open`.
    """
    from kvboost_edge.serve_ray.pool import ReplicatedEngine
    from kvboost_edge.serve_ray.replicas import Replicas

    replicas = Replicas(handle, digest)
    try:
        watch_members(name, replicas.members_changed)
        replicas.open(seconds, is_settled)
        yield ReplicatedEngine(replicas, tokenizer, config)
    finally:
        watch_members(name, None)
        replicas.close()


@contextlib.contextmanager
def cluster(address: str | None, workers: int, num_threads: int | None) -> Iterator[int]:
    """Start Ray for `workers` replicas, or connect to a cluster; yield the CPUs of each replica."""
    if address is None:
        each = cpus_of_each(workers, num_threads, [default_num_threads()])
        with own_cluster(workers * each):
            yield each
        return
    check_address(address)
    import ray

    try:
        with _kept_signals():
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise BackendUnavailable(
            f"ray_address={address!r}: no Ray cluster answers there ({_first_line(error)}); start "
            "one with `ray start --head`, or leave out --ray-address to start Ray on this machine"
        ) from error
    try:
        machines = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
        yield cpus_of_each(
            workers, num_threads, machines, int(ray.available_resources().get("CPU", 0))
        )
    finally:
        ray.shutdown()


@contextlib.contextmanager
def own_cluster(num_cpus: int) -> Iterator[None]:
    """Start Ray on this machine only, and stop it afterwards.

    Ray listens on loopback with its own token, without dashboard and usage reports. Its files are
    in a directory that is removed at the end.

    Raises:
        BackendUnavailable: Ray does not start.
    """
    with ray_directory() as directory, _environment(_OWN):
        import ray

        try:
            # Ray would otherwise log that it requires tokens.
            with _kept_signals(), _on_loopback(), _quiet("ray._private.authentication"):
                ray.init(
                    address="local",
                    num_cpus=num_cpus,
                    num_gpus=0,
                    include_dashboard=False,
                    object_store_memory=STORE_BYTES,
                    log_to_driver=False,
                    logging_level=logging.WARNING,
                    _temp_dir=directory,
                    _node_ip_address=_LOOPBACK,
                )
        except BaseException as error:  # Ray raises signals and untyped timeouts.
            _end_processes(directory)  # before the directory is removed
            if not isinstance(error, Exception):
                raise
            raise BackendUnavailable(
                f"Ray could not be started on this machine: {_first_line(error)}"
            ) from error
        try:
            if ray.util.get_node_ip_address() != _LOOPBACK:
                raise BackendUnavailable(
                    "Ray listens on an address other than loopback, although loopback was requested"
                )
            yield
        finally:
            ray.shutdown()


def _end_processes(directory: str) -> None:
    """Kill the processes of a partly started Ray that uses `directory`."""
    # They would otherwise run until this process ends.
    import psutil

    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if directory in " ".join(child.cmdline()):
                child.kill()
                found.append(child)
    psutil.wait_procs(found, timeout=_ENDING_SECONDS)


@contextlib.contextmanager
def deploy_replicas(options: ServeOptions, name: str, cpus: int) -> Iterator[Any]:
    """Deploy the replicas, wait until all are loaded, and yield Ray's handle.

    Raises the error of a replica that fails to load.
    """
    from ray import serve
    from ray.serve.schema import LoggingConfig

    from kvboost_edge.serve_ray.deployment import replica_deployment

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    logging_config = LoggingConfig(log_level="WARNING", enable_access_log=False)
    serve.start(proxy_location="Disabled", logging_config=logging_config)
    try:
        application = replica_deployment(
            replica_options(options),
            workers=options.workers,
            cpus=cpus,
            ingress=name,
            drain_seconds=options.settings.drain_seconds,
        )
        log_facts(logging.INFO, "starting replicas", workers=options.workers, cpus=cpus)
        [handle] = serve.run_many(
            [serve.RunTarget(application, name=name, route_prefix=None)],
            wait_for_applications_running=False,
        )
        _wait_for(name)
        yield handle
    finally:
        log_facts(logging.INFO, "stopping replicas")
        serve.delete(name)  # waits until all engines are closed


def _wait_for(name: str) -> None:
    """Wait until all replicas of an application run. Log the reason if the wait is long.

    Raises the error of a replica that fails to load.
    """
    # Ray may wait forever, for example for CPUs that are reserved by another application.
    from ray import serve

    told = ""
    while True:
        found = serve.status().applications.get(name)
        if found is None or found.status == "DELETING":
            raise BackendUnavailable(
                "the replicas were deleted while they were starting; start the server again"
            )
        if found.status == "RUNNING":
            return
        if found.status == "DEPLOY_FAILED":
            raise loading_error(_messages(name) or found.message)
        message = " ".join(_messages(name).split())
        if message and message != told:
            log_facts(logging.WARNING, "waiting for replicas", reason=message[-_MOST_REASON:])
            told = message
        time.sleep(_WAITING_SECONDS)


def _messages(name: str) -> str:
    """Return Ray Serve's status messages about the application's deployments."""
    from ray import serve

    status = serve.status().applications.get(name)
    return "" if status is None else "\n".join(one.message for one in status.deployments.values())


def loading_error(text: str) -> KVBoostError:
    """Extract a replica's error from Ray's message, which contains a traceback."""
    found = [
        match
        for line in text.splitlines()
        if (match := _LINE.search(line)) and match["kind"] in _ERRORS
    ]
    if found:
        kind: type[KVBoostError] = getattr(errors, found[-1]["kind"])
        return kind(f"a replica could not load: {found[-1]['text']}")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return BackendUnavailable(
        f"a replica ended while it was loading: {lines[-1] if lines else 'Ray gives no reason'}"
    )


def _first_line(error: BaseException) -> str:
    return next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )


@contextlib.contextmanager
def _environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables for this process and its children. None unsets a variable."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Make Ray use the loopback address, and any free port for the node's agent."""
    # `ray.init` has no arguments for these. By default all Ray instances use the same port, so a
    # second one would not start.
    from ray._private import parameter, ray_constants

    made = parameter.RayParams
    clusters = ray_constants.ENABLE_RAY_CLUSTER
    parameter.RayParams = functools.partial(made, dashboard_agent_listen_port=0)
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        parameter.RayParams = made
        ray_constants.ENABLE_RAY_CLUSTER = clusters


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Suppress a logger's messages below the level of errors."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def _kept_signals() -> Iterator[None]:
    """Keep Ray from installing a SIGTERM handler, because Ray never removes it."""
    from ray._private import utils

    take = utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = take


def log_replicas(pool: ReplicatedEngine) -> None:
    """Log the runner, backend, threads and pool of each replica."""
    for name, view in pool.replicas().items():
        stats = view.paged_stats()
        shown = {
            field: stats[field]
            for field in ("runner", "backend", "num_threads", "num_blocks", "pool_bytes")
        }
        log_facts(logging.INFO, "replica", replica=name, **shown)
