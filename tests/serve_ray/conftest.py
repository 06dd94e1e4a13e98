"""A Ray of this machine's own for these tests, two replicas of the bundled model on it, and the
same model alone.
"""

import warnings

import pytest

from helpers.serve_ray.replica_cases import options_of, running_replicas
from helpers.server.live_servers import serving

SECRET = "a secret of the test suite"
NUM_CPUS = 4  # Ray's own count: replicas share what CPUs there are
OPTIONS = {"num_blocks": 512, "max_num_seqs": 8, "num_threads": 1, "reuse_gate": "off"}


@pytest.fixture(scope="package")
def ray_cluster(isolated_cache):
    """Gives its address. Replicas that wait for a place are told of soon, and all know the secret
    of the suite.
    """
    with warnings.catch_warnings():
        # Ray Serve's own models are written for an older pydantic.
        warnings.filterwarnings(
            "ignore", "Using extra keyword arguments on `Field`", DeprecationWarning
        )
        ray = pytest.importorskip("ray")
        pytest.importorskip("ray.serve")
    from kvboost_edge.serve_ray.start import own_cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_SERVE_SLOW_STARTUP_WARNING_S", "1")
        patch.setenv("RAY_SERVE_SLOW_STARTUP_WARNING_PERIOD_S", "1")
        patch.setenv("KVBOOST_EDGE_REDIS_SECRET", SECRET)
        with own_cluster(NUM_CPUS):
            yield ray.get_runtime_context().gcs_address


@pytest.fixture(scope="module")
def running(ray_cluster):
    with running_replicas(options_of(), "test") as found:
        yield found


@pytest.fixture
def two(running):
    """With two replicas, whatever a test before did."""
    running.wait_for(2)
    return running


@pytest.fixture(scope="module")
def alone(isolated_cache):
    """The same model and settings in this process."""
    from kvboost_edge import CPUPagedEngine

    with CPUPagedEngine.from_pretrained("kvboost-edge/demo", **OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(running):
    """The server over the replicas, with two tenants' keys."""
    with serving(
        running.pool, api_keys=("first-key", "second-key"), admin_api_keys=("admin-key",)
    ) as live:
        yield live
