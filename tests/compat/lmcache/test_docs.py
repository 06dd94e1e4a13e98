"""What the documentation shows runs."""

from __future__ import annotations

import re
from pathlib import Path

TEXT = (Path(__file__).parents[3] / "docs" / "lmcache.md").read_text(encoding="utf-8")


def test_the_example_prints_what_it_says(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(compile(code, "docs/lmcache.md", "exec"), {})  # noqa: S102 - our own text
    assert capsys.readouterr().out == f"600 512 (512, 2, 64) {512 / 700}\n"
