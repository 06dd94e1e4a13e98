"""Tests of the drawing of the block pool."""

import io

from rich.console import Console

from kvboost_edge.cli.render import (
    MAX_CELLS,
    STATES,
    block_map,
    draft_words,
    pool_panel,
    reuse_words,
    tokens_words,
)


def drawn(renderable, width=100):
    console = Console(width=width, file=io.StringIO())
    console.print(renderable)
    return console.file.getvalue()


def test_each_state_has_its_own_glyph():
    lines = drawn(block_map([0, 1, 2, 3, 3, 4], width=3)).splitlines()
    assert lines[:2] == ["·░▒", "██◆"]


def test_the_legend_counts_the_blocks():
    legend = drawn(block_map([0, 0, 0, 1, 2, 3, 3], width=80)).splitlines()[-1]
    assert [part.split()[-1] for part in legend.split("   ")] == ["3", "1", "1", "2", "0"]
    assert "at another position: 2" in drawn(block_map([0, 4, 4], width=80))


def test_a_large_pool_draws_several_blocks_per_glyph():
    states = [0] * (4 * MAX_CELLS)
    states[5] = 3
    text = drawn(block_map(states, width=64))
    picture = "".join(text.splitlines()[: MAX_CELLS // 64])
    assert picture == "·█" + "·" * (MAX_CELLS - 2)
    assert "each glyph represents 4 blocks" in text


def test_an_empty_pool_is_drawn():
    assert "free: 0" in drawn(block_map([], width=10))


def test_the_panel_shows_every_statistic():
    text = drawn(
        pool_panel(
            [0, 1],
            {"num_blocks": 2, "pool_bytes": 3_000_000, "backend": "cpu", "x": 0.5},
            width=100,
        )
    )
    for shown in ("num_blocks", "3.0 MB", "backend", "cpu", "0.500"):
        assert shown in text


def test_tiers_are_shown_separately():
    tiers = {
        "disk": {"blocks": 1200, "bytes": 40_000_000, "state": ""},
        "redis": {"blocks": None, "bytes": None, "state": "does not answer"},
    }
    text = drawn(pool_panel([0], {"num_blocks": 1, "tiers": tiers}, width=100))
    assert "{" not in text
    assert "disk" in text
    assert "1,200 blocks, 40.0 MB" in text
    assert "does not answer" in text
    stats = {"num_blocks": 1, "tiers": {}, "step_counts": {"+Inf": 3}}
    shown = drawn(pool_panel([0], stats, width=100))
    assert not any(name in shown for name in ("tiers", "step_counts", "Inf"))


def test_every_block_state_has_a_glyph():
    from kvboost_edge.engine.stats import BLOCK_SPAN

    assert len(STATES) == BLOCK_SPAN + 1 == len({glyph for glyph, _, _ in STATES})


def test_span_reuse_is_labelled_approximate():
    assert (
        reuse_words(90, 64, {"pool": 16, "disk": 48}, 0, 0)
        == "90 prompt tokens, 64 from the cache (48 from disk)"
    )
    words = reuse_words(90, 16, {"pool": 16}, 48, 16)
    assert words.startswith("90 prompt tokens, 16 from the cache · ")
    assert words.endswith(" · approximate: 48 tokens reused at other positions, 16 recomputed")
    words = reuse_words(90, 16, {"pool": 16}, 0, 0, ["wide_arithmetic"])
    assert words == "90 prompt tokens, 16 from the cache · approximate: wide arithmetic"


def test_token_counts_have_singular_and_plural():
    assert [tokens_words(number) for number in (0, 1, 2)] == ["0 tokens", "1 token", "2 tokens"]
    assert draft_words(0, 0) == []
    assert draft_words(1, 0) == ["0 of 1 draft token accepted"]
    assert draft_words(92, 70) == ["70 of 92 draft tokens accepted"]
    assert reuse_words(1, 0, {}, 0, 0) == "1 prompt token, 0 from the cache"
