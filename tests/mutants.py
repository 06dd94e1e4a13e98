"""The mutation gate, `make mutants`: plants one fault at a time in a copy of the tree; the tests must turn red.

It guards against tests that cannot fail. A fault is one or more replacements in one file, and the tests that have to
notice it. The gate fails if a fault survives, if its text is no longer in the file, or if the unchanged tests fail.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from faults import FAULTS, Fault

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 900
PASSED, FAILED = 0, 1  # what pytest returns; anything else means that the tests did not run


def planted(text: str, fault: Fault) -> str:
    """The file's text with the fault in it; ValueError unless each `old` is there exactly once."""
    for old, new in fault.edits:
        if text.count(old) != 1:
            raise ValueError(f"{fault.file} holds {text.count(old)} times, not once: {old!r}")
        text = text.replace(old, new)
    return text


def run_tests(tree: Path, tests: Sequence[str]) -> tuple[int | None, str]:
    """pytest's exit status (None: it hung) and the end of its output. The copy of the package is the one imported."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None, f"no end after {TIMEOUT_S} s"
    return done.returncode, (done.stdout + done.stderr)[-3000:]


def copied_tree(parent: Path) -> Path:
    """A copy of what the tests need, with modification times kept, so that compiled kernels stay valid."""
    tree = parent / "tree"
    ignored = shutil.ignore_patterns(".git", ".venv*", ".redis", ".hypothesis", ".*_cache", "*.egg-info", "*-Q*.gguf")
    shutil.copytree(ROOT, tree, ignore=ignored)
    done = subprocess.run(
        [sys.executable, "-c", "import kvboost_edge; print(kvboost_edge.__file__)"],
        cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    if not Path(done.stdout.strip()).is_relative_to(tree):
        raise RuntimeError(f"the tests would import {done.stdout.strip()}, not the copy in {tree}")
    return tree


def try_fault(tree: Path, fault: Fault) -> str:
    """Plant, test, take back. Returns "killed" or what is wrong."""
    path = tree / fault.file
    original, stat = path.read_text(encoding="utf-8"), path.stat()
    try:
        path.write_text(planted(original, fault), encoding="utf-8")
    except ValueError as error:
        return f"NOT PLANTED: {error}"
    try:
        status, output = run_tests(tree, fault.tests)
    finally:
        path.write_text(original, encoding="utf-8")
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    if status in (FAILED, None):
        return "killed"
    return "SURVIVED" if status == PASSED else f"TESTS DID NOT RUN (status {status})\n{output}"


def main() -> int:
    """Run the gate; 0 if every fault was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only faults whose name contains one of these")
    words = parser.parse_args().words
    chosen = [f for f in FAULTS if not words or any(word in f.name for word in words)]
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        tree = copied_tree(Path(directory))
        selection = sorted({test for f in chosen for test in f.tests})
        status, output = run_tests(tree, selection)
        if status != PASSED:
            print(f"the unchanged tests do not pass:\n{output}")
            return 1
        width = max(len(f.name) for f in chosen)
        for chosen_fault in chosen:
            started = time.monotonic()
            verdict = try_fault(tree, chosen_fault)
            verdicts.append(verdict)
            print(f"{chosen_fault.name:<{width}}  {time.monotonic() - started:6.1f} s  {verdict}", flush=True)
    found = verdicts.count("killed")
    print(f"{found} of {len(chosen)} faults found")
    return 0 if found == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
