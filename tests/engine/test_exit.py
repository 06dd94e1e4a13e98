"""A program may end without closing its engine, idle or during a request."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "last_line",
    [
        pytest.param("", marks=pytest.mark.full),
        "handle = engine.submit([7, 8, 9], max_new_tokens=400, ignore_eos=True)",
    ],
)
def test_an_unclosed_engine_does_not_block_process_exit(tiny_model_dir, last_line):
    code = (
        "from kvboost_edge import CPUPagedEngine\n"
        f"engine = CPUPagedEngine.from_pretrained({str(tiny_model_dir)!r}, num_blocks=64)\n"
        "print(engine.generate([7, 8, 9], max_new_tokens=2).generated_tokens)\n" + last_line
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")
