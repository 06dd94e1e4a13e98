"""Checks of the Helm chart with Helm's engine, which the package helm-python-sdk contains."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

__all__ = ["CHART", "problems", "value_files", "write_manifests"]

CHART = Path(__file__).parents[1] / "docs" / "deploy" / "helm" / "kvboost-edge"
_WARNING = 2  # severity in Helm's report of lint
_PACKAGE = "helm_python.chart"


def value_files() -> list[Path]:
    """Return the files of values with which the chart is checked."""
    return sorted((CHART / "ci").glob("*-values.yaml"))


def problems() -> list[str]:
    """Return Helm's errors and warnings about the chart, for each file of values."""
    try:
        helm = importlib.import_module(_PACKAGE)
    except ImportError as error:
        return [f"{error}: install the packages of release/requirements.txt"]
    found = []
    for path in value_files():
        values = _values(helm, path)
        report = helm.lint(str(CHART), values, strict=True)
        told = [one["error"] for one in report["messages"] if one["severity"] >= _WARNING]
        found += [f"{path.name}: {line}" for line in (*told, *report["errors"])]
        with helm.Chart.load(CHART) as chart:
            try:
                chart.validate_schema(values)
            except ValueError as error:
                found.append(f"{path.name}: {error}")
    return found


def write_manifests(folder: Path) -> list[Path]:
    """Render the chart with each file of values, and return the files without custom resources."""
    helm = importlib.import_module(_PACKAGE)
    written = []
    for path in value_files():
        with helm.Chart.load(CHART) as chart:
            files = chart.render(_values(helm, path), name="llm", namespace="models")
        for name, text in files.items():
            if name.endswith(".yaml") and text.strip() and "servicemonitor" not in name:
                target = folder / f"{path.stem}-{Path(name).name}"
                target.write_text(text, encoding="utf-8")
                written.append(target)
    return written


def _values(helm: Any, path: Path) -> Any:
    return helm.values_from_yaml(path.read_text(encoding="utf-8"))
