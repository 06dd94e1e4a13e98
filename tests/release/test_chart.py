"""Tests of the chart check: Helm's errors become problems, and custom resources are skipped."""

import sys
from types import SimpleNamespace

import pytest
import yaml

from release import chart

RENDERED = {
    "a/templates/service.yaml": "kind: Service",
    "a/templates/servicemonitor.yaml": "kind: ServiceMonitor",
    "a/templates/poddisruptionbudget.yaml": "\n",
    "a/templates/NOTES.txt": "notes",
}


class Loaded:
    """Chart as Helm's package loads it."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def validate_schema(self, values):
        if values.get("replicaCount") == 3:
            raise ValueError("at '/replicaCount': got 3")

    def render(self, values, name, namespace):
        return RENDERED


@pytest.fixture
def helm(monkeypatch):
    messages = [
        {"severity": 1, "path": "Chart.yaml", "error": "icon is recommended"},
        {"severity": 2, "path": "values.yaml", "error": "a warning"},
    ]
    report = {"total_charts_linted": 1, "messages": messages, "errors": []}
    module = SimpleNamespace(
        Chart=SimpleNamespace(load=lambda path: Loaded()),
        lint=lambda path, values, strict: report,
        values_from_yaml=yaml.safe_load,
    )
    monkeypatch.setitem(sys.modules, "helm_python", SimpleNamespace(chart=module))
    monkeypatch.setitem(sys.modules, "helm_python.chart", module)
    return report


def test_the_chart_is_checked_with_several_values():
    assert len(chart.value_files()) >= 3


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "helm_python", None)
    monkeypatch.setitem(sys.modules, "helm_python.chart", None)
    [line] = chart.problems()
    assert "helm_python" in line
    assert line.endswith("install the packages of release/requirements.txt")


def test_warnings_and_wrong_values_are_problems_and_advice_is_not(helm):
    found = chart.problems()
    names = [path.name for path in chart.value_files()]
    assert [line for line in found if "a warning" in line] == [f"{one}: a warning" for one in names]
    assert [line for line in found if "replicaCount" in line] == [
        "everything-values.yaml: at '/replicaCount': got 3"
    ]
    assert "icon" not in "".join(found)


def test_only_manifests_with_a_public_schema_are_written(helm, tmp_path):
    written = chart.write_manifests(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(written)
    assert {path.read_text() for path in written} == {"kind: Service"}
    assert len(written) == len(chart.value_files())
