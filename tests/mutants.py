"""The mutation gate, `make mutants`: plant faults one at a time; the tests must fail on each.

The gate finds tests that cannot fail. A fault is one or more replacements in one file of a copy of
the source tree, together with the tests that must notice it. The faults are defined in
tests/faults. The gate fails in these cases:

- A fault survives.
- The text that a fault replaces is missing from the file.
- Neither `make test` nor `make test-all` runs a test that a fault names.
- The tests fail without a fault.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

from faults import FAULTS, Fault

ROOT = Path(__file__).parents[1]
MODELS = Path("build", "test-models")  # the tests' tiny models, see tests/helpers/models/built.py
TIMEOUT_S = 900  # for the tests that one fault names
UNCHANGED_TIMEOUT_S = 3600  # for all of them together, on a busy machine
# Exit statuses of pytest. Any other status means that the tests did not run.
PASSED = 0
FAILED = 1
NOTHING = 5
SURVIVED = "SURVIVED"
NOT_SEEN = "TESTS DID NOT RUN: no case is collected"
# Markers of the cases that each target of the Makefile runs.
TARGETS = {"make test": "not full and not cluster", "make test-all": "full or cluster"}
FIRST = next(iter(TARGETS))
# Markers of the cases that are run to notice a fault, in this order, and the verdict if they do.
# Cases marked `alone` measure time. They run after all other jobs, which would distort their times.
PASSES = {
    f"({TARGETS[FIRST]}) and not alone": "killed",
    f"({TARGETS[FIRST]}) and alone": "killed by cases marked alone",
    TARGETS["make test-all"]: "killed by `make test-all` alone",
}
BESIDE = next(iter(PASSES))


def planted(text: str, fault: Fault) -> str:
    """Return the file's text with the fault; raise ValueError unless each `old` occurs once."""
    for old, new in fault.edits:
        if text.count(old) != 1:
            raise ValueError(f"{fault.file} holds {text.count(old)} times, not once: {old!r}")
        text = text.replace(old, new)
    return text


@contextmanager
def changed(path: Path, text: str) -> Iterator[None]:
    """Replace a file's text while the block runs, then restore the text and the file's times.

    The times are restored because the validity of compiled kernels depends on them.
    """
    original = path.read_text(encoding="utf-8")
    stat = path.stat()
    path.write_text(text, encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(original, encoding="utf-8")
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def pytest_in(tree: Path, *arguments: str, timeout: float = TIMEOUT_S) -> tuple[int | None, str]:
    """Run pytest in one process on the package in the tree.

    Returns:
        The exit status, or None after a timeout, and the output.
    """
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        # The import of Schemathesis takes a second.
        *([] if any("schemathesis" in one for one in arguments) else ["-p", "no:schemathesis"]),
        *arguments,
    ]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    try:
        done = subprocess.run(
            command,
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, f"pytest did not end within {timeout} s"
    return done.returncode, done.stdout + done.stderr


def run_tests(
    tree: Path, tests: Sequence[str], markers: str, timeout: float = TIMEOUT_S
) -> tuple[int | None, str]:
    """Run the cases with these markers up to the first failure; return status and end of output."""
    status, output = pytest_in(tree, "-x", "-m", markers, *tests, timeout=timeout)
    return status, output[-3000:]


def is_of(case: str, test: str) -> bool:
    """Return whether a case belongs to a test; the test is a folder, a file, a function or a case."""
    return case == test or case.startswith((f"{test}/", f"{test}::", f"{test}["))


def collected(tests: Sequence[str], markers: str) -> list[str]:
    """Return the ids of the cases with these markers; raise RuntimeError if pytest fails."""
    status, output = pytest_in(ROOT, "--collect-only", "-m", markers, *tests)
    if status not in (PASSED, NOTHING):
        raise RuntimeError(output[-3000:])
    return [line for line in output.splitlines() if line.startswith("tests/") and "::" in line]


def targets_of(tests: Iterable[str]) -> dict[str, list[str]]:
    """Return, for each test, the targets of the Makefile that run a case of it, in order."""
    named = sorted(set(tests))
    cases = {target: collected(named, markers) for target, markers in TARGETS.items()}

    def runs(target: str, test: str) -> bool:
        return any(is_of(case, test) for case in cases[target])

    return {test: [target for target in TARGETS if runs(target, test)] for test in named}


def copied_tree(parent: Path) -> Path:
    """Copy the files that the tests need, including the files' times; return the path of the copy."""
    tree = Path(tempfile.mkdtemp(dir=parent)) / "tree"
    left_out = (".git", ".venv*", ".redis", ".hypothesis", ".*_cache", "*.egg-info", "*-Q*.gguf")
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*left_out, "build"))
    if (ROOT / MODELS).is_dir():  # 400 MB that are only read; new files stay in the copy
        unfinished = shutil.ignore_patterns("new-*")
        shutil.copytree(ROOT / MODELS, tree / MODELS, ignore=unfinished, copy_function=_link)
    if (ROOT / ".redis").is_dir():  # the Redis server that tests start
        (tree / ".redis").symlink_to(ROOT / ".redis")
    done = subprocess.run(
        [sys.executable, "-c", "import kvboost_edge; print(kvboost_edge.__file__)"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        check=True,
    )
    if not Path(done.stdout.strip()).is_relative_to(tree):
        raise RuntimeError(f"the tests would import {done.stdout.strip()}, not the copy in {tree}")
    return tree


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def try_fault(tree: Path, fault: Fault, passes: Iterable[str] = tuple(PASSES)) -> str:
    """Plant a fault, run its tests and remove it; return the verdict.

    The verdict starts with "killed" if a test failed, and otherwise states the problem.
    """
    path = tree / fault.file
    ran = False
    try:
        broken = planted(path.read_text(encoding="utf-8"), fault)
    except ValueError as error:
        return f"NOT PLANTED: {error}"
    for markers in passes:
        with changed(path, broken):
            status, output = run_tests(tree, fault.tests, markers)
        if status in (FAILED, None):
            if markers != BESIDE:  # these cases have not yet run without a fault
                status, output = run_tests(tree, fault.tests, markers)
                if status != PASSED:
                    return _not_run(status, output)
            return PASSES[markers]
        if status not in (PASSED, NOTHING):
            return _not_run(status, output)
        ran |= status == PASSED
    return SURVIVED if ran else NOT_SEEN


def _not_run(status: int | None, output: str) -> str:
    return f"TESTS DID NOT RUN (status {status})\n{output}"


def unchanged_failure(trees: Sequence[Path], tests: Iterable[str]) -> str:
    """Run the tests without a fault, split over the trees; return the failures, or ""."""
    named = sorted(set(tests))
    apart = [one for one in named if not any(is_of(one, other) for other in named if other != one)]
    files = sorted({test.partition("::")[0] for test in apart})
    parts = [
        [test for test in apart if test.partition("::")[0] in files[number :: len(trees)]]
        for number in range(len(trees))
    ]
    chosen = [(tree, part) for tree, part in zip(trees, parts, strict=True) if part]
    with ThreadPoolExecutor(len(trees)) as pool:
        results = pool.map(lambda one: run_tests(*one, BESIDE, UNCHANGED_TIMEOUT_S), chosen)
        return "\n".join(output for status, output in results if status not in (PASSED, NOTHING))


def try_all(trees: Sequence[Path], faults: Sequence[Fault]) -> Iterator[tuple[Fault, float, str]]:
    """Try faults, one per tree at a time; yield each with its duration in seconds and its verdict.

    A fault that survives is tried again at the end, alone, with the other cases of its tests.
    """
    free: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for tree in trees:
        free.put(tree)

    def tried(fault: Fault, passes: Iterable[str]) -> tuple[Fault, float, str]:
        tree = free.get()
        started = time.monotonic()
        try:
            verdict = try_fault(tree, fault, passes)
            return fault, time.monotonic() - started, verdict
        finally:
            free.put(tree)

    left: list[tuple[Fault, float, str]] = []
    pool = ThreadPoolExecutor(len(trees))
    try:
        for done in as_completed([pool.submit(tried, fault, (BESIDE,)) for fault in faults]):
            if done.result()[-1] in (SURVIVED, NOT_SEEN):
                left.append(done.result())
            else:
                yield done.result()
    finally:
        pool.shutdown(cancel_futures=True)
    for fault, before, verdict in left:
        _, seconds, again = tried(fault, tuple(PASSES)[1:])
        yield fault, before + seconds, verdict if again == NOT_SEEN else again


def show(faults: Sequence[Fault], targets: Mapping[str, Sequence[str]]) -> None:
    """Print each fault with its file, its tests and the targets that run them."""
    for fault in faults:
        print(f"{fault.name}\n    {fault.file}")
        for test in fault.tests:
            print(f"    {test} ({', '.join(targets[test])})")


def show_targets(faults: Sequence[Fault], targets: Mapping[str, Sequence[str]]) -> None:
    """Print how many faults `make test` can notice, and the names of the others."""
    later = [f.name for f in faults if not any(FIRST in targets[test] for test in f.tests)]
    print(f"{FIRST}: runs tests of {len(faults) - len(later)} of {len(faults)} faults")
    for target in list(TARGETS)[1:]:
        print("\n    ".join([f"{target} alone: {len(later)}", *later]), flush=True)


def main() -> int:
    """Run the gate; return 0 if every fault was found, otherwise 1."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument(
        "words", nargs="*", help="try only faults whose name contains one of these words"
    )
    parser.add_argument(
        "--jobs", type=int, default=2, help="number of faults tried at a time (default: 2)"
    )
    parser.add_argument(
        "--list", action="store_true", help="print the faults and their tests without trying them"
    )
    options = parser.parse_args()
    words = options.words or [""]
    chosen = [f for f in FAULTS if any(word in f.name for word in words)]
    if not chosen or options.jobs < 1:
        parser.error(
            "no fault's name contains one of these words"
            if not chosen
            else "--jobs must be at least 1"
        )
    tests = [test for f in chosen for test in f.tests]
    try:
        targets = targets_of(tests)
    except RuntimeError as error:
        print(f"the tests that the faults name cannot be collected:\n{error}")
        return 1
    for test in (lost := [test for test, found in targets.items() if not found]):
        print(f"neither {' nor '.join(TARGETS)} runs {test}")
    if lost:
        return 1
    if options.list:
        show(chosen, targets)
    show_targets(chosen, targets)
    return 0 if options.list else _gate(chosen, tests, min(options.jobs, len(chosen)))


def _gate(chosen: Sequence[Fault], tests: Sequence[str], num_jobs: int) -> int:
    found = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        trees = [copied_tree(Path(directory)) for _ in range(num_jobs)]
        if failure := unchanged_failure(trees, tests):
            print(f"the unchanged tests do not pass:\n{failure}")
            return 1
        width = max(len(f.name) for f in chosen)
        for fault, seconds, verdict in try_all(trees, chosen):
            found += verdict.startswith("killed")
            print(f"{fault.name:<{width}}  {seconds:6.1f} s  {verdict}", flush=True)
    print(f"{found} of {len(chosen)} faults found")
    return 0 if found == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
