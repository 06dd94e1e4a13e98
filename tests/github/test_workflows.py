"""The workflows and forms of the repository: they name what exists, and hold few permissions."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github"


def read(path):
    # "on" is a boolean in YAML 1.1.
    return yaml.safe_load(re.sub(r"^on:", '"on":', path.read_text(encoding="utf-8"), flags=re.M))


WORKFLOWS = {path.stem: read(path) for path in sorted((FOLDER / "workflows").glob("*.yml"))}
JOBS = [(name, job) for name, workflow in WORKFLOWS.items() for job in workflow["jobs"]]
CALLED = "$/.github/workflows/"
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
FORMS = sorted((FOLDER / "ISSUE_TEMPLATE").glob("*.yml"))
# Jobs that may write something, and what.
WRITES = {
    ("codeql", "analyze"): {"security-events"},
    ("container", "push"): {"packages"},
    ("container", "publish"): {"attestations", "id-token", "packages"},
    ("release", "attest"): {"attestations", "id-token"},
    ("release", "github-release"): {"contents"},
    ("release", "image"): {"attestations", "id-token", "packages"},
    ("release", "publish"): {"id-token"},
}
PINNED = re.compile(r"uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$")


def steps(name, job):
    return WORKFLOWS[name]["jobs"][job].get("steps", ())  # none if it calls a workflow


RUNS = [step["run"] for name, job in JOBS for step in steps(name, job) if "run" in step]
WORDS = [
    shlex.split(line, comments=True)
    for run in RUNS
    for line in run.replace("\\\n", " ").splitlines()
    if "$(" not in line and line.count("'") % 2 == 0 and line.count('"') % 2 == 0
]


def test_the_expected_workflows_exist():
    expected = {"audit", "ci", "codeql", "container", "docs", "lint", "nightly", "release"}
    assert set(WORKFLOWS) == expected


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_only_reads_unless_a_job_says_more(name):
    assert WORKFLOWS[name]["permissions"] == {"contents": "read"}
    assert "cancel-in-progress" in WORKFLOWS[name]["concurrency"]


def test_few_jobs_may_write():
    writes = {
        (name, job): {
            scope
            for scope, right in WORKFLOWS[name]["jobs"][job].get("permissions", {}).items()
            if right == "write"
        }
        for name, job in JOBS
    }
    assert {key: scopes for key, scopes in writes.items() if scopes} == WRITES


@pytest.mark.parametrize(("name", "job"), JOBS)
def test_every_job_ends(name, job):
    found = WORKFLOWS[name]["jobs"][job]
    assert found.get("timeout-minutes", 361) <= 360 or found["uses"].startswith(CALLED)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_actions_are_pinned_by_commit(name):
    text = (FOLDER / "workflows" / f"{name}.yml").read_text(encoding="utf-8")
    used = [line.strip().removeprefix("- ") for line in text.splitlines() if "uses:" in line]
    used = [line for line in used if not line.startswith(f"uses: {CALLED}")]
    assert used
    assert [line for line in used if not PINNED.fullmatch(line)] == []


def test_one_action_has_one_version():
    """Two commits of one action in one repository would hide which of them is newer."""
    used = {}
    for name, job in JOBS:
        for step in steps(name, job):
            action, _, commit = step.get("uses", "").partition("@")
            used.setdefault(action, set()).add(commit)
    assert {action: commits for action, commits in used.items() if len(commits) > 1} == {}


@pytest.mark.parametrize(("name", "job"), JOBS)
def test_a_checkout_leaves_no_token_behind(name, job):
    for step in steps(name, job):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


def test_make_targets_exist():
    called = {word for words in WORDS if "make" in words[:2] for word in words if word in TARGETS}
    named = {
        word
        for words in WORDS
        if "make" in words[:2]
        for word in words[words.index("make") + 1 :]
        if not word.startswith("-") and "=" not in word
    }
    assert named == called
    assert {"docs", "lint", "release-check", "setup", "test", "test-all", "test-arm64"} <= called


def test_files_and_modules_exist():
    for words in WORDS:
        if words and "/" in words[0] and not words[0].startswith((".venv", "/")):
            assert (ROOT / words[0]).stat().st_mode & 0o111, words[0]
        if words[:2] == ["python", "-m"] and "." in words[2]:
            assert (ROOT / words[2].replace(".", "/")).with_suffix(".py").is_file()
    for name, job in JOBS:
        for step in steps(name, job):
            given = step.get("with", {})
            for key in ("cache-dependency-path", "file"):
                assert (ROOT / given.get(key, ".")).exists()


def test_the_tests_run_on_every_supported_python():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    supported = {
        one.rpartition(" ")[2]
        for one in project["classifiers"]
        if re.search(r"Python :: 3\.\d+$", one)
    }
    for job in ("linux", "unproven"):
        assert set(WORKFLOWS["ci"]["jobs"][job]["strategy"]["matrix"]["python"]) == supported


def test_platforms_that_never_ran_may_fail():
    jobs = WORKFLOWS["ci"]["jobs"]
    assert {job for job in jobs if jobs[job].get("continue-on-error")} == {"unproven"}
    runners = jobs["unproven"]["strategy"]["matrix"]["runner"]
    assert {one.partition("-")[0] for one in runners} == {"macos", "windows"}
    assert set(jobs["linux"]["strategy"]["matrix"]["runner"]) == {
        "ubuntu-24.04",
        "ubuntu-24.04-arm",
    }


def test_the_unproven_platforms_run_the_tests_of_make_test():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    [body] = re.findall(r"^test: .*\n((?:\t.*\n)+)", makefile, re.M)
    marks = re.findall(r'-m "([^"]+)"', body)
    runs = [step.get("run", "") for step in steps("ci", "unproven")]
    assert re.findall(r'pytest .*-m "([^"]+)"', "\n".join(runs)) == marks


def needed_by(name, job):
    """Return the jobs that end before this one begins."""
    direct = WORKFLOWS[name]["jobs"][job].get("needs", [])
    direct = [direct] if isinstance(direct, str) else direct
    return set(direct).union(*(needed_by(name, one) for one in direct))


@pytest.mark.parametrize(("name", "job"), [key for key in WRITES if key[0] != "codeql"])
def test_nothing_is_published_under_a_tag_that_differs_from_the_version(name, job):
    jobs = {job} | needed_by(name, job)
    runs = [step.get("run") for one in jobs for step in steps(name, one)]
    assert 'python -m release.version "$GITHUB_REF_NAME"' in runs


def test_only_tags_start_a_release():
    assert WORKFLOWS["release"]["on"] == {"push": {"tags": ["v*"]}}
    assert WORKFLOWS["container"]["jobs"]["push"]["if"] == "github.ref_type == 'tag'"


def test_an_image_is_published_only_after_the_checks_of_the_release():
    container = WORKFLOWS["container"]
    assert container["on"]["push"] == {"branches": ["main"]}
    assert "workflow_call" in container["on"]
    # A called workflow with the caller's group would wait for the caller, which waits for it.
    assert "github.workflow" not in container["concurrency"]["group"]
    image = WORKFLOWS["release"]["jobs"]["image"]
    assert image["uses"] == f"{CALLED}container.yml"
    assert "make release-check" in [step.get("run") for step in steps("release", image["needs"])]


def test_inputs_of_others_reach_no_shell():
    """An expression inside a script would be run as part of it."""
    assert [run for run in RUNS if "${{" in run] == []


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_asks_for_what_it_needs(path):
    form = read(path)
    if path.stem == "config":
        return
    assert form["name"]
    assert form["description"]
    fields = [one for one in form["body"] if one["type"] != "markdown"]
    ids = [one["id"] for one in fields]
    assert len(ids) == len(set(ids))
    assert any(one.get("validations", {}).get("required") for one in fields)


def test_dependabot_watches_files_that_exist():
    files = {
        "docker": {"Dockerfile"},
        "docker-compose": {"compose.yaml"},
        "github-actions": {".github/workflows"},
        "pip": {"constraints.txt", "requirements.txt"},
    }
    updates = read(FOLDER / "dependabot.yml")["updates"]
    assert {one["package-ecosystem"] for one in updates} == set(files)
    for one in updates:
        for directory in one.get("directories") or [one["directory"]]:
            folder = ROOT / directory.strip("/")
            assert any((folder / name).exists() for name in files[one["package-ecosystem"]])


def test_the_contributing_guide_lists_every_workflow():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    _, _, section = text.partition("\n## Workflows\n")
    rows = set(re.findall(r"^\| `(\w+)\.yml` \|", section, re.M))
    assert rows == set(WORKFLOWS)


def test_the_citation_names_no_person():
    citation = read(ROOT / "CITATION.cff")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert [one["name"] for one in citation["authors"]] == [
        one["name"] for one in project["authors"]
    ]
    assert citation["license"] == project["license"]
    assert citation["cff-version"] == "1.2.0"
