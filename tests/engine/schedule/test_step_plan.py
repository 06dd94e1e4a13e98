"""The work of a step: the items that `next_work` returns, and `take` with one row or several."""

import numpy as np
import pytest

from helpers.engine.fake_runner import ROOT, fake_tokenizer
from helpers.engine.requests import make_request
from kvboost_edge.engine.handle import RequestHandle
from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.engine.schedule.sequence import Sequence
from kvboost_edge.engine.schedule.step_plan import ScheduledTokens

VOCAB = 64


def running(prompt, max_new_tokens=8, **fields):
    params = fields.pop("params", SamplingParams(max_new_tokens=max_new_tokens))
    request = make_request(
        prompt_ids=tuple(prompt),
        params=params,
        max_tokens=len(prompt) + max_new_tokens,
        stop_ids=frozenset({63}),
        root=ROOT,
        **fields,
    )
    return Sequence(request, RequestHandle(0, lambda index: None), fake_tokenizer())


def rows(*likeliest):
    """Return logits with these greedy tokens."""
    logits = np.zeros((len(likeliest), VOCAB), np.float32)
    logits[np.arange(len(likeliest)), likeliest] = 9.0
    return logits


def drafted(sequence, *drafts):
    """Schedule the last token and drafts after it, with the logits of each."""
    start = sequence.num_tokens - 1
    return ScheduledTokens(
        sequence, start, [sequence.token_ids[-1], *drafts], 1 + len(drafts), len(drafts)
    )


def next_of(sequence, limit):
    """Return the only item of work of a sequence without spans."""
    (work,) = sequence.next_work(limit)
    return work


def test_work_covers_pending_tokens_up_to_the_limit():
    sequence = running([5, 6, 7, 8, 9])
    work = next_of(sequence, 3)
    assert (work.start, list(work.token_ids), work.stop, work.num_rows) == (0, [5, 6, 7], 3, 1)
    assert sequence.take(work, rows(1)) is None
    assert (sequence.num_tokens, sequence.num_computed_tokens) == (5, 3)
    rest = next_of(sequence, 100)
    assert list(rest.token_ids) == [8, 9]
    assert sequence.take(rest, rows(20)) is None
    assert (sequence.token_ids[-1], sequence.num_computed_tokens, sequence.num_pending) == (
        20,
        5,
        1,
    )


def test_requested_logit_rows_are_kept():
    sequence = running([5, 6, 7, 8], 0, logits_start=1)
    first = next_of(sequence, 2)
    assert first.num_rows == 1
    assert sequence.take(first, rows(1)) is None
    second = next_of(sequence, 2)
    assert second.num_rows == 2
    assert sequence.take(second, rows(2, 3)) == "length"
    assert np.concatenate(sequence.scores.logits).argmax(axis=1).tolist() == [1, 2, 3]


def test_earlier_logit_rows_are_not_kept():
    sequence = running([5, 6, 7, 8], 0, logits_start=3)
    assert sequence.take(next_of(sequence, 2), rows(1)) is None
    assert sequence.scores.logits == []


@pytest.mark.parametrize("agreeing", range(4))
def test_draft_rows_are_accepted_while_tokens_agree(agreeing):
    """Row k samples the token that row k + 1 was computed for. Rows after the first difference are
    ignored.
    """
    sequence = running([5, 6])
    sequence.take(next_of(sequence, 9), rows(10))
    truth = [11, 12, 13]
    drafts = truth[:agreeing] + [50] * (3 - agreeing)
    assert sequence.take(drafted(sequence, *drafts), rows(*truth, 14)) is None
    assert sequence.token_ids == [5, 6, 10, *[*truth, 14][: agreeing + 1]]
    assert sequence.num_computed_tokens == sequence.num_tokens - 1


def test_a_stop_token_within_a_draft_ends_the_answer():
    sequence = running([5, 6])
    sequence.take(next_of(sequence, 9), rows(10))
    assert sequence.take(drafted(sequence, 11, 63, 12), rows(11, 63, 12, 13)) == "stop"
    assert sequence.token_ids == [5, 6, 10, 11, 63]


def test_the_length_limit_within_a_draft_ends_the_answer():
    sequence = running([5, 6], max_new_tokens=2)
    sequence.take(next_of(sequence, 9), rows(10))
    assert sequence.take(drafted(sequence, 11, 12), rows(11, 12, 13)) == "length"
    assert sequence.token_ids == [5, 6, 10, 11]


def test_rows_after_a_rejected_token_are_ignored():
    sequence = running([5, 6])
    sequence.take(next_of(sequence, 9), rows(10))
    logits = rows(11, 12)
    logits[1] = np.nan
    assert sequence.take(drafted(sequence, 50), logits) is None
    assert sequence.token_ids == [5, 6, 10, 11]
