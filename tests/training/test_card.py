"""Tests of the bundled model's card: it equals the one that the export writes, and states what
users must know.
"""

import json
import re
from pathlib import Path

import pytest

import demo_corpus
import demo_export

FOLDER = Path(__file__).parents[2] / "kvboost_edge" / "assets" / "demo"
CARD = (FOLDER / "README.md").read_text(encoding="utf-8")


def listed(pattern):
    return "\n".join(re.findall(pattern, CARD, flags=re.MULTILINE))


def test_the_card_is_the_one_that_the_export_writes():
    config = json.loads((FOLDER / "config.json").read_text())
    figures = {
        "parameters": 4_558_080,
        "vocabulary": config["vocab_size"],
        "context": config["max_position_embeddings"],
        "seed": 7,
        "step": 1700,
        "tokens": 6000,
        "minutes": 24.0,
        "share": demo_corpus.HELD_OUT_SHARE,
        "runs": listed(r"^- from step .*$"),
        "figures": listed(r"^\|.*\|$"),
    }
    assert demo_export.CARD.format(**figures) == CARD


@pytest.mark.parametrize("heading", ["Training", "Accuracy", "Limits", "Licence", "Prompt format"])
def test_the_card_has_every_part(heading):
    assert f"\n## {heading}\n" in CARD
