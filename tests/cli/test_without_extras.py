"""Tests that the bundled model and the commands run without the packages of any extra."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvboost_edge.errors import install_extra

ROOT = Path(__file__).parents[2]

SCRIPT = '''
import builtins, io, sys

HIDDEN = {"torch", "transformers", "fastapi", "llguidance", "prometheus_client", "uvicorn"}

class Hiding:
    """A finder that does not find the packages of extras, as where none is installed."""
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        is_hidden = name.partition(".")[0] in HIDDEN
        return None if is_hidden else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Hiding, sys.meta_path)
find = builtins.__import__

def find_other(name, globals=None, *args, **others):
    """Import a module, but pydantic only for typer, whose older versions do not need it."""
    importer = (globals or {}).get("__name__", "")
    if name.partition(".")[0] == "pydantic" and importer.startswith("kvboost_edge."):
        raise ModuleNotFoundError(f"No module named {name!r}")
    return find(name, globals, *args, **others)

builtins.__import__ = find_other
sys.stdin = io.StringIO("What is the metal of Worr camera?\\n/stats\\n/quit\\n")
from kvboost_edge.cli.app import run

small = ["-o", "num_blocks=64"]
for argv in (
    ["doctor"],
    ["inspect", "kvboost-edge/demo"],
    ["generate", "Hello!", "--chat", "-n", "8", *small],
    ["generate", "Hello!", "-n", "8", "--kv-cache-bits", "8,4", *small],
    ["generate", "Hello!", "-n", "8", "--json", "-s", "logprobs=2", *small],
    ["chat", "-n", "8", *small],
    ["demo"],
    ["eval", "LICENSE", "--window", "64", "--against", "weights=int4", *small],
    ["warmup", "-o", "weights=int8", "--kv-cache-bits", "16"],
):
    print("==", argv[0], flush=True)
    assert run(argv) == 0, argv
assert not HIDDEN & set(sys.modules)
assert run(["generate", "Hello!", "-o", "runner=torch"]) == 1
'''


@pytest.mark.slow
def test_every_command_runs_without_extras():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    sections = dict(part.split("\n", 1) for part in done.stdout.split("== ")[1:])
    assert list(sections) == ["doctor", "inspect", "generate", "chat", "demo", "eval", "warmup"]
    assert "native" in sections["doctor"]
    assert install_extra("torch") in " ".join(sections["doctor"].replace("│", " ").split())
    assert "native" in sections["inspect"]
    assert "from the cache" in sections["chat"]
    assert "the same tokens" in sections["demo"]
    assert "perplexity" in sections["eval"]
    assert "compiled kernels are in" in " ".join(sections["warmup"].split())
    assert "8 of 8 answers correct" in sections["demo"]
    assert (
        f"needs torch, which is not installed; install the extra: {install_extra('torch')}"
        in done.stderr
    )
    assert "Traceback" not in done.stderr
