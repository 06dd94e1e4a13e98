"""Tests of the examples for KServe and the Gateway API against the names in the server and the
chart.
"""

from pathlib import Path

import pytest

from helpers.deploy.chart import documents, render_without_helm
from helpers.deploy.dockerfile import read_dockerfile
from kvboost_edge.server.api.routes.health import OPEN_PATHS
from kvboost_edge.server.flags import parse_flags

FOLDER = Path(__file__).parents[3] / "docs" / "deploy"
EXAMPLES = sorted((FOLDER / "kubernetes").glob("*.yaml"))
FOUND = {
    kind: one
    for path in EXAMPLES
    for (kind, _), one in documents(path.read_text(encoding="utf-8")).items()
}
[PORT] = [int(one.value) for one in read_dockerfile(FOLDER / "Dockerfile") if one.name == "EXPOSE"]
GRACE = 30  # Kubernetes' default of terminationGracePeriodSeconds
VERSIONS = {
    "HTTPRoute": "gateway.networking.k8s.io/v1",
    "InferencePool": "inference.networking.k8s.io/v1",
    "InferenceService": "serving.kserve.io/v1beta1",
    "ServingRuntime": "serving.kserve.io/v1alpha1",
}


@pytest.fixture(scope="module")
def pods():
    chart = documents(render_without_helm({"apiKeys": {"existingSecret": "keys"}}))
    [workload] = [one for (kind, _), one in chart.items() if kind == "StatefulSet"]
    return workload["spec"]["template"]


def test_the_kinds_have_the_versions_whose_schemas_were_checked():
    assert {kind: one["apiVersion"] for kind, one in FOUND.items()} == VERSIONS


def test_the_pool_selects_the_pods_of_the_chart(pods):
    spec = FOUND["InferencePool"]["spec"]
    assert spec["selector"]["matchLabels"].items() <= pods["metadata"]["labels"].items()
    [container] = pods["spec"]["containers"]
    ports = {port["containerPort"] for port in container["ports"]}
    assert {port["number"] for port in spec["targetPorts"]} == ports == {PORT}


def test_the_route_leads_to_the_pool():
    [rule] = FOUND["HTTPRoute"]["spec"]["rules"]
    [backend] = rule["backendRefs"]
    pool = FOUND["InferencePool"]
    assert backend["name"] == pool["metadata"]["name"]
    assert backend["group"] == pool["apiVersion"].partition("/")[0]


def test_the_runtime_starts_the_server_with_flags_that_it_accepts():
    [container] = FOUND["ServingRuntime"]["spec"]["containers"]
    assert container["name"] == "kserve-container"
    flags = [word.replace("{{.Name}}", "my-model") for word in container["args"]]
    parsed = parse_flags(flags, "server")
    assert parsed.model == "/mnt/models"
    before = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert before + parsed.settings.drain_seconds + 5 <= GRACE
    # Without a volume for the cache, blocks would fill the node's disk.
    assert "volumeMounts" not in container
    assert parsed.engine["disk_cache_dir"] == "off"
    assert {port["containerPort"] for port in container["ports"]} == {PORT}
    assert FOUND["ServingRuntime"]["spec"]["annotations"]["prometheus.kserve.io/port"] == str(PORT)
    assert {
        container[f"{name}Probe"]["httpGet"]["path"]
        for name in ("startup", "readiness", "liveness")
    } <= OPEN_PATHS
    assert container["securityContext"]["runAsNonRoot"] is True


@pytest.mark.parametrize("name", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_the_probes_of_the_runtime_have_the_limits_of_the_chart(pods, name):
    [server] = pods["spec"]["containers"]
    [container] = FOUND["ServingRuntime"]["spec"]["containers"]
    path = {"path": server[name]["httpGet"]["path"], "port": PORT}
    assert container[name] == {**server[name], "httpGet": path}


def test_the_service_uses_the_runtime_and_one_of_its_formats():
    runtime, model = (
        FOUND["ServingRuntime"],
        FOUND["InferenceService"]["spec"]["predictor"]["model"],
    )
    assert model["runtime"] == runtime["metadata"]["name"]
    formats = [(one["name"], one["version"]) for one in runtime["spec"]["supportedModelFormats"]]
    assert (model["modelFormat"]["name"], model["modelFormat"]["version"]) in formats
