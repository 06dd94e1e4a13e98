"""Tests of the progress bar of prefill: where it is drawn, its text, and that it leaves nothing on
the screen.
"""

import io
import re
import threading

import pytest
from rich.console import Console

from cli.servers.test_remote import GOOD, chunk
from cli.servers.test_remote import server as server  # noqa: PLC0414 - a fixture
from helpers.clocks import give_clock
from helpers.engine.fake_runner import fake_engine, runner_of
from helpers.server.live_servers import wait_until
from kvboost_edge.cli import render
from kvboost_edge.cli.chat import _remote
from kvboost_edge.cli.render import PromptBar, progress_words
from kvboost_edge.cli.servers.remote import RemoteAnswer, ServerClient
from kvboost_edge.cli.session import answer
from kvboost_edge.engine.request.progress import Progress

HALF = Progress(4210, 1024, 2560, 3.1, 4.2)
TOLD = {"total": 4210, "cache": 1024, "processed": 2560, "time_ms": 3100, "estimated_ms": 4200}
ERASED = "\x1b[2K"


@pytest.fixture
def at_once(monkeypatch):
    """Bar without a delay, as if every prompt took long enough."""
    monkeypatch.setattr("kvboost_edge.cli.render._PATIENCE_SECONDS", 0.0)


def terminal(**options):
    file = io.StringIO()
    return Console(file=file, width=100, **{"force_terminal": True, **options}), file


def shown(file):
    """Return the written text without colors and cursor movements."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        (HALF, "2,560 of 4,210 tokens, 495 per second, about 4 s left"),
        (Progress(10), "0 of 10 tokens"),
        (
            Progress(90_000, 0, 10, 1.0, 600.0),
            "10 of 90,000 tokens, 10 per second, about 10 min left",
        ),
    ],
)
def test_progress_is_described_in_words(progress, words):
    assert progress_words(progress) == words


def test_the_bar_is_drawn_and_removed(at_once):
    console, file = terminal()
    before = threading.active_count()
    with PromptBar(console) as bar:
        bar.show(Progress(4210, seconds_left=9.0))
        bar.show(HALF)
        bar.close()
        text = shown(file)
        assert "waiting in the queue" in text or "reading the prompt" in text
        assert "2,560 of 4,210 tokens, 495 per second, about 4 s left" in text
        assert file.getvalue().rstrip("\n").endswith(ERASED), "the bar must be erased"
        bar.show(HALF)
        assert shown(file) == text, "a closed bar must not be drawn again"
    wait_until(lambda: threading.active_count() <= before, "the bar's thread to end")


def test_nothing_is_drawn_on_a_quiet_console(at_once):
    console, file = terminal(quiet=True)
    with PromptBar(console) as bar:
        assert not bar.is_wanted
        bar.show(HALF)
    assert not file.getvalue()


def test_without_a_terminal_a_long_prompt_is_one_line(monkeypatch):
    now = [100.0]
    give_clock(monkeypatch, lambda: now[0], render)
    console, file = terminal(force_terminal=False)
    with PromptBar(console) as bar:
        for now[0] in (100.0, 104.0, 105.0, 111.0):
            bar.show(HALF)
        assert not bar.is_wanted, "the bar must not need further progress"
    assert file.getvalue() == f"reading the prompt, {progress_words(HALF)}\n"


def test_a_short_wait_draws_nothing(monkeypatch):
    monkeypatch.setattr("kvboost_edge.cli.render._PATIENCE_SECONDS", 3600.0)
    console, file = terminal()
    with PromptBar(console) as bar:
        bar.show(HALF)
    assert not file.getvalue()


def test_a_local_prompt_is_followed_step_by_step(at_once, monkeypatch):
    monkeypatch.setattr("kvboost_edge.cli.session._LOOK_SECONDS", 0.001)
    console, file = terminal()
    pieces = []
    with fake_engine(max_batch_tokens=32) as engine:
        runner = runner_of(engine)

        def until_drawn(batch):
            """Delay each prefill step until the previous one is drawn."""
            if runner.computed < 96:
                wait_until(
                    lambda: f"{runner.computed} of 100 tokens" in shown(file),
                    f"{runner.computed} to be drawn",
                )

        runner.on_forward = until_drawn

        def write(piece):
            assert file.getvalue().rstrip("\n").endswith(ERASED), (
                "the bar must be erased before the first text"
            )
            pieces.append(piece)

        result = answer(engine, list(range(100)), {"max_new_tokens": 4}, write, console)
    assert "".join(pieces) == result.output_text
    assert "about" in shown(file)


def test_an_interrupted_prompt_is_cancelled(at_once):
    class Interrupted(Console):
        """Console that is interrupted by Ctrl-C while the bar is drawn."""

        def print(self, *args, **kwargs):
            raise KeyboardInterrupt

    go = threading.Event()
    with fake_engine(max_batch_tokens=32) as engine:
        runner_of(engine).on_forward = lambda batch: go.wait(30)
        console = Interrupted(file=io.StringIO(), width=100, force_terminal=True)
        with pytest.raises(KeyboardInterrupt):
            answer(engine, list(range(100)), {"max_new_tokens": 4}, lambda piece: None, console)
        go.set()
        wait_until(lambda: engine.num_running() == engine.num_waiting() == 0, "the request to end")


@pytest.mark.parametrize("owner", ["kvboost-edge", "llamacpp"])
def test_progress_is_requested_from_a_server(server, owner):
    server.models = {"data": [{"id": "a-model", "owned_by": owner}]}
    told = {
        name: number
        for name, number in TOLD.items()
        if owner == "kvboost-edge" or name != "estimated_ms"
    }
    server.events = [chunk("", prompt_progress=told), *GOOD]
    with ServerClient(server.url) as remote:
        first, *rest = remote.stream([{"role": "user", "content": "Hi"}], {}, progress=True)
    assert first == (HALF if owner == "kvboost-edge" else HALF._replace(seconds_left=None))
    assert rest[:2] == ["Hel", "lo"]
    assert isinstance(rest[-1], RemoteAnswer)
    assert server.bodies[-1]["return_progress"] is True


@pytest.mark.parametrize(
    "models", [{"data": [{"id": "a-model", "owned_by": "openai"}]}, {"error": "none"}, {"data": 7}]
)
def test_progress_is_not_requested_from_other_servers(server, models):
    server.models = models
    with ServerClient(server.url, model="a-model") as remote:
        pieces = list(remote.stream([{"role": "user", "content": "Hi"}], {}, progress=True))
    assert pieces[:2] == ["Hel", "lo"]
    assert "return_progress" not in server.bodies[-1]


@pytest.mark.parametrize(
    "told", [7, [], {}, {**TOLD, "total": "many"}, {**TOLD, "processed": None}, {"total": 1}]
)
def test_invalid_progress_events_are_ignored(server, told):
    server.events = [chunk("", prompt_progress=told), *GOOD]
    with ServerClient(server.url) as remote:
        pieces = list(remote.stream([{"role": "user", "content": "Hi"}], {}))
    assert pieces[:2] == ["Hel", "lo"]


def test_a_servers_progress_is_drawn(server, at_once):
    server.models = {"data": [{"id": "a-model", "owned_by": "kvboost-edge"}]}
    server.events = [chunk("", prompt_progress=TOLD), *GOOD]
    console, file = terminal()
    with ServerClient(server.url) as remote:
        message = {"role": "assistant", "content": ""}
        asked = [{"role": "user", "content": "Hi"}]
        _remote(remote, {}, console).reply(asked, message, file.write)
    assert message["content"] == "Hello"
    assert "2,560 of 4,210 tokens, 495 per second, about 4 s left" in shown(file)
    assert file.getvalue().endswith("Hello")
    assert file.getvalue().removesuffix("Hello").rstrip("\n").endswith(ERASED)
