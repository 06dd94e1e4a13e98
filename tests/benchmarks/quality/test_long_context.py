"""Tests of the generated questions about long texts."""

import pytest

from benchmarks.quality.long_context import TASKS, make_question, score


@pytest.mark.parametrize("task", TASKS)
def test_a_text_contains_what_its_answer_needs(task):
    text, question = make_question(task, 3, 400)
    assert make_question(task, 3, 400)[0] == text != make_question(task, 4, 400)[0]
    places = [text.index(part) for part in question.parts]
    assert places == sorted(places)
    for one in question.expected:
        assert one in text
        assert one not in question.question
    assert score(" and ".join(question.expected), question.expected) == 1
    assert score(question.expected[0], question.expected) == 1 / len(question.expected)


def test_the_words_that_are_asked_for_are_the_most_frequent():
    text, question = make_question("common_words", 0, 400)
    counts = {word: text.split().count(word) for word in set(text.split())}
    assert set(sorted(counts, key=counts.get)[-3:]) == set(question.expected)
