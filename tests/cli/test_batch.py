"""Tests of `kvboost-edge batch`: answers without a server, interrupted runs, and invalid files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from helpers.server.batch_files import jsonl, line, records_of

CHAT = "/v1/chat/completions"
SMALL = ("--option", "num_blocks=256", "--option", "max_num_seqs=4")


def chat(number, **more):
    content = f"Say {number}."
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0}
    return line(str(number), {**body, **more}, CHAT)


@pytest.fixture
def questions(tmp_path):
    """Function `questions(lines)` that writes an input file and returns its path."""

    def write(lines):
        path = tmp_path / "questions.jsonl"
        path.write_bytes(jsonl(lines))
        return path

    return write


def test_batch_answers_lines_of_several_routes(printed, questions, tmp_path):
    lines = [chat(n, model="of-another-service") for n in range(5)]
    lines += [line("text"), line("vectors", {"input": "x"}, "/v1/embeddings")]
    lines += [chat(9, colour="red")]
    out = tmp_path / "out.jsonl"
    shown = printed("batch", questions(lines), "-o", out, *SMALL)
    assert f"7 answers in {out}, 1 failed: {tmp_path / 'out.errors.jsonl'}" in " ".join(
        shown.err.split()
    )
    records = records_of(out.read_bytes())
    assert set(records) == {*"01234", "text", "vectors"}
    assert records["3"]["response"]["body"]["choices"][0]["message"]["content"]
    errors = records_of((tmp_path / "out.errors.jsonl").read_bytes())
    assert "colour" in errors["9"]["response"]["body"]["error"]["message"]


def test_a_second_run_answers_the_remaining_lines(printed, questions, tmp_path):
    path = questions([chat(n) for n in range(6)])
    answers = tmp_path / "questions.answers.jsonl"
    printed("batch", path, *SMALL)
    whole = answers.read_bytes()
    kept = whole.splitlines(keepends=True)[:2]
    answers.write_bytes(b"".join(kept) + b'{"custom_id": "5", "resp')
    shown = printed("batch", path, *SMALL)
    assert "2 lines are answered already" in shown.err
    again = answers.read_bytes()
    assert again.startswith(b"".join(kept))
    texts = [
        {name: one["response"]["body"]["choices"] for name, one in records_of(text).items()}
        for text in (whole, again)
    ]
    assert texts[0] == texts[1]
    assert "6 answers" in printed("batch", path, *SMALL).err, (
        "a finished batch must report all its answers"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "end", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.full)]
)
def test_an_interrupted_batch_can_be_resumed(printed, questions, tmp_path, end):
    path = questions([chat(n, max_tokens=40) for n in range(40)])
    answers = tmp_path / "questions.answers.jsonl"
    command = [sys.executable, "-m", "kvboost_edge", "batch", str(path), *SMALL]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        latest = time.monotonic() + 120
        while not (answers.exists() and answers.stat().st_size):
            assert time.monotonic() < latest
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(end)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    if end == signal.SIGINT:
        assert process.returncode == 130
        assert "run the command again" in error
    whole = answers.read_bytes().rpartition(b"\n")[0]
    done = len(records_of(whole))
    assert 0 < done < 40
    printed("batch", path, *SMALL)
    assert len(records_of(answers.read_bytes())) == 40
    assert answers.read_bytes().startswith(whole)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1: the file has no lines"),
        (b"{}\n", "1 wrong line; the first is line 1: custom_id must be"),
        (b"{\n{\n", "2 wrong lines; the first is line 1"),
        (jsonl([line("a", url="/v1/rerank")]), "url must be /v1/chat/completions or"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_invalid_files_are_refused(refused, tmp_path, content, message):
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    assert message in refused("batch", path, code=1)


def test_unusable_paths_are_refused(refused, questions, tmp_path):
    assert "nowhere.jsonl cannot be used: No such file" in refused(
        "batch", tmp_path / "nowhere.jsonl", code=1
    )
    path = questions([chat(1)])
    assert "is also the output file" in refused("batch", path, "-o", path)
    notes = tmp_path / "notes.txt"
    notes.write_text("mine\n")
    assert "is no answer of a batch" in refused("batch", path, "-o", notes, code=1)
    assert notes.read_text() == "mine\n"
    assert "cannot be used" in refused("batch", path, "-o", tmp_path / "no" / "out.jsonl", code=1)
    assert json.loads(path.read_bytes())["custom_id"] == "1"
    assert os.listdir(tmp_path)
