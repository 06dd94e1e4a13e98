"""Tests of the generated questions about long texts, and of the scores of answers."""

from types import SimpleNamespace

import pytest

from helpers.engine.retrieval_solver import solve
from helpers.models.tiny_models import save_tiny_model
from kvboost_edge import CPUPagedEngine
from kvboost_edge.engine.retrieval import TASKS, make_text, score_answer, score_task
from kvboost_edge.errors import RequestError


@pytest.mark.parametrize("task", TASKS)
def test_a_text_contains_what_its_answer_needs(task):
    text, content = make_text(task, 3, 400)
    assert make_text(task, 3, 400)[0] == text != make_text(task, 4, 400)[0]
    places = [text.index(part) for part in content.parts]
    assert places == sorted(places)
    for question, expected in content.questions:
        assert all(one in text and one not in question for one in expected)
        assert score_answer(" and ".join(expected), expected) == 1
        assert score_answer(expected[0], expected) == 1 / len(expected)


def test_the_first_question_asks_for_any_part_of_the_text():
    asked = set()
    for seed in range(40):
        _, content = make_text("multi_key", seed, 10)
        (number,) = content.questions[0].expected
        asked |= {place for place, part in enumerate(content.parts) if number in part}
    assert asked == set(range(8))


def test_the_words_that_are_asked_for_are_the_most_frequent():
    text, content = make_text("common_words", 0, 400)
    counts = {word: text.split().count(word) for word in set(text.split())}
    assert set(sorted(counts, key=counts.get)[-3:]) == set(content.questions[0].expected)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    model = save_tiny_model("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=1024)
    with CPUPagedEngine.from_pretrained(model, num_blocks=80, num_threads=1) as one:
        yield one


@pytest.mark.parametrize(
    ("task", "texts"), {"needle": 4, "multi_key": 1, "variables": 2, "common_words": 4}.items()
)
def test_answers_are_scored_by_what_the_prompt_says(task, texts, engine, monkeypatch):
    prompts = []

    def generate(ids, max_new_tokens, temperature):
        prompts.append(ids)
        assert 900 < len(ids) + max_new_tokens <= 1000
        assert temperature == 0
        text = engine.tokenizer.decode(ids)
        return SimpleNamespace(output_text=solve(text) if len(prompts) % 4 else "unknown")

    monkeypatch.setattr(engine, "generate", generate)
    seen = []
    found = score_task(engine, task, count=4, context=1000, progress=seen.append)
    assert (found.task, found.questions, found.score) == (task, 4, 0.75)
    assert found.tokens in range(min(map(len, prompts)), max(map(len, prompts)) + 1)
    assert len({tuple(ids) for ids in prompts}) == 4
    assert len({tuple(ids[:500]) for ids in prompts}) == texts
    assert seen == [1, 2, 3, 4]


def test_answers_come_from_the_engine(engine):
    found = score_task(engine, "needle", count=1, context=700)
    assert found.score == 0  # the model is random
    assert found.seconds > 0


@pytest.mark.parametrize(
    ("context", "message"), [(200, "too small for a question"), (1025, "at most 1024")]
)
def test_contexts_out_of_range_are_refused(engine, context, message):
    with pytest.raises(RequestError, match=message):
        score_task(engine, "multi_key", count=1, context=context)
