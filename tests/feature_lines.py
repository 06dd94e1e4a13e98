"""Share of code lines of the engine's core that name a feature: `python tests/feature_lines.py`.

The core calls features through interfaces: `RequestFeature` in
kvboost_edge/engine/request/request.py, and feature.py and planners.py in
kvboost_edge/engine/schedule/. A line that names a feature may have to change with the feature.
Comments, docstrings and blank lines do not count.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "kvboost_edge"
CORE = (
    "engine/core.py",
    "engine/schedule/scheduler.py",
    "engine/schedule/sequence.py",
    "engine/request_builder.py",
    "kvcache/manager.py",
)
WORDS = {
    "speculative decoding": r"draft\w*|speculation|accepted\w*|settle",
    "structured output": r"grammar\w*|constrain\w*",
    "non-prefix KV reuse": r"spans?|probe\w*|repair\w*|sharing|recompute\w*",
    "KV offload": r"loads?|loading|tier\w*|restored|piece|arriv\w*|shelf",
    "hybrid models": r"states?|recurrent|snapshot\w*",
}
NAMES_A_FEATURE = re.compile(rf"(?:\b|_)(?:{'|'.join(WORDS.values())})(?:\b|_)", re.IGNORECASE)


def code_lines(text: str) -> list[str]:
    """Return the lines that contain code."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            for number in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[number] = ""
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def share(path: Path) -> float:
    """Return the share of a file's code lines that name a feature."""
    lines = code_lines(path.read_text(encoding="utf-8"))
    return sum(bool(NAMES_A_FEATURE.search(line)) for line in lines) / len(lines)


if __name__ == "__main__":
    for name in CORE:
        print(f"{name:36} {share(PACKAGE / name):6.1%}")
