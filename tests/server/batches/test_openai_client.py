"""Tests of the batch API with OpenAI's client and a real server."""

import io
import time

import openai
import pytest

from helpers.server.batch_files import jsonl, line, records_of
from helpers.server.live_servers import serving

CHAT = "/v1/chat/completions"


@pytest.fixture
def client(demo_engine, tmp_path):
    with (
        serving(demo_engine, batch_dir=tmp_path, max_body_bytes=4096) as server,
        openai.OpenAI(
            base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=60
        ) as client,
    ):
        yield client


def ended(client, batch_id):
    for _ in range(3000):
        batch = client.batches.retrieve(batch_id)
        if batch.status not in ("validating", "in_progress", "finalizing", "cancelling"):
            return batch
        time.sleep(0.02)
    raise AssertionError(batch)


def question(number):
    return {
        "messages": [{"role": "user", "content": f"Say {number}. " + "Please. " * 50}],
        "max_tokens": 5,
        "temperature": 0,
    }


def test_openai_client_runs_a_batch(client):
    content = jsonl(line(str(n), question(n), CHAT) for n in range(20))
    assert len(content) > 4096, "the file must be larger than the limit of a body"
    file = client.files.create(
        file=("questions.jsonl", io.BytesIO(content)),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 7200},
    )
    assert (file.bytes, file.filename, file.purpose) == (len(content), "questions.jsonl", "batch")
    assert file.expires_at == file.created_at + 7200
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).content == content
    assert [one.id for one in client.files.list()] == [file.id]
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint=CHAT,
        completion_window="24h",
        metadata={"name": "test"},
        output_expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert batch.metadata == {"name": "test"}
    assert batch.expires_at == batch.created_at + 24 * 3600
    batch = ended(client, batch.id)
    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed) == (20, 20)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    assert [one.id for one in client.batches.list()] == [batch.id]
    records = records_of(client.files.content(batch.output_file_id).text)
    assert set(records) == {str(n) for n in range(20)}
    direct = client.chat.completions.create(model="kvboost-edge/demo", **question(7))
    answer = records["7"]["response"]["body"]
    assert answer["choices"][0]["message"]["content"] == direct.choices[0].message.content
    output = client.files.retrieve(batch.output_file_id)
    assert output.expires_at - output.created_at == 3600
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_openai_client_cancels_and_raises_errors(client):
    file = client.files.create(
        file=jsonl(line(str(n), {**question(n), "max_tokens": 60}, CHAT) for n in range(100)),
        purpose="batch",
    )
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.ConflictError, match="reads the file"):
        client.files.delete(file.id)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch.id)
    assert batch.status == "cancelled"
    assert batch.cancelling_at <= batch.cancelled_at
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=b"x", purpose="fine-tune")
    with pytest.raises(openai.NotFoundError, match="there is no batch"):
        client.batches.retrieve("batch_x")


def test_a_batch_continues_after_a_restart(demo_engine, tmp_path):
    content = jsonl(line(str(n), question(n), CHAT) for n in range(40))
    batch_id = ""
    for _ in range(2):
        with (
            serving(demo_engine, batch_dir=tmp_path, max_batch_size=2) as server,
            openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none") as client,
        ):
            if batch_id:
                batch = ended(client, batch_id)
            else:
                file = client.files.create(file=content, purpose="batch")
                batch_id = client.batches.create(
                    input_file_id=file.id, endpoint=CHAT, completion_window="24h"
                ).id
                while client.batches.retrieve(batch_id).request_counts.completed < 3:
                    time.sleep(0.01)
                continue
            assert batch.request_counts.completed == 40
            records = records_of(client.files.content(batch.output_file_id).text)
            assert len(records) == 40
