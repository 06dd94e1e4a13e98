"""Tests of the benchmark's agent session: it is deterministic and changes only as declared."""

import dataclasses
import itertools
import json

import pytest

from benchmarks.data.agent_sessions import CALL, QUICK, Answer, session, texts
from kvboost_edge.server.cache_report.normalization import without_billing

ASKED = Answer("I look.", ("read_file", '{"path": "a.py"}'), "given0001")


def played(plan=QUICK, answer=ASKED):
    running = session(plan)
    found = [next(running)]
    while True:
        try:
            found.append(running.send(answer))
        except StopIteration:
            return found


def turns(plan=QUICK):
    return [request for request in played(plan) if request.kind == "turn"]


def canonical(value):
    return json.dumps(value, sort_keys=True)


def without_date(text):
    return "".join(line for line in text.splitlines() if not line.startswith("Today is "))


def test_the_same_session_each_time():
    assert played() == played()
    assert texts(QUICK) == texts(QUICK)


def test_its_requests():
    plan = QUICK
    found = played()
    kinds = [request.kind for request in found]
    assert (kinds.count("turn"), kinds.count("title"), kinds.count("side")) == (12, 3, 12)
    assert [request.number for request in turns()] == list(range(1, 13))
    assert [request.number for request in found if request.restart] == [plan.restart]
    assert {len(request.body.get("tools", ())) for request in found if request.kind == "turn"} == {
        24
    }
    assert all("tools" not in request.body for request in found if request.kind == "title")
    heads = {
        request.body["messages"][0]["content"].partition("\n")[2]
        for request in found
        if request.kind == "side"
    }
    assert len(heads) == 1
    assert (
        len({canonical(request.body["messages"][1]) for request in found if request.kind == "side"})
        == 3
    )


@pytest.mark.parametrize("date_in", ["context", "system"])
def test_turns_differ_only_in_their_declared_changes(date_in):
    """Besides new messages, each turn differs from the one before only in its declared changes."""
    found = turns(dataclasses.replace(QUICK, date_in=date_in))
    for before, now in itertools.pairwise(found):
        (system, first, *rest) = now.body["messages"]
        (old_system, old_first, *old_rest) = before.body["messages"]
        seen = []
        if system["content"].splitlines()[0] != old_system["content"].splitlines()[0]:
            seen.append("billing")
        dated = [text for text in (system["content"], first["content"]) if "Today is" in text]
        old_dated = [
            text for text in (old_system["content"], old_first["content"]) if "Today is" in text
        ]
        where = 0 if date_in == "system" else 1
        assert dated == [now.body["messages"][where]["content"]]
        if without_billing(dated[0]) != without_billing(old_dated[0]):
            assert without_date(without_billing(dated[0])) == without_date(
                without_billing(old_dated[0])
            )
            seen.append("date")
        names, old_names = (
            [tool["function"]["name"] for tool in one.body["tools"]] for one in (now, before)
        )
        if names != old_names:
            seen.append("tools")
        keys, old_keys = ({json.dumps(tool) for tool in one.body["tools"]} for one in (now, before))
        if keys != old_keys:
            seen.append("keys")
        assert sorted(map(canonical, now.body["tools"])) == sorted(
            map(canonical, before.body["tools"])
        )
        assert rest[: len(old_rest)] == old_rest
        assert len(rest) > len(old_rest)
        assert (*seen, "thinking") == now.changes
    assert sum("date" in request.changes for request in found) == 1
    assert found[0].changes == ()


def test_no_thinking_is_sent_back():
    messages = [message for request in played() for message in request.body["messages"]]
    spoken = [message for message in messages if message["role"] == "assistant"]
    assert spoken
    assert all(set(message) == {"role", "content", "tool_calls"} for message in spoken)


def test_answers_are_sent_back_unchanged():
    last = turns()[-1].body["messages"]
    spoken = [message for message in last if message["role"] == "assistant"]
    results = [message for message in last if message["role"] == "tool"]
    assert len(spoken) == len(results) == 11
    assert {message["content"] for message in spoken} == {ASKED.content}
    assert {message["tool_calls"][0]["id"] for message in spoken} == {"given0001"}
    assert {message["tool_calls"][0]["function"]["arguments"] for message in spoken} == {
        ASKED.call[1]
    }
    assert {message["tool_call_id"] for message in results} == {"given0001"}


def test_an_answer_without_a_call_gets_no_tool_result():
    last = [request for request in played(answer=Answer("Hm.", None)) if request.kind == "turn"][-1]
    assert {message["role"] for message in last.body["messages"]} == {"system", "user", "assistant"}
    assert all("tool_calls" not in message for message in last.body["messages"])


def test_calls_without_an_id_get_one():
    messages = [request for request in played(answer=Answer()) if request.kind == "turn"][-1].body[
        "messages"
    ]
    ids = [call["id"] for message in messages for call in message.get("tool_calls", ())]
    assert len(set(ids)) == len(ids) == 11
    assert [message["tool_call_id"] for message in messages if message["role"] == "tool"] == ids


def test_without_a_billing_line():
    found = turns(dataclasses.replace(QUICK, billing=False))
    assert len({request.body["messages"][0]["content"] for request in found}) == 1
    assert not any("billing" in request.changes for request in found)


def test_the_written_call_fits_its_tool():
    tools = {
        tool["function"]["name"]: tool["function"]["parameters"]
        for tool in turns()[0].body["tools"]
    }
    assert set(json.loads(CALL[1])) >= set(tools[CALL[0]]["required"])
    assert set(json.loads(CALL[1])) <= set(tools[CALL[0]]["properties"])
