"""Engines of several processes on one disk cache: each finds the blocks of the other and continues
after its death.
"""

import os
import random

import numpy as np
import pytest

from helpers.engine.fake_runner import expected_tokens, fake_engine
from helpers.models.tiny_models import save_tiny_model
from helpers.random_ids import random_ids
from helpers.server.live_servers import wait_until
from helpers.tiers.disk_cases import opened, opened_apart
from helpers.tiers.herd import herd
from kvboost_edge import CPUPagedEngine

PROMPT = list(range(100))  # 6 full blocks
ANSWER = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
_HEAD = random_ids(64, 5, 10, 250)
PROMPTS = [
    _HEAD[: 32 * (i % 3)] + np.random.default_rng(i).integers(10, 250, 90).tolist()
    for i in range(6)
]


def tier_of(engine):
    return engine.paged_stats()["tiers"]["disk"]


def ask(engine, prompt):
    """Check the answer to a prompt and return the sources of its cached tokens."""
    result = engine.generate(prompt, max_new_tokens=2, temperature=0.0, ignore_eos=True)
    assert list(result.output_token_ids) == expected_tokens(prompt, 2)
    return dict(result.hit_tokens)


def test_a_readers_blocks_are_lost_or_stored_when_it_becomes_owner(tmp_path):
    with (
        opened(tmp_path) as mine,
        opened_apart(tmp_path) as theirs,
        fake_engine(num_blocks=16, tiers=[theirs]) as reader,
    ):
        with fake_engine(num_blocks=32, tiers=[mine]) as owner:
            ask(owner, PROMPT)
            wait_until(lambda: tier_of(owner)["blocks"] == 6, "blocks to be stored")
            wait_until(lambda: tier_of(reader)["blocks"] == 6, "blocks to be seen", 5)
            assert ask(reader, PROMPT) == {"pool": 0, "disk": 96}
            ask(reader, [1, *PROMPT])
            for first in (2, 3):
                ask(reader, [first, *PROMPT])
            assert not tier_of(reader)["writable"]
            assert "stores nothing" in tier_of(reader)["state"]
            lost = reader.paged_stats()["lost_blocks"]
            assert 6 <= lost <= 12, "only blocks that the owner did not store may be lost"
        wait_until(lambda: tier_of(reader)["writable"], "the reader to take over", 5)
        ask(reader, [3, *PROMPT])
        wait_until(lambda: tier_of(reader)["blocks"] == 24 - lost, "its pool to be stored")
        assert tier_of(reader)["state"] == ""
    with opened(tmp_path) as tier, fake_engine(num_blocks=32, tiers=[tier]) as engine:
        assert ask(engine, [3, *PROMPT])["disk"] == 96


CODE = """
import random
from kvboost_edge import CPUPagedEngine

def run(directory, name, model, options, prompts, answer, expected):
    draw = random.Random(name)
    say = journal_of(directory, name)
    with CPUPagedEngine.from_pretrained(
        model, disk_cache_dir=f"{directory}/disk", debug_checks=True, **options
    ) as engine:
        while True:
            which = draw.randrange(len(prompts))
            result = engine.generate(prompts[which], **answer)
            tier = engine.paged_stats()["tiers"]["disk"]
            if list(result.output_token_ids) != expected[which] or tier["refused"]:
                say("wrong", which, result.output_token_ids, tier)
            hits = result.hit_tokens.get("disk", 0)
            say("hit" if hits else "miss", "owner" if tier["writable"] else "reader")
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("model", ["plain", pytest.param("hybrid", marks=pytest.mark.full)])
def test_killed_engines_leave_valid_blocks_to_the_others(model, tmp_path, scale):
    path = (
        "kvboost-edge/demo"
        if model == "plain"
        else str(save_tiny_model("qwen3_5_text", tmp_path / "model"))
    )
    options = {"num_blocks": 24, "max_disk_bytes": 16 << 20, "num_threads": 1}
    with CPUPagedEngine.from_pretrained(path, num_blocks=100, num_threads=1) as engine:
        expected = [list(engine.generate(one, **ANSWER).output_token_ids) for one in PROMPTS]
    directory = tmp_path / "shared"
    directory.mkdir()
    with herd(CODE, directory) as forks:
        survived = forks.kill_by_turns(
            *(scale(3, 20), 2, random.Random(0), 0.5),
            *(path, options, PROMPTS, ANSWER, expected),
        )
    assert survived["owner"] >= 1
    assert survived["reader"] >= 1
