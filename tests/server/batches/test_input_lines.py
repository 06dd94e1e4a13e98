"""Tests of input lines: rejected lines, and the order that groups common prefixes."""

import itertools
import json
import random

import pytest

from helpers.server.batch_files import jsonl, line
from kvboost_edge.server.batches.input_lines import by_prefix, read_bodies, read_lines

LIMITS = (100, 10_000)


def problems(tmp_path, content, endpoint="/v1/completions"):
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    return read_lines(path, endpoint, *LIMITS)[1]


@pytest.mark.parametrize(
    ("content", "code", "number"),
    [
        (b"", "empty_file", 1),
        (b"\n \n", "empty_file", 1),
        (b"{", "invalid_json_line", 1),
        (b'{"a": NaN', "invalid_json_line", 1),
        (b"\xff\xfe", "invalid_json_line", 1),
        (b"[" * 5000, "invalid_json_line", 1),
        (b"9" * 5000, "invalid_json_line", 1),
        (b"[]", "invalid_json_line", 1),
        (jsonl([line("a"), line("a")]), "duplicate_custom_id", 2),
        (jsonl([line("a"), {**line("b"), "more": 1}]), "unknown_field", 2),
        (jsonl([line("")]), "invalid_custom_id", 1),
        (jsonl([line("a\nb")]), "invalid_custom_id", 1),
        (jsonl([line("a" * 513)]), "invalid_custom_id", 1),
        (jsonl([{**line("a"), "custom_id": 3}]), "invalid_custom_id", 1),
        (jsonl([{**line("a"), "method": "GET"}]), "invalid_method", 1),
        (jsonl([line("a", url="/v1/embeddings")]), "invalid_url", 1),
        (jsonl([line("a", url=["/v1/completions"])]), "invalid_url", 1),
        (jsonl([{**line("a"), "body": []}]), "invalid_body", 1),
        (jsonl([line("a", {"prompt": "x", "stream": True})]), "stream_unsupported", 1),
        (jsonl([line("a", {"prompt": "x" * 10_000})]), "line_too_long", 1),
        (jsonl(line(str(n)) for n in range(101)), "too_many_lines", 101),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_invalid_input_files_are_refused(tmp_path, content, code, number):
    found = problems(tmp_path, content)
    assert (found[0].code, found[0].line) == (code, number)


def test_invalid_lines_are_reported_up_to_a_limit(tmp_path):
    assert len(problems(tmp_path, b"{\n" * 70)) == 50


def test_bodies_are_read_from_their_lines(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n" + jsonl([line("ä"), line("b")]) + b"\r\n" + jsonl([line("c")]).strip())
    lines, wrong = read_lines(path, None, *LIMITS)
    assert not wrong
    assert [one.number for one in lines] == [2, 3, 5]
    bodies = {one.custom_id: body for one, body in read_bodies(path, lines[::-1])}
    assert bodies == {name: line(name)["body"] for name in "äbc"}


@pytest.mark.parametrize("kind", ["messages", "prompt", "input"])
def test_lines_with_a_common_prefix_are_adjacent(tmp_path, kind):
    rng = random.Random(1)
    documents = ["".join(rng.choices("abcdefgh ", k=1500)) for _ in range(10)]

    def body(document, question):
        text = f"{document} {question}"
        value = [{"role": "user", "content": text}] if kind == "messages" else text
        # The fields of a body may be in any order, with others between them.
        fields = [("max_tokens", question), (kind, value), ("model", "m")]
        return dict(rng.sample(fields, 3))

    lines = [
        line(f"{document}-{question}", body(documents[document], question))
        for document in range(10)
        for question in range(20)
    ]
    rng.shuffle(lines)
    path = tmp_path / "in.jsonl"
    path.write_bytes(jsonl(lines))
    found, _ = read_lines(path, None, 1000, 100_000)
    order = [one.custom_id.partition("-")[0] for one in by_prefix(found)]
    changes = sum(one != after for one, after in itertools.pairwise(order))
    assert changes == 9
    assert sorted(one.custom_id for one in by_prefix(found)) == sorted(
        one["custom_id"] for one in map(json.loads, path.read_text().splitlines())
    )


def test_lines_are_grouped_by_model_and_route(tmp_path):
    lines = [
        line(f"{number}", {"model": model, "prompt": f"{number}"}, url)
        for number, (model, url) in enumerate(
            [("a", "/v1/completions"), ("b", "/v1/completions"), ("a", "/v1/embeddings")] * 4
        )
    ]
    path = tmp_path / "in.jsonl"
    path.write_bytes(jsonl(lines))
    found, _ = read_lines(path, None, 1000, 100_000)
    groups = [int(one.custom_id) % 3 for one in by_prefix(found)]
    assert sum(one != after for one, after in itertools.pairwise(groups)) == 2
