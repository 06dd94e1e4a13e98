"""Run every check of a release and print one line for each.

python -m release.check [--only NAME ...]

`make release-check` runs it in an environment with the tools of release/requirements.txt. A tool is
looked for next to the interpreter and on PATH. A missing tool fails its check, unless
release/unavailable.toml lists the tool with a reason. The distributions and the SBOM are left in
dist/.

To add a check, add a row to `CHECKS`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from release import chart, distributions, version

__all__ = ["CHECKS", "Check", "Outcome", "command", "main", "run_check", "unavailable_tools"]

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
# Environment with the wheel and its server extra, for the SBOM and the first answer.
INSTALLED = ROOT / "build" / "release-venv"
UNAVAILABLE = ROOT / "release" / "unavailable.toml"
# Name of the advisory data in release/unavailable.toml.
ADVISORIES = "advisories"
_SCRIPTS = "Scripts" if os.name == "nt" else "bin"


@dataclass(frozen=True)
class Check:
    """One row of the report.

    Attributes:
        name: what is checked.
        tools: executables that the check needs.
        run: function that returns the problems; none if the check passes.
        install: how to install the tools, for the message about a missing one.
    """

    name: str
    tools: tuple[str, ...]
    run: Callable[[], list[str]]
    install: str = "install the packages of release/requirements.txt"


@dataclass(frozen=True)
class Outcome:
    """Result of a check: "passed", "failed", "missing" or "unavailable", and lines that explain
    it.
    """

    state: str
    lines: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        return self.state in ("passed", "unavailable")


def tool_path(name: str) -> str | None:
    """Return the path of a tool next to the interpreter or on PATH, or None."""
    folder = str(Path(sys.executable).parent)
    return shutil.which(name, path=folder) or shutil.which(name)


class Unreachable(Exception):
    """Raised if a service that a check needs cannot be reached. The argument is its name."""


def unavailable_tools(path: Path = UNAVAILABLE) -> dict[str, str]:
    """Return the tools that are listed as unavailable, with the reasons."""
    listed = tomllib.loads(path.read_text(encoding="utf-8"))
    return {name: str(entry["reason"]) for name, entry in listed.items()}


def run_check(check: Check, unavailable: Mapping[str, str]) -> Outcome:
    """Run a check, or say which of its tools are missing."""
    missing = [name for name in check.tools if tool_path(name) is None]
    unexplained = [name for name in missing if name not in unavailable]
    if unexplained:
        where = UNAVAILABLE.relative_to(ROOT).as_posix()
        lines = (f"{name} is missing: {check.install}, or list it in {where}" for name in missing)
        return Outcome("missing", tuple(lines))
    if missing:
        return Outcome("unavailable", tuple(f"{name}: {unavailable[name]}" for name in missing))
    try:
        problems = check.run()
    except Unreachable as error:
        [name] = error.args
        if name in unavailable:
            return Outcome("unavailable", (f"{name}: {unavailable[name]}",))
        return Outcome("missing", (f"{name} cannot be reached",))
    return Outcome("failed", tuple(problems)) if problems else Outcome("passed")


def output_problems(
    words: Sequence[str], cwd: Path = ROOT, variables: Mapping[str, str] | None = None
) -> list[str]:
    """Run a command and return its output if it fails.

    Args:
        words: the command. A tool is looked up like those of a check.
        cwd: working directory.
        variables: environment variables to set. PYTHONPATH is always removed.
    """
    tool = tool_path(words[0])
    environment = {**os.environ, **(variables or {})}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [tool or words[0], *words[1:]],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return []
    return [f"exit code {done.returncode}: {' '.join(words)}", *done.stdout.splitlines()]


def command(name: str, *words: str, install: str = Check.install) -> Check:
    """Return a check that passes if a command exits with 0.

    The first word is the tool. "{wheel}", "{sdist}" and "{cuda}" stand for the built files.
    """

    def run() -> list[str]:
        places = {"wheel": "*.whl", "sdist": "kvboost_edge-*.tar.gz", "cuda": "*_cuda-*.tar.gz"}
        filled = []
        for word in words:
            pattern = places.get(word.strip("{}")) if word.startswith("{") else None
            if pattern is None:
                filled.append(word)
                continue
            found = [str(path) for path in DIST.glob(pattern)]
            if not found:
                return [f"dist/{pattern} does not exist: the build failed"]
            filled += found
        return output_problems(filled)

    return Check(name, (words[0],), run, install)


@cache
def tracked_files() -> tuple[str, ...]:
    """Return the files under version control."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return tuple(name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file())


def _builder() -> list[str]:
    return [str(tool_path("pyproject-build"))]


def _build() -> list[str]:
    tracked = tracked_files()
    try:
        first = distributions.build(_builder(), ROOT, DIST)
        with tempfile.TemporaryDirectory() as folder:
            copy = distributions.aged_copy(ROOT, tracked, Path(folder, "tree"))
            second = distributions.build(_builder(), copy, Path(folder, "dist"))
            different = distributions.different_files(first, second)
    except subprocess.CalledProcessError as error:
        return [f"the build failed with exit code {error.returncode}", *error.stdout.splitlines()]
    return different + distributions.content_problems(first, tracked)


def _build_cuda() -> list[str]:
    words = ["pyproject-build", "--sdist", "--outdir", str(DIST), "cuda_ext"]
    found = output_problems(words)
    if found:
        return found
    [sdist] = DIST.glob("*_cuda-*.tar.gz")
    return distributions.cuda_problems(sdist, tracked_files())


def _install() -> list[str]:
    """Install the wheel with its server extra into a new environment."""
    shutil.rmtree(INSTALLED, ignore_errors=True)
    found = output_problems([sys.executable, "-m", "venv", str(INSTALLED)])
    python = str(INSTALLED / _SCRIPTS / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    wheels = [f"{path}[server]" for path in DIST.glob("*.whl")]
    if not wheels:
        return ["dist/ contains no wheel: the build failed"]
    return (
        found
        or output_problems([*pip, "install", "-q", "-c", "constraints.txt", *wheels])
        or output_problems([*pip, "check"])
    )


def _first_answer() -> list[str]:
    """Run the demo with the installed wheel, from an empty folder and with an empty cache."""
    program = str(INSTALLED / _SCRIPTS / "kvboost-edge")
    with tempfile.TemporaryDirectory() as folder:
        variables = {"KVBOOST_EDGE_CACHE": str(Path(folder, "cache"))}
        return output_problems([program, "demo"], Path(folder), variables)


def _sbom() -> list[str]:
    """Write the SBOM of the installed wheel and its dependencies to dist/."""
    out = DIST / f"kvboost_edge-{version.project_version()}.cdx.json"
    python = str(INSTALLED / _SCRIPTS / "python")
    words = ["cyclonedx-py", "environment", "--output-reproducible", "--validate"]
    words += ["--pyproject", "pyproject.toml", "--output-format", "JSON"]
    return output_problems([*words, "--output-file", str(out), python])


def _audit() -> list[str]:
    """Look up the pinned dependencies in the package index's advisories."""
    words = ["--progress-spinner", "off", "--disable-pip", "--no-deps", "-r", "constraints.txt"]
    done = subprocess.run(
        [str(tool_path("pip-audit")), "--format", "json", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        found = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        return [f"exit code {done.returncode}: pip-audit", *done.stderr.splitlines()]
    skipped = [one["name"] for one in found if "skip_reason" in one]
    if len(skipped) == len(found):
        raise Unreachable(ADVISORIES)
    problems = [f"{name} could not be audited" for name in skipped]
    for one in found:
        for advisory in one.get("vulns", ()):
            fixed = ", ".join(advisory["fix_versions"]) or "no version"
            problems.append(f"{one['name']} {one['version']}: {advisory['id']}, fixed in {fixed}")
    return problems


def _schemas() -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        manifests = [str(path) for path in chart.write_manifests(Path(folder))]
        return output_problems(["kubernetes-validate", "--strict", "--quiet", *manifests])


def _kubeconform() -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        chart.write_manifests(Path(folder))
        return output_problems(["kubeconform", "-strict", folder])


def _helm_lint() -> list[str]:
    lint = ["helm", "lint", "--strict", str(chart.CHART)]
    return [
        line for path in chart.value_files() for line in output_problems([*lint, "-f", str(path)])
    ]


# Files for which check-jsonschema has a schema, by its name.
_WITH_SCHEMA = {
    "vendor.citation-file-format": "CITATION.cff",
    "vendor.compose-spec": "docs/deploy/compose.yaml",
    "vendor.dependabot": ".github/dependabot.yml",
    "vendor.github-issue-config": ".github/ISSUE_TEMPLATE/config.yml",
    "vendor.github-issue-forms": ".github/ISSUE_TEMPLATE/[!c]*.yml",
    "vendor.github-workflows": ".github/workflows/*.yml",
}


def _forms() -> list[str]:
    found = []
    for schema, pattern in _WITH_SCHEMA.items():
        files = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))
        found += output_problems(["check-jsonschema", "--builtin-schema", schema, *files])
    return found


# The order matters: later checks use what earlier ones leave in dist/ and in `INSTALLED`.
CHECKS: tuple[Check, ...] = (
    Check("versions agree", (), version.problems),
    Check("wheel and sdist: same bytes twice, complete", ("pyproject-build", "git"), _build),
    Check("sdist of cuda_ext", ("pyproject-build", "git"), _build_cuda),
    command("metadata", "twine", "check", "--strict", "{wheel}", "{sdist}", "{cuda}"),
    command("wheel contents", "check-wheel-contents", "{wheel}"),
    Check("wheel installs", (), _install),
    Check("wheel answers", (), _first_answer),
    Check("SBOM", ("cyclonedx-py",), _sbom),
    Check("no known vulnerabilities", ("pip-audit",), _audit),
    command("workflows", "actionlint", "-shellcheck", tool_path("shellcheck") or ""),
    command("workflows: security", "zizmor", "--offline", ".github"),
    command("scripts", "shellcheck", "docs/deploy/try-image.sh"),
    Check("forms, citation and Compose file", ("check-jsonschema",), _forms),
    command("Dockerfile", "hadolint", "docs/deploy/Dockerfile"),
    Check("chart: Helm's lint and values", (), chart.problems),
    Check("chart: schemas of Kubernetes", ("kubernetes-validate",), _schemas),
    Check("chart: helm lint", ("helm",), _helm_lint),
    Check("chart: kubeconform", ("kubeconform",), _kubeconform),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks, print the report and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="run the check of this name"
    )
    chosen = parser.parse_args(arguments).only
    names = [check.name for check in CHECKS]
    unknown = sorted(set(chosen or ()) - set(names))
    if unknown:
        parser.error(f"no check is named {unknown[0]!r}; the names are {', '.join(names)}")
    unavailable = unavailable_tools()
    is_good = True
    for check in CHECKS:
        if chosen and check.name not in chosen:
            continue
        outcome = run_check(check, unavailable)
        is_good = is_good and outcome.is_good
        print(f"{outcome.state:<12} {check.name}", flush=True)
        for line in outcome.lines:
            print(f"             {line}", flush=True)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
