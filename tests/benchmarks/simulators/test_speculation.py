"""Tests of the speculative decoding rules on recorded answers, with machines of given speeds."""

import statistics

import pytest

from benchmarks.simulators.speculation import (
    MACHINES,
    Rules,
    batches,
    read_answers,
    read_pair,
    replay,
)

ANSWERS = read_answers()
LONG = 64  # tokens; a shorter answer may lose more by a single draft


@pytest.mark.parametrize("model", ANSWERS)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.some(6)
def test_no_answer_is_two_percent_slower_with_drafts(model, machine, size):
    rules = Rules()
    gains = {
        number: replay(group, MACHINES[machine], rules, seed=number).gain
        for number, group in enumerate(batches(ANSWERS[model], size))
        if max(len(one.answer) for one in group) >= LONG
    }
    assert min(gains.values()) >= 0.98


@pytest.mark.parametrize("model", ANSWERS)
@pytest.mark.parametrize(("machine", "least"), [("0.5B", 2.0), ("135M", 1.5)])
def test_edited_code_gains(model, machine, least):
    rules = Rules()
    edits = [[one] for one in ANSWERS[model] if one.kind == "code edit"]
    gains = [replay(group, MACHINES[machine], rules).gain for group in edits]
    assert statistics.mean(gains) >= least


def test_a_draft_model_gains():
    """The recorded pair of models gains on new code and free chat, with one request and with
    several at once.
    """
    for size, code, chat in ((1, 1.5, 1.1), (8, 0.98, 0.98)):
        rules = Rules()
        gains: dict[str, list[float]] = {}
        for number, group in enumerate(batches(read_pair(), size)):
            result = replay(group, MACHINES["1.5B"], rules, seed=number)
            gains.setdefault(group[0].kind, []).append(result.gain)
        assert statistics.median(gains["new code"]) >= code
        assert statistics.median(gains["free chat"]) >= chat


def test_a_replay_gives_the_same_figures_again():
    group = ANSWERS["SmolLM2-135M-Instruct"][:1]
    first, second = (replay(group, MACHINES["0.5B"], Rules(), seed=3) for _ in range(2))
    assert first == second
    assert first.num_accepted <= first.num_drafted
