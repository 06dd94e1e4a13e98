"""Comparison of the project's version with the other places that state it, and with a tag.

python -m release.version            check the changelog, the chart and other places
python -m release.version TAG        also check that TAG is "v" and the version, and that
                                     no page says that the version is not released yet

The exit code is 1 if anything differs. The release workflow runs it before it publishes.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

__all__ = ["main", "problems", "project_version"]

ROOT = Path(__file__).parents[1]
_PROJECT = "pyproject.toml"
# Other files that state the version, and a pattern that finds it. Files need not exist.
_PLACES = {
    "CHANGELOG.md": r"^## \[([^\]]+)\]",
    "CITATION.cff": r'^version: *["\']?([^"\'\s]+)',
    "docs/deploy/helm/kvboost-edge/Chart.yaml": r"^appVersion: (\S+)",
    "docs/deploy/kubernetes/serving-runtime.yaml": r"image: \S+/kvboost-edge:(\S+)",
    "docs/how-to/docker.md": r"-t \S+/kvboost-edge:(\S+)",
    "cuda_ext/pyproject.toml": r'^version = "([^"]+)"',
}
_HEADING = re.compile(r"^## \[[^\]]+\](.*)", flags=re.MULTILINE)
_NOT_PUBLISHED = re.compile(r"not\s+on\s+PyPI\s+yet")


def project_version(root: Path = ROOT) -> str:
    """Return the version in pyproject.toml."""
    text = (root / _PROJECT).read_text(encoding="utf-8")
    return str(tomllib.loads(text)["project"]["version"])


def problems(root: Path = ROOT, tag: str | None = None) -> list[str]:
    """Return a line for each place, and for the tag, that states another version.

    With a tag, also return a line for each page that says that this version is not released yet.
    """
    version = project_version(root)
    found = []
    for name, pattern in _PLACES.items():
        path = root / name
        if not path.is_file():
            continue
        stated = re.search(pattern, path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        if stated is None or stated[1] != version:
            other = "no version" if stated is None else f"version {stated[1]}"
            found.append(f"{name} states {other}; {_PROJECT} states {version}")
    if tag is not None and tag.removeprefix("refs/tags/") != f"v{version}":
        found.append(f"the tag is {tag}; {_PROJECT} states {version}, so tag it v{version}")
    return found if tag is None else found + _unreleased(root)


def _unreleased(root: Path) -> list[str]:
    found = []
    changelog = root / "CHANGELOG.md"
    if changelog.is_file():
        heading = _HEADING.search(changelog.read_text(encoding="utf-8"))
        if heading is None or not re.fullmatch(r" - \d{4}-\d{2}-\d{2}", heading[1]):
            stated = "no version" if heading is None else f"{heading[0]!r}"
            found.append(f"CHANGELOG.md begins with {stated}; end the heading with the date")
    for path in (root / "README.md", *sorted((root / "docs").rglob("*.md"))):
        if path.is_file() and _NOT_PUBLISHED.search(path.read_text(encoding="utf-8")):
            name = path.relative_to(root).as_posix()
            found.append(f"{name} says that the package is not on PyPI yet; remove the sentence")
    return found


def main(arguments: list[str]) -> int:
    """Print the problems and return the exit code."""
    if len(arguments) > 1 or any(one.startswith("-") for one in arguments):
        raise SystemExit(__doc__)
    found = problems(tag=arguments[0] if arguments else None)
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
