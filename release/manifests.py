"""Manifests for Homebrew and winget, written from templates and from the files of a release.

python -m release.manifests URL [--dist DIR]

URL is the address of the folder that the files of the release are downloaded from. The manifests
are written next to the files. None of them has been tested, because there was no macOS or Windows.
The winget manifests need `kvboost-edge-VERSION-windows-x64.zip` (release/README.md).
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from release.version import project_version

__all__ = ["main", "written"]

_HERE = Path(__file__).parent
_PLACE = re.compile(r"@([A-Z0-9_]+)@")


def written(url: str, dist: Path, version: str) -> list[Path]:
    """Write the manifests that the files in `dist` allow, and return their paths.

    Raises:
        ValueError: the address is not an HTTPS address.
        FileNotFoundError: `dist` lacks the sdist.
    """
    if not re.fullmatch(r"https://[^\s\"@]+[^\s\"@/]", url):
        raise ValueError(
            f"{url!r} is not an address of a release; write https://HOST/PATH without a final slash"
        )
    files = {
        "SDIST": dist / f"kvboost_edge-{version}.tar.gz",
        "ZIP": dist / f"kvboost-edge-{version}-windows-x64.zip",
    }
    if not files["SDIST"].is_file():
        raise FileNotFoundError(f"{files['SDIST']} does not exist: run make release-check")
    values = {"URL": url, "VERSION": version}
    for name, path in files.items():
        if path.is_file():
            values[name] = path.name
            values[f"{name}_SHA256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    paths = []
    for template in sorted(_HERE.glob("*/*.in")):
        text = template.read_text(encoding="utf-8")
        needed = set(_PLACE.findall(text))
        is_winget = template.parent.name == "winget"
        if not needed <= values.keys() or (is_winget and "ZIP" not in values):
            continue
        path = dist / template.parent.name / template.name.removesuffix(".in")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_PLACE.sub(lambda found: values[found[1]], text), encoding="utf-8")
        paths.append(path)
    return paths


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the manifests, print their paths and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", metavar="URL", help="folder that the files are downloaded from")
    parser.add_argument(
        "--dist",
        type=Path,
        default=_HERE.parent / "dist",
        help="folder of the files (default: dist)",
    )
    options = parser.parse_args(arguments)
    try:
        paths = written(options.url, options.dist, project_version())
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    for path in paths:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
