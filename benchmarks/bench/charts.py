"""Charts of a run for the README: time to first token, decode against depth, memory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["draw_charts"]

_COLOURS = {
    "kvboost_edge kv16": "#1b6ca8",
    "kvboost_edge kv8": "#0b3c5d",
    "llama.cpp f16": "#d98e04",
    "llama.cpp q8_0": "#f2c14e",
    "openvino u8": "#8d8d8d",
}


def draw_charts(rows: Sequence[Mapping[str, Any]], folder: Path, title: str) -> None:
    """Write ttft.png, decode.png and memory.png from the table's rows."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    by_name = {row["measure"]: row for row in rows}
    labels = [label for label in _COLOURS if any(row.get(label) is not None for row in rows)]

    def bars(names: Sequence[str], shown: Sequence[str], unit: str, file: str) -> None:
        figure, axes = plt.subplots(figsize=(7, 0.5 + 0.3 * len(labels) * len(names)))
        for group, name in enumerate(names):
            for index, label in enumerate(labels):
                value = by_name[name].get(label)
                if value is None:
                    continue
                at = -(group * (len(labels) + 1) + index)
                axes.barh(at, value, color=_COLOURS[label], height=0.8)
                axes.text(value, at, f" {value:,.3g} {unit}  {label}", va="center", fontsize=8)
        middle = (len(labels) - 1) / 2
        axes.set_yticks([-(g * (len(labels) + 1) + middle) for g in range(len(names))], shown)
        axes.set_xlim(
            0,
            1.45 * max(v for name in names for label in labels if (v := by_name[name].get(label))),
        )
        axes.set_xticks([])
        for side in ("top", "right", "bottom"):
            axes.spines[side].set_visible(False)
        axes.set_title(title, loc="left", fontsize=10)
        figure.savefig(folder / file, dpi=130, bbox_inches="tight")
        plt.close(figure)

    ttft = [name for name in by_name if "ttft" in name]
    bars(
        ttft,
        ["cold" if name.startswith("cold") else "2,048 cached" for name in ttft],
        "s",
        "ttft.png",
    )
    bars(["peak_rss_mb"], ["peak memory"], "MB", "memory.png")
    depths = sorted(
        int(name.split("_")[1]) for name in by_name if re.fullmatch(r"decode_\d+_tok_s", name)
    )
    figure, axes = plt.subplots(figsize=(7, 3.2))
    for label in labels:
        values = [by_name[f"decode_{depth}_tok_s"].get(label) for depth in depths]
        if None not in values:
            axes.plot(
                [str(d) for d in depths], values, marker="o", color=_COLOURS[label], label=label
            )
    axes.set_xlabel("tokens before")
    axes.set_ylabel("tokens / s")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, frameon=False)
    axes.set_title(title, loc="left", fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(folder / "decode.png", dpi=130, bbox_inches="tight")
    plt.close(figure)
