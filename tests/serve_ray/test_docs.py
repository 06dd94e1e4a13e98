"""The documented cluster configurations, against Ray's own schema and the command's flags."""

import warnings
from pathlib import Path

import pytest
import yaml

from kvboost_edge.serve_ray.start import flags_of
from kvboost_edge.server.flags import parse_flags

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"


def kuberay():
    """Return the KubeRay example of docs/scale_out.md."""
    text = (DOCS / "scale_out.md").read_text()
    lines = text[text.index("    apiVersion: ray.io/v1") :].splitlines()
    end = next(number for number, line in enumerate(lines) if line and not line.startswith("    "))
    return yaml.safe_load("\n".join(line[4:] for line in lines[:end]))


def serve_config():
    return yaml.safe_load((DOCS / "deploy" / "serve.yaml").read_text())


@pytest.mark.parametrize(
    "config",
    [serve_config(), yaml.safe_load(kuberay()["spec"]["serveConfigV2"])],
    ids=["serve.yaml", "kuberay"],
)
def test_documented_fields_and_arguments_exist(config):
    with warnings.catch_warnings():
        # Ray Serve's own models were written for an older pydantic.
        warnings.filterwarnings(
            "ignore", "Using extra keyword arguments on `Field`", DeprecationWarning
        )
        schema = pytest.importorskip("ray.serve.schema")
    # Unknown fields would be dropped.
    assert (
        schema.ServeDeploySchema.model_validate(config).model_dump(mode="json", exclude_unset=True)
        == config
    )
    [application] = config["applications"]
    assert application["import_path"] == "kvboost_edge.serve_ray:app"
    options = parse_flags(flags_of(application["args"]), "test")
    assert options.workers == application["args"]["workers"]


def test_the_kuberay_example_has_enough_workers_and_cpus():
    """The example has as many workers as replicas, each with the CPUs of one. The server's CPU is
    on the head.
    """
    cluster = kuberay()["spec"]["rayClusterConfig"]
    [application] = yaml.safe_load(kuberay()["spec"]["serveConfigV2"])["applications"]
    [group] = cluster["workerGroupSpecs"]
    assert (
        group["minReplicas"]
        <= group["replicas"]
        == application["args"]["workers"]
        <= group["maxReplicas"]
    )
    assert group["rayStartParams"]["num-cpus"] == str(application["args"]["num_threads"])
    assert int(cluster["headGroupSpec"]["rayStartParams"]["num-cpus"]) >= 1
