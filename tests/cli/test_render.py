"""The drawn pool."""

from __future__ import annotations

import io

from rich.console import Console

from kvboost_edge.cli.render import MAX_CELLS, block_map, pool_panel


def drawn(renderable, width=100):
    console = Console(width=width, file=io.StringIO())
    console.print(renderable)
    return console.file.getvalue()


def test_each_state_has_its_own_glyph():
    lines = drawn(block_map([0, 1, 2, 3, 3], width=3)).splitlines()
    assert lines[:2] == ["·░▒", "██"]


def test_the_legend_counts_the_blocks():
    legend = drawn(block_map([0, 0, 0, 1, 2, 3, 3], width=80)).splitlines()[-1]
    assert [part.split()[-1] for part in legend.split("   ")] == ["3", "1", "1", "2"]


def test_a_large_pool_is_drawn_several_blocks_to_a_glyph_and_shows_the_busiest():
    states = [0] * (4 * MAX_CELLS)
    states[5] = 3
    text = drawn(block_map(states, width=64))
    picture = "".join(text.splitlines()[: MAX_CELLS // 64])
    assert picture == "·█" + "·" * (MAX_CELLS - 2)
    assert "a glyph is 4 blocks" in text


def test_an_empty_pool_is_drawn():
    assert "free: 0" in drawn(block_map([], width=10))


def test_the_panel_shows_every_figure():
    text = drawn(pool_panel([0, 1], {"num_blocks": 2, "pool_bytes": 3_000_000, "backend": "cpu", "x": 0.5}, width=100))
    for shown in ("num_blocks", "3.0 MB", "backend", "cpu", "0.500"):
        assert shown in text


def test_a_tier_is_a_figure_of_its_own():
    tiers = {
        "disk": {"blocks": 1200, "bytes": 40_000_000, "state": ""},
        "redis": {"blocks": None, "bytes": None, "state": "does not answer"},
    }
    text = drawn(pool_panel([0], {"num_blocks": 1, "tiers": tiers}, width=100))
    assert "{" not in text
    assert "disk" in text
    assert "1,200 blocks, 40.0 MB" in text
    assert "does not answer" in text
    assert "tiers" not in drawn(pool_panel([0], {"num_blocks": 1, "tiers": {}}, width=100))
