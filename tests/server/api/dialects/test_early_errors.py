"""An error that comes together with the first token: each API tells it, as a status or in the stream, and all that the
request held comes back."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest

from helpers.engine.fake_runner import hold_passes, runner_of
from helpers.server.api_bodies import GENERATING, asked, error_text
from helpers.server.live_servers import wait_until
from kvboost_edge.engine.handle import RequestHandle
from server.api.test_tools import Speaker

CASES = [(path, more) for path in GENERATING for more in ({"stream": False}, {"stream": True})]
CASES += [("/v1/chat/completions", {"stream": True, "n": 3}), ("/v1/completions", {"stream": True, "n": 3})]


def pieces_of(text: str) -> list[dict[str, Any]]:
    """The JSON of each event, or of each line."""
    lines = [line.removeprefix("data: ") for line in text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[BaseException | None]:
    """The errors of the sequences that ended."""
    found: list[BaseException | None] = []
    finish = RequestHandle._finish

    def finish_and_say(handle: RequestHandle, result: Any, error: BaseException | None) -> None:
        finish(handle, result, error)
        found.append(error)

    monkeypatch.setattr(RequestHandle, "_finish", finish_and_say)
    return found


@pytest.mark.parametrize(("path", "more"), CASES)
async def test_an_error_that_comes_with_the_first_token_is_told(
    app: httpx.AsyncClient, speaker: Speaker, spoken_engine: Any, ended: Any, path: str, more: dict[str, Any]
) -> None:
    speaker.text = "Zebras and others."
    runner, go = runner_of(spoken_engine), threading.Event()
    (broken,) = spoken_engine.tokenizer.codec.encode("Z", False)
    body = asked(path, "<|assistant|>", tokens=9, **more)
    if path.startswith("/api/"):
        body["model"] = "fake"
    body.get("options", body)["temperature"] = 0
    hold_passes(spoken_engine, go)
    try:
        task = asyncio.ensure_future(app.post(path, json=body))
        while not spoken_engine.num_running():
            await asyncio.sleep(0.001)
        runner.nan_for = {broken}  # what is computed behind the first token is no number
        go.set()
        # The loop stands still until all has happened, so that it sees the token and the error at once.
        wait_until(lambda: len(ended) == more.get("n", 1), "the error")
        answer = await asyncio.wait_for(task, 30)
    finally:
        runner.nan_for, runner.on_forward = set(), None
    assert None not in ended
    if answer.status_code != 200:
        assert answer.status_code == 500
        assert error_text(path, answer.content)
    else:
        assert more["stream"], "a whole answer has a status"
        last = pieces_of(answer.text)[-1]
        assert last.get("error") or last.get("type") in ("error", "response.failed"), last
    state = app._transport.app.state.kv.first  # type: ignore[attr-defined]
    assert (state.admission.sequences, state.admission.tokens, len(state.admission.tickets)) == (0, 0, 0)
    # The doctor forgets what left nothing in the cache.
    assert (await app.get("/v1/requests")).json()["data"] == []
    assert (state.doctor.history.nbytes, state.remembered.num_bytes) == (0, 0)
    stats = spoken_engine.paged_stats()
    assert (stats["used_blocks"], stats["num_running"], stats["num_waiting"]) == (0, 0, 0)
    assert not spoken_engine._core._live
    speaker.text = "Fine."
    body.pop("n", None)
    assert (await app.post(path, json={**body, "stream": False})).status_code == 200
