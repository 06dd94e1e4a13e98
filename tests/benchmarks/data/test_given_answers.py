"""Tests of given answers: sequences generate them exactly, with drafts and within a grammar."""

import pytest

from benchmarks.data.given_answers import give_answers
from kvboost_edge import CPUPagedEngine
from kvboost_edge.engine.schedule import sequence as running_state

PROMPT = list(range(20, 60))
OTHER = list(range(30, 70))


@pytest.fixture
def answers(monkeypatch):
    """Return the answers by prompt, which sequences generate for the length of a test."""
    monkeypatch.setattr(running_state, "make_sampler", running_state.make_sampler)
    found = {}
    give_answers(lambda prompt: found.get(tuple(prompt)))
    return found


@pytest.fixture(scope="module")
def engine():
    with CPUPagedEngine.from_pretrained("kvboost-edge/demo", num_blocks=64) as engine:
        yield engine


@pytest.mark.parametrize("speculation", ["off", "on"])
def test_a_given_answer_is_generated_and_other_prompts_are_answered_by_the_model(
    engine, answers, speculation
):
    options = {"temperature": 0.0, "ignore_eos": True, "speculation": speculation}
    free = engine.generate(PROMPT, 24, **options).output_token_ids
    own = engine.generate(OTHER, 24, **options).output_token_ids
    given = [token % 8 + 40 for token in range(24)]
    assert list(free) != given
    answers[tuple(PROMPT)] = given
    results = engine.generate_batch([PROMPT, OTHER], max_new_tokens=24, **options)
    assert [list(one.output_token_ids) for one in results] == [given, list(own)]


def test_an_answer_that_a_grammar_forbids_is_an_error(answers):
    with CPUPagedEngine.from_pretrained("kvboost-edge/demo", num_blocks=64) as engine:
        digits, letter = (engine.tokenizer.encode(text, False) for text in ("2026", "a"))
        answers[tuple(PROMPT)] = digits + letter
        options = {"regex": "[0-9]+", "temperature": 0.0}
        assert engine.generate(PROMPT, len(digits), **options).output_text == "2026"
        with pytest.raises(Exception, match="given answer is not allowed"):
            engine.generate(PROMPT, len(digits) + 1, **options)
