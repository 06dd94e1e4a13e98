"""Tests of limits per API key: resources taken by one key are refused to that key and not to
another.
"""

import pytest

from helpers.server.batch_files import batch_app

KEYS = ("first-key", "second-key")
OTHER = {"x-api-key": KEYS[1]}


@pytest.fixture
def limited(tiny_engine, tmp_path):
    """Function `limited(**settings)` that starts the app with a client of the first of two keys."""
    return lambda **settings: batch_app(tiny_engine, tmp_path, KEYS[0], api_keys=KEYS, **settings)


async def post(client, path, body, **options):
    return await client.http.post(path, json=body, **options)


def error_of(answer):
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "n": 7}),
        ("/v1/completions", {"prompt": "a", "n": 1, "best_of": 7}),
        ("/v1/completions", {"prompt": ["a"] * 7, "n": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 7}),
    ],
)
async def test_choices_beyond_a_keys_share_are_refused(limited, path, body):
    """Two of eight places are reserved for each key, so one key can use at most six."""
    async with limited(max_batch_size=2, max_queue_size=6) as client:
        for answer in (
            await post(client, path, {**body, "max_tokens": 1}),
            await post(client, path, {**body, "max_tokens": 1}, headers=OTHER),
        ):
            assert error_of(answer) == (
                400,
                "request_too_large",
                "the request needs 7 sequences, but the limit is 6; request fewer, or raise "
                "--max-queue-size",
            )
        for headers in (None, OTHER):
            fits = {**body, "max_tokens": 1}
            fits |= {name: 6 for name in ("n", "best_of") if body.get(name) == 7}
            if isinstance(body.get("prompt"), list):
                fits["prompt"] = ["a"] * 6
            answer = await post(client, path, fits, headers=headers)
            assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("settings", "status", "code", "flag"),
    [
        ({"max_files": 1}, 400, "file_limit", "--max-files"),
        ({"max_file_bytes": 1500}, 413, "file_bytes_limit", "--max-file-bytes"),
    ],
)
async def test_files_beyond_a_keys_limit_are_refused(limited, settings, status, code, flag):
    async with limited(**settings) as client:
        first = await client.upload(b"a" * 1000)
        assert first.status_code == 200
        refused = error_of(await client.upload(b"b" * 1000))
        assert refused[:2] == (status, code)
        assert flag in refused[2]
        other = await client.http.post(
            "/v1/files",
            files={"file": ("in.jsonl", b"c" * 1000)},
            data={"purpose": "batch"},
            headers=OTHER,
        )
        assert other.status_code == 200
        await client.http.delete(f"/v1/files/{first.json()['id']}")
        assert (await client.upload(b"b" * 1000)).status_code == 200
