"""Tests of the Helm chart: its values are validated, and the rendered objects are consistent."""

import copy
import json
import re

import jsonschema
import pytest
import yaml

from helpers.deploy.chart import (
    CHART,
    RELEASE,
    documents,
    render_with_helm,
    render_without_helm,
    rendered_files,
)
from helpers.deploy.go_template import Renderer, RequiredValueMissing, TemplateError, merged
from kvboost_edge.server.api.routes.health import OPEN_PATHS
from kvboost_edge.server.flags import parse_flags

SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
CASES = {
    path.name.removesuffix("-values.yaml"): yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in sorted((CHART / "ci").glob("*-values.yaml"))
}
NEEDED, FULL = CASES["defaults"], CASES["everything"]


def of_kind(found, kind):
    return [one for (known, _), one in found.items() if known == kind]


@pytest.fixture(params=CASES, scope="module")
def found(request):
    return documents(render_without_helm(CASES[request.param]))


@pytest.fixture
def pod(found):
    [workload] = of_kind(found, "StatefulSet")
    return workload["spec"]["template"]


@pytest.fixture
def server(pod):
    [container] = pod["spec"]["containers"]
    return container


@pytest.mark.parametrize("case", CASES)
def test_helm_renders_the_same(case, tmp_path):
    expected = documents(render_with_helm(CASES[case], tmp_path))
    assert documents(render_without_helm(CASES[case])) == expected


@pytest.mark.parametrize("case", CASES)
def test_the_manifests_fit_the_schemas_of_kubernetes(case):
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is missing")
    for one in documents(render_without_helm(CASES[case])).values():
        if one["kind"] != "ServiceMonitor":  # a custom resource
            validate.validate(one, validate.latest_version(), strict=True)


@pytest.mark.parametrize("case", CASES)
def test_values_fit_the_schema(case):
    jsonschema.validate(merged(DEFAULTS, CASES[case]), SCHEMA)


def test_every_value_is_declared_in_the_schema():
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    assert set(DEFAULTS) == set(SCHEMA["properties"]) - {"global"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"replicas": 2},
        {"replicaCount": "2"},
        {"replicaCount": -1},
        {"model": ""},
        {"image": {"pullPolicy": "Sometimes"}},
        {"apiKeys": {"secret": "keys"}},
        {"cache": {"size": "20 GB"}},
        {"cache": {"accessModes": []}},
        {"cache": {"maxDiskBytes": "8 Gi"}},
        {"cache": {"maxDiskBytes": 8}},
        {"extraArgs": [8192]},
        {"extraEnv": [{"value": "no name"}]},
        {"service": {"port": 70000}},
        {"resources": {"limits": {"memory": "4 Gi"}}},
        {"resources": {"limit": {}}},
        {"livenessProbe": {"httpGet": {"path": "/"}}},
        {"podDisruptionBudget": {"maxUnavailable": 0}},
        {"serviceMonitor": {"interval": "often"}},
        {"drainSeconds": -1},
    ],
    ids=json.dumps,
)
def test_wrong_values_are_refused(wrong):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(merged(DEFAULTS, wrong), SCHEMA)


def test_a_secret_with_keys_is_required():
    with pytest.raises(RequiredValueMissing, match=r"apiKeys\.existingSecret"):
        render_without_helm({})


def test_a_monitor_needs_a_key():
    with pytest.raises(RequiredValueMissing, match=r"serviceMonitor\.authorization"):
        render_without_helm({**NEEDED, "serviceMonitor": {"enabled": True}})


def test_manifest_kinds_follow_the_values():
    kinds = {
        case: {kind for kind, _ in documents(render_without_helm(values))}
        for case, values in CASES.items()
    }
    always = {"Service", "ServiceAccount", "StatefulSet"}
    assert kinds["defaults"] == always | {"PodDisruptionBudget"}
    assert kinds["everything"] == always | {"PodDisruptionBudget", "ServiceMonitor"}
    assert kinds["no-budget"] == always
    assert kinds["no-persistence"] == kinds["defaults"]


def test_selectors_match_the_pods(found, pod):
    labels = pod["metadata"]["labels"].items()
    [workload] = of_kind(found, "StatefulSet")
    assert workload["spec"]["selector"]["matchLabels"].items() <= labels
    for service in of_kind(found, "Service"):
        assert service["spec"]["selector"].items() <= labels
    for budget in of_kind(found, "PodDisruptionBudget"):
        assert budget["spec"]["selector"]["matchLabels"].items() <= labels


def test_a_monitor_reads_each_pod_once():
    """Two services select the pods, and the monitor must match only one of them."""
    found = documents(render_without_helm(FULL))
    [monitor] = of_kind(found, "ServiceMonitor")
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    matching = [
        one for one in of_kind(found, "Service") if wanted <= one["metadata"]["labels"].items()
    ]
    assert len(matching) == 1
    ports = {port["name"] for port in matching[0]["spec"]["ports"]}
    assert {one["port"] for one in monitor["spec"]["endpoints"]} <= ports


def test_the_workload_names_a_headless_service(found):
    [workload] = of_kind(found, "StatefulSet")
    assert found["Service", workload["spec"]["serviceName"]]["spec"]["clusterIP"] == "None"


@pytest.fixture
def parsed(server, tmp_path):
    """The server's options, as it reads them from the arguments of its container."""
    files = {
        "/etc/kvboost-edge/keys/api-keys": "k" * 48,
        "/etc/kvboost-edge/admin-keys/admin-api-keys": "a" * 48,
    }
    flags = []
    for word in server["args"]:
        if word in files:
            path = tmp_path / word.rpartition("/")[2]
            path.write_text(files[word])
            word = str(path)
        flags.append(word)
    assert all(isinstance(word, str) for word in server["args"])
    return parse_flags(["--host", "0.0.0.0", "--allowed-host", "*", *flags], "server")


def test_the_server_accepts_its_flags(parsed):
    assert parsed.settings.drain_seconds == DEFAULTS["drainSeconds"]


def test_blocks_on_disk_leave_room_in_a_volume_without_persistence(pod, parsed):
    """The disk tier measures the node's disk, but Kubernetes evicts a pod above `sizeLimit`."""
    limits = [
        one["emptyDir"]["sizeLimit"] for one in pod["spec"]["volumes"] if one["name"] == "cache"
    ]
    if limits and parsed.engine["disk_cache_dir"] != "off":
        assert parsed.engine["max_disk_bytes"] < float(limits[0].removesuffix("Gi")) * 2**30


def test_the_limit_of_blocks_on_disk_follows_the_values():
    found = {}
    for case, values in CASES.items():
        [workload] = of_kind(documents(render_without_helm(values)), "StatefulSet")
        arguments = workload["spec"]["template"]["spec"]["containers"][0]["args"]
        found[case] = [
            word for word in ("--max-disk-bytes", "--disk-cache-dir") if word in arguments
        ]
    assert found == {
        "defaults": [],
        "everything": ["--max-disk-bytes"],
        "no-budget": [],
        "no-persistence": ["--disk-cache-dir"],
    }


def test_probes_ask_paths_that_need_no_key(server):
    probes = [server[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")]
    assert {probe["path"] for probe in probes} <= OPEN_PATHS
    assert probes[2]["path"] == "/ready"
    assert (
        {probe["port"] for probe in probes}
        == {"http"}
        == {port["name"] for port in server["ports"]}
    )


def test_answers_in_progress_can_finish(pod, server):
    before = float(server["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["spec"]["terminationGracePeriodSeconds"] >= before + DEFAULTS["drainSeconds"] + 5


def test_nothing_runs_as_root_or_writes_to_the_image(pod):
    spec = pod["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["fsGroup"] == 10001
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    for container in spec["initContainers"] + spec["containers"]:
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}


def test_mounted_volumes_exist_and_the_cache_can_be_written(found, pod, server):
    [workload] = of_kind(found, "StatefulSet")
    claims = [one["metadata"]["name"] for one in workload["spec"].get("volumeClaimTemplates", [])]
    names = [one["name"] for one in pod["spec"]["volumes"]] + claims
    assert len(names) == len(set(names))
    for container in pod["spec"]["initContainers"] + [server]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= set(names)
    written = [mount["mountPath"] for mount in server["volumeMounts"] if not mount.get("readOnly")]
    [kernels] = [one["value"] for one in server["env"] if one["name"] == "NUMBA_CACHE_DIR"]
    assert "/tmp" in written
    assert any(kernels.startswith(f"{path}/") for path in written)
    [filled] = pod["spec"]["initContainers"]
    assert filled["command"][-1] == kernels.replace("/var/lib/kvboost-edge", "/cache")
    assert [mount["mountPath"] for mount in filled["volumeMounts"]] == ["/cache"]


def test_the_tag_is_the_version_of_the_application_unless_it_is_given():
    about = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    for values, tag in ((NEEDED, about["appVersion"]), (FULL, "1.2.3")):
        text = render_without_helm(values)
        assert set(re.findall(r'image: "\S+:(\S+)"', text)) == {tag}
    # The chart's version has the format that Helm accepts.
    assert about["version"].replace("-rc.", "rc") == about["appVersion"]


def test_the_notes_name_the_service():
    notes = rendered_files(NEEDED)["NOTES.txt"]
    assert f"service/{RELEASE}-kvboost-edge 8000:8000" in notes
    assert "{{" not in notes


@pytest.mark.parametrize(
    "template", ["{{ lookup .Values }}", "{{ if .Values.a }}", "{{ .Values.a ) }}"], ids=str
)
def test_unknown_template_syntax_is_an_error(template, tmp_path):
    (tmp_path / "templates").mkdir()
    for name in ("Chart.yaml", "values.yaml"):
        (tmp_path / name).write_text("name: x\n")
    (tmp_path / "templates" / "a.yaml").write_text(template)
    with pytest.raises(TemplateError):
        Renderer(tmp_path, {}, release="r", namespace="n").render()


def test_defaults_are_not_changed_by_values():
    before = copy.deepcopy(DEFAULTS)
    merged(DEFAULTS, FULL)
    assert before == DEFAULTS
