"""Tests of batches over ASGI, from upload to output file: responses, errors, limits, restarts."""

import asyncio
import errno
import json
import random
import threading

import pytest
from pydantic import TypeAdapter

from helpers.server.batch_files import COMPLETIONS, batch_app, jsonl, line
from helpers.server.live_servers import HeldForward
from kvboost_edge.server.batches import service
from kvboost_edge.server.batches.execution import LineRecords, LinesStopped, run_lines
from kvboost_edge.server.batches.input_lines import BatchLine
from kvboost_edge.server.batches.route_calls import LineCaller
from kvboost_edge.server.batches.tenant_space import TenantSpace
from kvboost_edge.server.response_types import (
    BatchList,
    BatchObject,
    DeleteFileResponse,
    FileList,
    FileObject,
)

GREEDY = {"max_tokens": 4, "temperature": 0}


@pytest.fixture
async def client(tiny_engine, tmp_path):
    async with batch_app(tiny_engine, tmp_path) as client:
        yield client


async def plain(client, body, url=COMPLETIONS):
    """Return the response of the route itself, without a batch."""
    return (await client.http.post(url, json=body)).json()


async def test_answers_equal_the_routes_answers(client):
    bodies = {str(n): {"prompt": f"number {n}", **GREEDY} for n in range(12)}
    created = await client.create(
        jsonl(line(name, body) for name, body in bodies.items()), metadata={"for": "me"}
    )
    assert created.status_code == 200, created.text
    assert created.json()["status"] == "validating"
    batch = await client.ended(created.json()["id"])
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 12, "completed": 12, "failed": 0}
    assert batch["metadata"] == {"for": "me"}
    assert batch["error_file_id"] is None
    records = await client.records(batch["output_file_id"])
    assert set(records) == set(bodies)
    for name, record in records.items():
        answer = await plain(client, bodies[name])
        assert record["error"] is None
        assert record["response"]["status_code"] == 200
        assert record["response"]["body"]["choices"] == answer["choices"]
        assert record["response"]["request_id"].startswith("req-")
        usage = record["response"]["body"]["usage"]
        assert usage["completion_tokens"] == answer["usage"]["completion_tokens"]


async def test_a_change_does_not_swallow_a_stop(client):
    batches = client.app.state.kv.batches
    await asyncio.sleep(0.05)  # the service waits for a change
    batches.start()
    await asyncio.wait_for(batches.stop(), timeout=20)


async def test_answers_match_their_response_types(client):
    lines = jsonl([line("good"), line("bad", {"prompt": "x", "max_tokens": -1})])
    file = await client.upload(lines)
    created = await client.create(lines)
    batch = f"/v1/batches/{created.json()['id']}"
    await client.ended(created.json()["id"])
    answers = [
        (FileObject, file),
        (BatchObject, created),
        (BatchObject, await client.http.get(batch)),
        (BatchList, await client.http.get("/v1/batches")),
        (FileList, await client.http.get("/v1/files")),
        (FileObject, await client.http.get(f"/v1/files/{file.json()['id']}")),
        (DeleteFileResponse, await client.http.delete(f"/v1/files/{file.json()['id']}")),
    ]
    for kind, answer in answers:
        assert answer.status_code == 200, answer.text
        TypeAdapter(kind).validate_json(answer.content, strict=True)


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/embeddings", {"input": ["one", "two"]}),
        ("/v1/responses", {"input": "one", "max_output_tokens": 16}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ],
    ids=["embeddings", "responses", "chat"],
)
async def test_every_route_works_in_a_batch(client, url, body):
    """The tiny model has no chat template, so each chat line is rejected, as over HTTP."""
    direct = await client.http.post(url, json=body)
    created = await client.create(jsonl([line("a", body, url)]), endpoint=url)
    batch = await client.ended(created.json()["id"])
    assert batch["status"] == "completed"
    file_id = batch["output_file_id"] or batch["error_file_id"]
    record = (await client.records(file_id))["a"]
    assert record["response"]["status_code"] == direct.status_code
    assert set(record["response"]["body"]) == set(direct.json())


async def test_failed_lines_are_in_the_error_file(client):
    lines = [
        line("good"),
        line("field", {"prompt": "x", "colour": "red"}),
        line("value", {"prompt": "x", "max_tokens": -1}),
        line("model", {"prompt": "x", "model": "unknown"}),
        line("long", {"prompt": "x " * 5000, "max_tokens": 1}),
    ]
    batch = await client.ended((await client.create(jsonl(lines))).json()["id"])
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 5, "completed": 1, "failed": 4}
    assert set(await client.records(batch["output_file_id"])) == {"good"}
    records = await client.records(batch["error_file_id"])
    for one in lines[1:]:
        record = records[one["custom_id"]]
        direct = await client.http.post(COMPLETIONS, json=one["body"])
        assert record["response"]["status_code"] == direct.status_code >= 400
        assert record["response"]["body"] == direct.json()


async def test_an_invalid_file_fails_the_batch(client):
    created = await client.create(jsonl([line("a"), line("a"), line("b", url="/v1/x")]))
    batch = await client.ended(created.json()["id"])
    assert (batch["status"], batch["output_file_id"]) == ("failed", None)
    found = [(one["code"], one["line"]) for one in batch["errors"]["data"]]
    assert found == [("duplicate_custom_id", 2), ("invalid_url", 3)]


async def test_lines_of_a_batch_are_bounded(tiny_engine, tmp_path):
    async with batch_app(tiny_engine, tmp_path, max_batch_lines=2) as client:
        created = await client.create(jsonl(line(n) for n in "abc"))
        batch = await client.ended(created.json()["id"])
        assert batch["errors"]["data"][0]["code"] == "too_many_lines"
        created = await client.create(jsonl(line(n) for n in "ab"))
        assert (await client.ended(created.json()["id"]))["status"] == "completed"


async def test_a_batch_stops_at_the_size_limit_of_its_answers(tiny_engine, tmp_path):
    async with batch_app(tiny_engine, tmp_path, max_file_bytes=6000, max_batch_size=1) as client:
        created = await client.create(jsonl(line(str(n)) for n in range(40)))
        batch = await client.ended(created.json()["id"])
        assert batch["status"] == "failed"
        assert batch["errors"]["data"][0]["code"] == "file_bytes_limit"
        counts = batch["request_counts"]
        assert 0 < counts["completed"] < 40
        records = await client.records(batch["output_file_id"])
        assert len(records) == counts["completed"]
        assert (await client.upload(b"x")).status_code == 413


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/rerank"}, "endpoint"),
        ({"completion_window": "1w"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"input_file_id": "file-" + "0" * 32}, "input_file_id"),
        ({"input_file_id": "../../etc/passwd"}, "input_file_id"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
        ({"metadata": {"x": "y" * 513}}, "metadata"),
        ({"metadata": {"": "x"}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 10}}, "output_expires_after"),
        ({"colour": "red"}, "colour"),
    ],
    ids=repr,
)
async def test_invalid_batches_are_refused_by_name(client, fields, param):
    answer = await client.create(jsonl([line("a")]), **fields)
    assert answer.status_code == (404 if param == "input_file_id" else 400), answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "fine-tune"}, "purpose"),
        ({"colour": "red"}, "colour"),
        ({"expires_after[seconds]": "7200"}, "expires_after"),
        ({"expires_after[anchor]": "created_at"}, "expires_after"),
        (
            {"expires_after[anchor]": "created_at", "expires_after[seconds]": "10"},
            "expires_after",
        ),
    ],
    ids=repr,
)
async def test_invalid_uploads_are_refused_by_name(client, fields, param):
    answer = await client.upload(b"x", **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert (await client.http.get("/v1/files")).json()["data"] == []


async def test_files_and_batches_are_listed_in_pages(client):
    ids = [(await client.upload(jsonl([line(str(n))]))).json()["id"] for n in range(3)]
    everything = (await client.http.get("/v1/files")).json()
    assert {one["id"] for one in everything["data"]} == set(ids)
    assert everything["has_more"] is False
    order = [one["id"] for one in everything["data"]]
    page = (await client.http.get("/v1/files", params={"limit": 2})).json()
    assert [one["id"] for one in page["data"]] == order[:2]
    assert (page["first_id"], page["last_id"], page["has_more"]) == (*order[:2], True)
    rest = await client.http.get("/v1/files", params={"after": order[1], "order": "desc"})
    assert [one["id"] for one in rest.json()["data"]] == order[2:]
    back = await client.http.get("/v1/files", params={"order": "asc"})
    assert [one["id"] for one in back.json()["data"]] == order[::-1]
    none = await client.http.get("/v1/files", params={"purpose": "batch_output"})
    assert none.json()["data"] == []
    for path in ("/v1/files", "/v1/batches"):
        assert (await client.http.get(path, params={"after": "file-x"})).status_code == 400
    made = []
    for file_id in ids:
        answer = await client.http.post(
            "/v1/batches",
            json={
                "input_file_id": file_id,
                "endpoint": COMPLETIONS,
                "completion_window": "7d",
            },
        )
        made.append(answer.json()["id"])
    listed = (await client.http.get("/v1/batches", params={"limit": 2})).json()
    assert len(listed["data"]) == 2
    assert listed["has_more"] is True
    for batch_id in made:
        assert (await client.ended(batch_id))["status"] == "completed"


async def test_files_are_deleted(client):
    file_id = (await client.upload(b"abc")).json()["id"]
    assert (await client.http.get(f"/v1/files/{file_id}/content")).content == b"abc"
    assert (await client.http.delete(f"/v1/files/{file_id}")).json()["deleted"] is True
    for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content"):
        assert (await client.http.get(path)).status_code == 404
    assert (await client.http.delete(f"/v1/files/{file_id}")).status_code == 404


async def test_batches_are_off_without_a_directory(tiny_app):
    calls = (
        ("GET", "/v1/files"),
        ("POST", "/v1/files"),
        ("GET", "/v1/batches"),
        ("GET", "/v1/files/x/content"),
        ("POST", "/v1/batches/x/cancel"),
    )
    for method, path in calls:
        answer = await tiny_app.request(method, path)
        assert answer.status_code == 404
        assert "--batch-dir" in answer.json()["error"]["message"]


async def test_tenants_see_only_their_own(tiny_engine, tmp_path):
    keys = ("key-one", "key-two")
    async with batch_app(tiny_engine, tmp_path, keys[0], api_keys=keys, max_batches=1) as client:
        held = HeldForward(tiny_engine)
        created = await client.create(jsonl([line("a")]))
        batch_id, file_id = (created.json()[name] for name in ("id", "input_file_id"))
        other = {"x-api-key": keys[1]}
        for method, path in (
            ("GET", f"/v1/files/{file_id}"),
            ("GET", f"/v1/files/{file_id}/content"),
            ("DELETE", f"/v1/files/{file_id}"),
            ("GET", f"/v1/batches/{batch_id}"),
            ("POST", f"/v1/batches/{batch_id}/cancel"),
        ):
            answer = await client.http.request(method, path, headers=other)
            assert answer.status_code == 404, path
        for path in ("/v1/files", "/v1/batches"):
            assert (await client.http.get(path, headers=other)).json()["data"] == []
        refused = await client.create(jsonl([line("b")]))
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "batch_limit")
        assert "--max-batches" in refused.json()["error"]["message"]
        client.http.headers.update(other)
        second = await client.create(jsonl([line("c")]))
        assert second.status_code == 200
        held.release()
        assert (await client.ended(second.json()["id"]))["status"] == "completed"
        client.http.headers.update({"x-api-key": keys[0]})
        assert (await client.ended(batch_id))["status"] == "completed"


async def test_cancel_keeps_the_answers_so_far(tiny_engine, tmp_path):
    async with batch_app(tiny_engine, tmp_path, max_batch_size=1) as client:
        created = await client.create(jsonl(line(str(n)) for n in range(300)))
        batch_id = created.json()["id"]
        while (await client.batch(batch_id))["request_counts"]["completed"] < 3:
            await asyncio.sleep(0.005)
        answer = await client.http.post(f"/v1/batches/{batch_id}/cancel")
        assert answer.json()["status"] == "cancelling"
        batch = await client.ended(batch_id)
        assert batch["status"] == "cancelled"
        records = await client.records(batch["output_file_id"])
        assert 3 <= len(records) == batch["request_counts"]["completed"] < 300
        again = await client.http.post(f"/v1/batches/{batch_id}/cancel")
        assert (again.status_code, again.json()["error"]["code"]) == (409, "batch_finished")
        assert tiny_engine.paged_stats()["num_running"] == 0


async def test_a_queued_batch_can_be_cancelled(tiny_engine, tmp_path):
    async with batch_app(tiny_engine, tmp_path) as client:
        held = HeldForward(tiny_engine)
        first, second = [(await client.create(jsonl([line("a")]))).json()["id"] for _ in range(2)]
        await client.http.post(f"/v1/batches/{second}/cancel")
        assert (await client.ended(second))["status"] == "cancelled"
        held.release()
        assert (await client.ended(first))["status"] == "completed"


@pytest.mark.parametrize("stops", [pytest.param(1, marks=pytest.mark.full), 3])
async def test_a_restart_answers_each_line_once(tiny_engine, tmp_path, stops, monkeypatch):
    called = []
    real = LineCaller.__call__

    async def counted(self, path, body, **options):
        answer = await real(self, path, body, **options)
        called.append(body["prompt"])
        return answer

    monkeypatch.setattr(LineCaller, "__call__", counted)
    lines = [line(str(n), {"prompt": f"number {n}", **GREEDY}) for n in range(60)]
    batch_id = ""
    for stop in range(stops):
        async with batch_app(tiny_engine, tmp_path, max_batch_size=4) as client:
            batch_id = batch_id or (await client.create(jsonl(lines))).json()["id"]
            while (await client.batch(batch_id))["request_counts"]["completed"] < 5 * (stop + 1):
                await asyncio.sleep(0.002)
    async with batch_app(tiny_engine, tmp_path, max_batch_size=4) as client:
        batch = await client.ended(batch_id)
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 60, "completed": 60, "failed": 0}
        records = await client.records(batch["output_file_id"])
        assert set(records) == {str(n) for n in range(60)}
        assert len(called) < 60 + 5 * stops, "only lines in flight may be recomputed"
        for name in ("3", "40"):
            answer = await plain(client, {"prompt": f"number {name}", **GREEDY})
            assert records[name]["response"]["body"]["choices"] == answer["choices"]


@pytest.mark.parametrize("point", ["save", "publish"])
async def test_a_crash_while_a_batch_finishes_loses_nothing(
    tiny_engine, tmp_path, monkeypatch, point, caplog
):
    """The failure simulates the death of the process: only the files on disk at that moment remain."""

    died = asyncio.Event()
    loop = asyncio.get_running_loop()

    def dies(self, batch, *_):
        if batch.outcome is not None:
            loop.call_soon_threadsafe(died.set)
            raise OSError(5, "gone")
        return real(self, batch)

    async with batch_app(tiny_engine, tmp_path) as client:
        real = getattr(TenantSpace, point)
        monkeypatch.setattr(TenantSpace, point, dies)
        batch_id = (await client.create(jsonl([line("a"), line("b")]))).json()["id"]
        await asyncio.wait_for(died.wait(), 20)
    monkeypatch.undo()
    async with batch_app(tiny_engine, tmp_path) as client:
        batch = await client.ended(batch_id)
        assert batch["status"] == "completed"
        assert set(await client.records(batch["output_file_id"])) == {"a", "b"}


async def test_an_expired_batch_lists_unanswered_lines(tiny_engine, tmp_path):
    async with batch_app(tiny_engine, tmp_path, max_batch_size=1) as client:
        created = await client.create(jsonl(line(str(n)) for n in range(200)))
        batch_id = created.json()["id"]
        while (await client.batch(batch_id))["request_counts"]["completed"] < 2:
            await asyncio.sleep(0.005)
    (path,) = tmp_path.glob(f"*/batches/{batch_id}/batch.json")
    stored = json.loads(path.read_bytes())
    path.chmod(0o600)
    path.write_text(json.dumps({**stored, "expires_at": stored["created_at"]}))
    async with batch_app(tiny_engine, tmp_path) as client:
        batch = await client.ended(batch_id)
        assert batch["status"] == "expired"
        counts = batch["request_counts"]
        assert counts["completed"] + counts["failed"] == 200
        assert counts["completed"] >= 2
        records = await client.records(batch["error_file_id"])
        assert {one["error"]["code"] for one in records.values()} == {"batch_expired"}
        done = await client.records(batch["output_file_id"])
        assert not set(done) & set(records)


async def test_shared_prefixes_are_computed_once(tiny_engine, tmp_path):
    rng = random.Random(1)
    documents = [rng.choices(range(200), k=150) for _ in range(4)]
    lines = [
        line(f"{d}-{q}", {"prompt": [*documents[d], q], "max_tokens": 1})
        for q in range(8)
        for d in range(4)
    ]
    async with batch_app(tiny_engine, tmp_path, max_batch_size=2) as client:
        batch = await client.ended((await client.create(jsonl(lines))).json()["id"])
        records = await client.records(batch["output_file_id"])
        cached = [
            one["response"]["body"]["usage"]["prompt_tokens_details"]["cached_tokens"]
            for one in records.values()
        ]
        assert sum(number >= 144 for number in cached) == 32 - 4


async def test_batch_lines_do_not_occupy_the_request_queue(tiny_engine, tmp_path):
    """Running lines do not count towards --max-queue-size."""
    async with batch_app(
        tiny_engine, tmp_path, max_batch_size=2, max_queue_size=0, batch_background="idle"
    ) as client:
        created = await client.create(jsonl(line(str(n)) for n in range(30)))
        for _ in range(5):
            answers = await asyncio.gather(
                *(client.http.post(COMPLETIONS, json=line(n)["body"]) for n in "ab")
            )
            assert [one.status_code for one in answers] == [200, 200]
        assert (await client.ended(created.json()["id"]))["request_counts"]["failed"] == 0


async def test_batches_of_tenants_run_side_by_side(tiny_engine, tmp_path):
    keys = ("key-one", "key-two")
    async with batch_app(tiny_engine, tmp_path, keys[0], api_keys=keys, max_batch_size=2) as client:
        long = (await client.create(jsonl(line(str(n)) for n in range(200)))).json()["id"]
        client.http.headers["x-api-key"] = keys[1]
        short = (await client.create(jsonl([line("a")]))).json()["id"]
        assert (await client.ended(short))["status"] == "completed"
        client.http.headers["x-api-key"] = keys[0]
        assert (await client.batch(long))["status"] == "in_progress"


async def test_a_refused_line_is_retried(tiny_engine, tmp_path, monkeypatch):
    async with batch_app(tiny_engine, tmp_path) as client:
        caller = client.app.state.kv.batches._call
        real = type(caller).__call__
        refused = []

        async def busy(self, path, body, **options):
            answer = await real(self, path, body, **options)
            if len(refused) < 3:
                refused.append(body)
                return answer._replace(status=503, code="model_loading", retry_after=0.01)
            return answer

        monkeypatch.setattr(type(caller), "__call__", busy)
        batch = await client.ended((await client.create(jsonl([line("a")]))).json()["id"])
        assert batch["request_counts"]["completed"] == 1
        assert len(refused) == 3


async def test_prompts_are_not_logged(client, caplog):
    caplog.set_level("DEBUG")
    secret = "wombat-4711"
    lines = [line("a", {"prompt": secret}), line("b", {"prompt": secret, "colour": secret})]
    await client.ended((await client.create(jsonl(lines))).json()["id"])
    assert secret not in caplog.text


@pytest.fixture
def soon(monkeypatch):
    """Batches that stop are tried again after a very short time."""
    monkeypatch.setattr(service, "_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(service, "_MAX_RETRY_SECONDS", 0.008)


def failing(monkeypatch, fails):
    """Let calls of routes return "no_replica" while `fails(body)` is true."""
    real = LineCaller.__call__

    async def call(self, path, body, **options):
        answer = await real(self, path, body, **options)
        if fails(body):
            return answer._replace(status=503, code="no_replica", retry_after=5.0)
        return answer

    monkeypatch.setattr(LineCaller, "__call__", call)


@pytest.mark.usefixtures("soon")
async def test_a_batch_continues_after_an_outage(tiny_engine, tmp_path, monkeypatch, caplog):
    """The delay doubles with each failure, and starts anew after an answered line."""
    calls = []

    def fails(body):
        calls.append(body["prompt"])
        return len(calls) <= 5 or len(calls) == 7

    failing(monkeypatch, fails)
    async with batch_app(tiny_engine, tmp_path, max_batch_size=1) as client:
        created = await client.create(jsonl(line(name) for name in "abc"))
        batch = await client.ended(created.json()["id"])
        assert batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
        assert set(await client.records(batch["output_file_id"])) == {"a", "b", "c"}
    assert len(calls) == 6 + 3
    delays = [record.facts["seconds"] for record in caplog.records if record.levelname == "ERROR"]
    assert delays == [0.001, 0.002, 0.004, 0.008, 0.008, 0.001]


@pytest.mark.usefixtures("soon")
async def test_a_batch_continues_after_a_full_disk(tiny_engine, tmp_path, monkeypatch):
    real = LineRecords.add
    failures = iter([False, True, True])

    def add(self, *arguments):
        if next(failures, False):
            raise OSError(errno.ENOSPC, "full")
        real(self, *arguments)

    monkeypatch.setattr(LineRecords, "add", add)
    async with batch_app(tiny_engine, tmp_path) as client:
        created = await client.create(jsonl(line(name) for name in "abcd"))
        batch = await client.ended(created.json()["id"])
        assert batch["request_counts"] == {"total": 4, "completed": 4, "failed": 0}
        assert set(await client.records(batch["output_file_id"])) == set("abcd")


async def test_the_input_is_closed_when_the_lines_stop():
    """An open input could not be deleted on Windows."""
    closed = threading.Event()

    def lines():
        try:
            yield BatchLine(1, "a", COMPLETIONS, 0, 2, b""), {}
        finally:
            closed.set()

    async def call(url, body):
        raise LinesStopped("the server stops")

    with pytest.raises(LinesStopped) as stopped:
        await run_lines(lines(), call, None, lambda: 1, lambda: None)
    assert closed.is_set(), f"open until {stopped.value!r} is collected"


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("status", ["cancelled", "expired"])
@pytest.mark.parametrize("where", ["call", "read"])
async def test_a_batch_that_always_stops_blocks_no_other_and_ends(
    tiny_engine, tmp_path, monkeypatch, status, where
):
    real = service.read_lines

    def read(path, *arguments):
        lines, problems = real(path, *arguments)
        if lines[0].custom_id == "stuck":
            raise OSError(errno.EIO, "gone")
        return lines, problems

    if where == "read":
        monkeypatch.setattr(service, "read_lines", read)
    else:
        failing(monkeypatch, lambda body: body["prompt"] == "say stuck")
    async with batch_app(tiny_engine, tmp_path) as client:
        batch_id = (await client.create(jsonl([line("stuck")]))).json()["id"]
        other = (await client.create(jsonl([line("a")]))).json()["id"]
        assert (await client.ended(other))["status"] == "completed"
        assert (await client.batch(batch_id))["status"] in ("validating", "in_progress")
        if status == "cancelled":
            await client.http.post(f"/v1/batches/{batch_id}/cancel")
        else:
            # Between two attempts, because a call of an attempt may last until the batch expires.
            batches = client.app.state.kv.batches
            while batch_id not in batches._delayed:
                await asyncio.sleep(0)
            (space,) = batches.store
            space.batch(batch_id).expires_at = space.now()
        assert (await client.ended(batch_id))["status"] == status


async def test_cancelling_a_delayed_batch_ends_it_at_once(tiny_engine, tmp_path, monkeypatch):
    monkeypatch.setattr(service, "_RETRY_SECONDS", 600.0)
    failing(monkeypatch, lambda body: True)
    async with batch_app(tiny_engine, tmp_path) as client:
        batch_id = (await client.create(jsonl([line("a")]))).json()["id"]
        while batch_id not in client.app.state.kv.batches._delayed:
            await asyncio.sleep(0.005)
        await client.http.post(f"/v1/batches/{batch_id}/cancel")
        assert (await client.ended(batch_id))["status"] == "cancelled"
