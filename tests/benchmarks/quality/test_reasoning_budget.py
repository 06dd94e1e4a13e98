"""Tests of the count of cut reasoning, with a model that reasons forever."""

import pytest

from benchmarks.quality.reasoning_budget import MESSAGE, TEMPLATE, budget_row, questions
from helpers.engine.thinking_model import thinking
from helpers.text.byte_level import byte_level
from kvboost_edge.text.tokenizer import Tokenizer


@pytest.mark.parametrize("message", ["", MESSAGE])
def test_a_row_counts_cut_answers_and_the_cached_blocks_of_the_next_turn(monkeypatch, message):
    with thinking(monkeypatch, "opened") as (engine, _):
        asked = [[{"role": "user", "content": text}] for text in questions(3)]
        prompts = [engine.tokenizer.encode_chat(messages) for messages in asked]
        for budget in (0, 9):
            row = budget_row(engine, prompts, budget, message, 150)
            assert {
                name: row[name] for name in ("cut", "same", "answered", "stop")
            } == dict.fromkeys(("cut", "same", "answered", "stop"), 3)
            assert row["cached"] == 1


def test_the_questions_differ_and_the_template_opens_the_reasoning():
    assert len(set(questions(50))) == 50
    tokenizer = Tokenizer.from_transformers(byte_level())
    tokenizer.chat_template = TEMPLATE
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Why?"}])
    assert text.endswith("<|im_start|>assistant\n<think>\n")
    assert tokenizer.turn_format.closing == "\n</think>\n\n"
