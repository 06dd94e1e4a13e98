"""The examples of the documentation run."""

import re
import subprocess
import sys
from pathlib import Path

TEXT = (Path(__file__).parents[3] / "docs" / "lmcache.md").read_text(encoding="utf-8")


def test_the_documented_example_works():
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"600 512 (512, 2, 64) {512 / 700}\n"
