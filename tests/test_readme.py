"""Tests of the README and the documentation: snippets run; named files, targets and commands exist."""

import os
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

from kvboost_edge.config import EngineConfig
from kvboost_edge.errors import install_extra
from kvboost_edge.models.config.architectures import SUPPORTED_ARCHITECTURES
from kvboost_edge.options import options_of
from kvboost_edge.server.settings import ServerSettings

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [
    ROOT / name
    for name in (
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "benchmarks/LOG.md",
        "examples/README.md",
    )
]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PYTHON = re.compile(r"^( *)```python\n(.*?)^\1```", flags=re.DOTALL | re.MULTILINE)
GUIDES = [
    page.relative_to(ROOT).as_posix()
    for folder in ("explanation", "how-to")
    for page in sorted((ROOT / "docs" / folder).glob("*.md"))
    if PYTHON.search(page.read_text(encoding="utf-8"))
]
SNIPPETS = {
    name: [
        textwrap.dedent(code)
        for _, code in PYTHON.findall((ROOT / name).read_text(encoding="utf-8"))
    ]
    for name in (
        "README.md",
        "docs/python.md",
        "docs/structured.md",
        *GUIDES,
    )
}


FEATURES = """
    prefix caching, persistent KV cache, speculative decoding, structured output, tool calling,
    embeddings, reranking, hybrid models, multi-model serving, replicas, cache-miss reports,
    KV cache quantization, non-prefix KV reuse, chunked prefill, continuous batching,
    paged attention, copy-on-write, mixture of experts, GGUF, OpenAI-compatible, KV offloading,
    weight quantization, logprobs, fill-in-the-middle, FIM, infill, Docker, Kubernetes, Prometheus,
    metrics, multimodal, vision models, beam search
"""


@pytest.mark.parametrize(
    "feature", [name.strip() for name in FEATURES.replace("\n", " ").split(",")]
)
def test_a_feature_is_found_by_its_standard_name(feature):
    assert feature.lower() in README.replace("\n", " ").lower()


@pytest.mark.parametrize("page", SNIPPETS)
def test_snippets_run_in_order(page, tmp_path):
    """A page's snippets run in one process, since later ones use names of earlier ones. Snippets
    that print show output.
    """
    snippets = SNIPPETS[page]
    script = tmp_path / "snippets.py"
    script.write_text("print('---')\n".join(snippets), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shown = done.stdout.split("---\n")
    assert len(shown) == len(snippets) >= 1
    silent = [code for code, text in zip(snippets, shown, strict=True) if not text.strip()]
    assert not [code for code in silent if page not in GUIDES or "print(" in code]


def test_the_table_of_families_equals_the_code():
    table = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", table, flags=re.MULTILINE)
    said = {
        name: tuple(cells.split(" | ")) for name, cells in rows if name in SUPPORTED_ARCHITECTURES
    }
    assert said == {
        name: (known.note, ", ".join(known.runners), ", ".join(known.files), known.proof)
        for name, known in SUPPORTED_ARCHITECTURES.items()
        if known.tested
    }
    assert [name for name, _ in rows if name in said] == sorted(said)


def test_named_files_exist():
    pages = [*PAGES[:2], *(page for page in PAGES if page.parent.name in ("how-to", "tutorial"))]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    path = r"`((?:kvboost_edge|tests|benchmarks|examples|training|docs)/[\w./-]*)`"
    named = set(re.findall(path, "\n".join(texts)))
    assert named
    missing = [name for name in sorted(named) if not (ROOT / name).exists()]
    assert not missing, missing


def test_named_make_targets_exist():
    texts = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    targets = set(re.findall(r"(?:^|`)make ([a-z][a-z0-9-]*)", texts, flags=re.MULTILINE))
    assert targets >= {"demo", "test"}
    defined = set(re.findall(r"^([a-z][a-z0-9-]*):", MAKEFILE, flags=re.MULTILINE))
    assert targets <= defined, targets - defined


def test_setup_shows_its_progress():
    for target in ("setup", "demo"):
        done = subprocess.run(
            ["make", "-n", target, "VENV=no-such-directory"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        installs = [line for line in done.stdout.splitlines() if " -m pip install " in line]
        assert installs
        assert not [line for line in installs if "--quiet" in line]
        assert done.stdout.count('echo "Installing') == len(installs)


def test_extras_are_added_by_name():
    """Messages and pages show the command of `install_extra` with existing extras and the current
    version. No other module spells out `pip install` for an extra.
    """
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = set(extras["optional-dependencies"])
    command = re.compile(re.escape(install_extra("?")).replace("\\?", "(.*?)"))
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    shown = [extra for text in texts for extra in command.findall(text)]
    assert len(shown) >= 5
    assert {one for extra in shown for one in extra.split(",")} <= names

    wheels = {name for text in texts for name in re.findall(r"kvboost_edge-[\w.]+-py3[\w-]*", text)}
    assert wheels == {f"kvboost_edge-{extras['version']}-py3-none-any"}
    sources = [path for path in (ROOT / "kvboost_edge").rglob("*.py") if path.name != "errors.py"]
    said = [line for path in sources for line in re.findall(r".*pip install.*", path.read_text())]
    others = ("./cuda_ext", "ziglang")  # packages that are not extras
    assert all(any(package in line for package in others) for line in said), said


def test_all_is_every_extra_for_users():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    [joined] = extras["all"]
    parts = set(re.fullmatch(r"kvboost-edge\[(.*)\]", joined)[1].split(","))
    assert parts == set(extras) - {"all", "bench", "dev", "docs"}
    guide = (ROOT / "docs" / "how-to" / "install.md").read_text(encoding="utf-8")
    section = guide.split("\n## Extras\n")[1].split("\n## ")[0]
    # `cuda` is another name of `torch`.
    assert set(re.findall(r"^\| `(\w+)`", section, re.MULTILINE)) == parts - {"cuda"} | {"all"}


def test_deprecated_flags_are_announced():
    """The changelog and the policy name each option whose help says that it is deprecated."""
    declared = {**options_of(EngineConfig), **options_of(ServerSettings)}
    deprecated = {
        f"--{name.replace('_', '-')}"
        for name, one in declared.items()
        if one.help.startswith("Deprecated")
    }
    for page, heading in (
        (ROOT / "CHANGELOG.md", "### Deprecated"),
        (ROOT / "docs" / "reference" / "versions.md", "## Deprecation"),
    ):
        section = page.read_text(encoding="utf-8").split(f"\n{heading}\n")[1].split("\n## ")[0]
        assert deprecated <= set(re.findall(r"--[a-z-]+", section))


def test_named_commands_exist():
    from kvboost_edge.cli.app import app

    known = {
        info.name or info.callback.__name__
        for info in app.registered_commands
        if info.callback is not None
    }
    texts = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = set(re.findall(r"(?:^|`)kvboost-edge ([a-z]+(?:-[a-z]+)*)", texts, flags=re.MULTILINE))
    assert {"serve", "chat"} <= named <= known


def _anchors(page):
    """Return the anchors of a page: its headings in GitHub's spelling and its `<a id>` tags."""
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return anchors | set(re.findall(r'<a id="([^"]+)">', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_have_targets(page):
    for path, anchor in re.findall(
        r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")
    ):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in _anchors(target), f"{path}#{anchor}"


def test_readme_has_curl_examples():
    """The README has at least four curl examples. tests/server/test_readme_curl.py runs them."""
    assert len(re.findall(r"^curl ", README, flags=re.MULTILINE)) >= 4
