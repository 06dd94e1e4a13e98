"""Charts of the README and of docs/figures.md, drawn from recorded results (`make docs-images`)."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.harness import threads_of

__all__ = ["IMAGES", "Bar", "Panel", "charts", "draw_chart", "main"]

RESULTS = Path(__file__).parents[1] / "results"
IMAGES = Path(__file__).parents[2] / "docs" / "images"

_COLOURS = {
    "kvboost_edge": "#1b6ca8",
    "kvboost_edge KV 8": "#0b3c5d",
    "llama.cpp": "#d98e04",
    "llama.cpp q8_0": "#f2c14e",
    "OpenVINO GenAI": "#8d8d8d",
}
# Names of bench_peers.py's columns in charts.
_LABELS = {
    "kvboost_edge": "kvboost_edge kv16",
    "kvboost_edge KV 8": "kvboost_edge kv8",
    "llama.cpp": "llama.cpp f16",
    "llama.cpp q8_0": "llama.cpp q8_0",
    "OpenVINO GenAI": "openvino u8",
}
_README_LABELS = ("kvboost_edge", "llama.cpp", "OpenVINO GenAI")
_FONT = "font-family='system-ui, sans-serif'"
_WIDTH = 900
_LEFT = 150
_BAR_SPACE = 500
_BAR_STEP = 22


class Bar(NamedTuple):
    """Figure of one contender. `value` is None if it was not measured."""

    contender: str
    value: float | None


class Panel(NamedTuple):
    """A group of bars with one unit.

    Attributes:
        title: name of the measure.
        unit: unit of the values.
        bars: the contenders, ours first.
        source: date, machine and commit of the run.
    """

    title: str
    unit: str
    bars: Sequence[Bar]
    source: str


def _source(result: Mapping[str, Any]) -> str:
    machine = result["machine"]
    threads = threads_of(machine, result.get("options"))
    return (
        f"{machine['date']}, {machine['cpu'].replace('(R)', '')}, {threads} threads, "
        f"{machine['isa']}, commit {machine['commit']}"
    )


def _peers_panel(
    peers: Mapping[str, Any], contenders: Sequence[str], title: str, unit: str, measure: str
) -> Panel:
    [row] = [row for row in peers["rows"] if row["measure"] == measure]
    bars = [Bar(name, row.get(_LABELS[name])) for name in contenders]
    return Panel(title, unit, bars, _source(peers))


def _readme_panels(peers: Mapping[str, Any], agents: Mapping[str, Any]) -> list[Panel]:
    """Return the README's three measures from the records of two benchmarks.

    Args:
        peers: Record of bench_peers.py: `rows` with a `measure` and a value for each contender.
        agents: Record of bench_agents.py: `rows` with one entry for each request of the session.
    """
    of_peers = functools.partial(_peers_panel, peers, _README_LABELS)
    [restart] = [row for row in agents["rows"] if "restart" in row["changed"]]
    return [
        of_peers(
            "Prefill: first token, 2,112-token prompt (less is better)", "s", "cold_ttft_2112_s"
        ),
        of_peers(
            "Decode with 2,048 tokens of context (more is better)", "tokens/s", "decode_2048_tok_s"
        ),
        Panel(
            f"Restart: first token, {restart['prompt']:,}-token prompt, llama_cpp.server with its "
            "cache in memory (less is better)",
            "s",
            [
                Bar("kvboost_edge", restart["ttft_s"]),
                Bar("llama.cpp", restart["peer_ttft_s"]),
                Bar("OpenVINO GenAI", None),
            ],
            _source(agents),
        ),
    ]


def _figures_panels(peers: Mapping[str, Any]) -> list[Panel]:
    """Return the measures of docs/figures.md from the record of bench_peers.py."""
    of_peers = functools.partial(_peers_panel, peers, tuple(_LABELS))
    less, more = "(less is better)", "(more is better)"
    return [
        of_peers(f"First token, 2,112-token prompt {less}", "s", "cold_ttft_2112_s"),
        of_peers(f"First token, 2,048 tokens cached, 64 new {less}", "s", "warm_ttft_2048_64_s"),
        of_peers(f"Decode, no context {more}", "tokens/s", "decode_0_tok_s"),
        of_peers(f"Decode, 2,048 tokens of context {more}", "tokens/s", "decode_2048_tok_s"),
        of_peers(f"Decode, 8,192 tokens of context {more}", "tokens/s", "decode_8192_tok_s"),
        of_peers(f"Peak memory {less}", "MB", "peak_rss_mb"),
    ]


def draw_chart(panels: Sequence[Panel], note: str, title: str) -> str:
    """Draw horizontal bars as an SVG document."""
    shapes: list[str] = []

    def text(x: float, y: float, shown: str, style: str) -> None:
        shapes.append(f"<text x='{x:.0f}' y='{y:.0f}' {style}>{escape(shown)}</text>")

    y = 28.0
    for panel in panels:
        text(20, y, panel.title, "font-size='15' font-weight='600' fill='#222'")
        largest = max(bar.value for bar in panel.bars if bar.value is not None)
        y += 10
        for bar in panel.bars:
            text(_LEFT - 8, y + 14, bar.contender, "font-size='13' fill='#222' text-anchor='end'")
            width = _BAR_SPACE * (bar.value or 0) / largest
            shapes.append(
                f"<rect x='{_LEFT}' y='{y:.0f}' width='{width:.1f}' height='{_BAR_STEP - 4}' "
                f"fill='{_COLOURS[bar.contender]}'/>"
            )
            value = "not measured" if bar.value is None else f"{bar.value:,.3g} {panel.unit}"
            text(_LEFT + width + 6, y + 14, value, "font-size='13' fill='#222'")
            y += _BAR_STEP
        text(_LEFT, y + 12, panel.source, "font-size='11' fill='#666'")
        y += 42
    text(20, y - 8, note, "font-size='11' fill='#666'")
    height = y + 6
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {height:.0f}' "
            f"width='{_WIDTH}' height='{height:.0f}' {_FONT} role='img'>",
            f"<title>{escape(title)}</title>",
            f"<rect width='{_WIDTH}' height='{height:.0f}' fill='#fff'/>",
            *shapes,
            "</svg>\n",
        ]
    )


def charts() -> dict[str, str]:
    """Draw all charts from the recorded results and return them by file name."""
    peers, agents = (
        json.loads((RESULTS / name).read_text(encoding="utf-8"))
        for name in ("peers-0.5b-q4_0.json", "agents.json")
    )
    note = "All engines run one Q4_0 file with random weights in the shape of Qwen2-0.5B. "
    against = "against llama.cpp and OpenVINO GenAI"
    return {
        "performance.svg": draw_chart(
            _readme_panels(peers, agents),
            f"{note}KV cache: 16 bits, OpenVINO 8.",
            f"Prefill, decode and restart {against}",
        ),
        "figures.svg": draw_chart(
            _figures_panels(peers),
            f"{note}KV cache: 16 bits, if not named; OpenVINO 8.",
            f"First token, decode and memory {against}",
        ),
    }


def main() -> None:
    """Write the charts to a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=IMAGES, help="output folder")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, chart in charts().items():
        (options.out / name).write_text(chart, encoding="utf-8")


if __name__ == "__main__":
    main()
