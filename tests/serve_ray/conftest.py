"""A Ray cluster of this machine for these tests, with two replicas of the bundled model, and the
same model alone.
"""

import warnings

import pytest

from helpers.serve_ray.replica_cases import options_of, running_replicas
from helpers.server.live_servers import serving

SECRET = "a secret of the test suite"
NUM_CPUS = 4  # Ray's own count: the replicas share the CPUs that exist
OPTIONS = {"num_blocks": 512, "max_num_seqs": 8, "num_threads": 1, "reuse_gate": "off"}


@pytest.fixture(scope="package")
def imported_ray():
    """The module `ray`, after the import of Ray Serve."""
    with warnings.catch_warnings():
        # Ray Serve's own models were written for an older pydantic.
        warnings.filterwarnings(
            "ignore", "Using extra keyword arguments on `Field`", DeprecationWarning
        )
        ray = pytest.importorskip("ray")
        pytest.importorskip("ray.serve")
        return ray


@pytest.fixture(scope="package")
def ray_cluster(imported_ray, isolated_cache):
    """Address of the Ray cluster. It soon reports replicas that wait for CPUs, and all replicas
    know the secret of the suite.
    """
    from kvboost_edge.serve_ray.start import own_cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_SERVE_SLOW_STARTUP_WARNING_S", "1")
        patch.setenv("RAY_SERVE_SLOW_STARTUP_WARNING_PERIOD_S", "1")
        patch.setenv("KVBOOST_EDGE_REDIS_SECRET", SECRET)
        with own_cluster(NUM_CPUS):
            yield imported_ray.get_runtime_context().gcs_address


@pytest.fixture(scope="module")
def running(ray_cluster):
    with running_replicas(options_of(), "test") as found:
        yield found


@pytest.fixture
def two(running):
    """The running deployment with two replicas, whatever the previous test did."""
    running.wait_for(2)
    return running


@pytest.fixture(scope="module")
def alone(isolated_cache):
    """The same model and options in this process."""
    from kvboost_edge import CPUPagedEngine

    with CPUPagedEngine.from_pretrained("kvboost-edge/demo", **OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(running):
    """Server over the replicas, with keys of two tenants."""
    with serving(
        running.pool, api_keys=("first-key", "second-key"), admin_api_keys=("admin-key",)
    ) as live:
        yield live
