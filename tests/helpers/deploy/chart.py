"""The Helm chart, rendered with Helm's engine where it is installed, and with our own renderer
everywhere.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.deploy.go_template import Renderer

CHART = Path(__file__).parents[3] / "docs" / "deploy" / "helm" / "kvboost-edge"
RELEASE = "llm"
NAMESPACE = "models"


def render_with_helm(values: Mapping[str, Any], folder: Path) -> str:
    """Return the manifests as Helm renders them, or skip the test that asks for them."""
    if shutil.which("helm"):
        path = folder / "values.yaml"
        path.write_text(yaml.safe_dump(dict(values)), encoding="utf-8")
        words = ["helm", "template", RELEASE, CHART, "--namespace", NAMESPACE, "-f", path]
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout
    pytest.importorskip(
        "helm_python", reason="Helm is missing: install helm, or the package helm-python-sdk"
    )
    chart = importlib.import_module("helm_python.chart")
    with chart.Chart.load(CHART) as loaded:
        return _joined(loaded.render(dict(values), name=RELEASE, namespace=NAMESPACE))


def rendered_files(values: Mapping[str, Any]) -> dict[str, str]:
    """Return each rendered file, using our own renderer of Helm's language."""
    return Renderer(CHART, values, release=RELEASE, namespace=NAMESPACE).render()


def render_without_helm(values: Mapping[str, Any]) -> str:
    """Return the manifests, using our own renderer."""
    return _joined(rendered_files(values))


def _joined(files: Mapping[str, str]) -> str:
    return "\n---\n".join(text for name, text in files.items() if name.endswith(".yaml"))


def documents(text: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the documents by kind and name."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for one in filter(None, yaml.safe_load_all(text)):
        key = (one["kind"], one["metadata"]["name"])
        assert key not in found
        found[key] = one
    return found
