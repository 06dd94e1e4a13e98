"""Write docs/screenshots/*.png: the page with the bundled model, in light and dark, on desktop and
phone.

The pictures show the chat with the live view, and the timeline of the last requests.

    .venv/bin/python tests/server/http/page/screenshots.py
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[4]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
FOLDER = ROOT / "docs" / "screenshots"
# simulated slow machine: seconds per forward pass and per token
STEP_SECONDS = 0.03
TOKEN_SECONDS = 0.003
DESK = {"viewport": {"width": 1280, "height": 860}}
PHONE = {
    "viewport": {"width": 390, "height": 844},
    "device_scale_factor": 1.5,
    "is_mobile": True,
    "has_touch": True,
}
SETTINGS = {"temperature": "0", "max_tokens": "24"}
QUESTIONS = (
    "What is the metal of Worr camera?",
    "What is the festival of Mount Hanol?",
    "What is the code of North Rend?",
)
RULES = (
    "You know what stands in this text and nothing else. Answer in one short sentence, in the "
    "words of the text."
)
DAYS = ("Monday", "Tuesday")
OTHERS = (
    "What is the hobby of Brot Gorbel?",
    "What is the mine of Lake Brilo?",
    "What is the home of Jaina Faisa?",
)


def main() -> None:
    from helpers.server.browser import running_chromium

    FOLDER.mkdir(parents=True, exist_ok=True)
    document = (
        resources.files("kvboost_edge")
        .joinpath("assets/demo_document.txt")
        .read_text(encoding="utf-8")
        .strip()
    )
    with running_chromium() as browser:
        _pictures_of_the_chat(browser, document)
        _pictures_of_the_requests(browser, document)


def _pictures_of_the_chat(browser: Any, document: str) -> None:
    with _served(num_blocks=400) as (engine, server):
        for name, page in _pages(browser, server):
            engine.reset_cache()
            _settings(page, document)
            with _company(engine, document):
                _talk(page)
                if name == "phone-dark":  # one picture of the narrow live view is enough
                    page.click("nav [data-view=live]")
                    page.wait_for_timeout(2500)
                _save_shared(page, name)


def _pictures_of_the_requests(browser: Any, document: str) -> None:
    """Save the timeline of a user whose system message contains the day, with a pool too small for
    all blocks.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        _served(num_blocks=110, disk_cache_dir=folder, reuse_gate="off") as (engine, server),
        _slow(engine, TOKEN_SECONDS),
    ):
        changed = _ask_all_morning(server, document)
        for name, page in _pages(browser, server):
            page.click("nav [data-view=requests]")
            page.click(f"[aria-controls=why-{changed}]")
            page.locator(f"#why-{changed} ins").first.wait_for()
            if name == "phone-dark":  # the other picture shows the start of the timeline
                page.locator(f"[aria-controls=why-{changed}]").evaluate(
                    "(row) => row.scrollIntoView()"
                )
            _save(page, f"requests-{name}")


def _ask_all_morning(server: Any, document: str) -> str:
    """Send the requests; return the id of the one with the changed day."""
    turns: list[dict[str, str]] = []

    def ask(system: str, *said: str, **more: Any) -> str:
        roles = ("user", "assistant") * len(said)
        messages = [{"role": "system", "content": system}]
        messages += [
            {"role": role, "content": text} for role, text in zip(roles, said, strict=False)
        ]
        body = {"messages": messages, "max_tokens": 12, "temperature": 0, **more}
        answer = client.post("/v1/chat/completions", json=body)
        answer.raise_for_status()
        turns.append(answer.json()["choices"][0]["message"])
        return str(answer.headers["x-request-id"])

    monday, tuesday = (f"{RULES} Today is {day}.\n\n{document}" for day in DAYS)
    other = document[len(document) // 2 :]
    with server.client() as client:
        ask(monday, QUESTIONS[0])
        ask(monday, QUESTIONS[0], turns[-1]["content"], QUESTIONS[1])
        ask(other, OTHERS[1])
        ask(monday, QUESTIONS[2])
        ask(f"Be brief. {document}", QUESTIONS[0], kvboost={"mode": "chunk_kv_reuse"})
        changed = ask(tuesday, OTHERS[0])
        ask(tuesday, OTHERS[0], turns[-1]["content"], OTHERS[1])
    return changed


@contextmanager
def _served(**options: Any) -> Iterator[tuple[Any, Any]]:
    from helpers.server.live_servers import serving
    from kvboost_edge import CPUPagedEngine

    with (
        CPUPagedEngine.from_pretrained("kvboost-edge/demo", max_num_seqs=8, **options) as engine,
        serving(engine) as server,
    ):
        yield engine, server


def _pages(browser: Any, server: Any) -> Iterator[tuple[str, Any]]:
    """Yield (picture name, page) for each device and color scheme."""
    for scheme in ("light", "dark"):
        for place, options in (("desk", DESK), ("phone", PHONE)):
            page = browser.new_context(color_scheme=scheme, **options).new_page()
            page.goto(server.base_url)
            yield f"{place}-{scheme}", page
            page.context.close()


def _settings(page: Any, document: str) -> None:
    page.click("nav [data-view=settings]")
    page.fill("#system", document)
    for name, text in SETTINGS.items():
        page.fill(f"#{name}", text)
    page.click("nav [data-view=chat], nav [data-view=live] >> visible=true")


def _talk(page: Any) -> None:
    for question in QUESTIONS:
        page.fill("#prompt", question)
        page.press("#prompt", "Enter")
        page.locator(".turn:last-child.done").wait_for()
    page.wait_for_timeout(1500)


@contextmanager
def _slow(engine: Any, token_seconds: float = 0.0) -> Iterator[None]:
    """Slow down the model to the speed of a larger one."""
    forward = engine._parts.runner.forward

    def slow_forward(batch: Any) -> Any:
        time.sleep(STEP_SECONDS + token_seconds * len(batch.token_ids))
        return forward(batch)

    engine._parts.runner.forward = slow_forward
    try:
        yield
    finally:
        engine._parts.runner.forward = forward


@contextmanager
def _company(engine: Any, document: str) -> Iterator[None]:
    """Ask about the same document in other threads, so that blocks are shared in the picture."""
    stop = threading.Event()

    def ask(question: str) -> None:
        messages = [{"role": "system", "content": document}, {"role": "user", "content": question}]
        while not stop.is_set():
            engine.generate(messages, max_new_tokens=60, temperature=1.2, stop_token_ids=[])

    threads = [threading.Thread(target=ask, args=(question,)) for question in OTHERS]
    with _slow(engine):
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def _save_shared(page: Any, name: str) -> None:
    """Save the picture; if it shows the live view, wait until blocks are shared."""
    sharing = (
        "!document.querySelector('#live').checkVisibility() "
        "|| Number(document.querySelector('#count-shared').textContent)"
    )
    while not page.evaluate(sharing):
        page.wait_for_timeout(50)
    _save(page, name)


def _save(page: Any, name: str) -> None:
    path = FOLDER / f"{name}.png"
    page.screenshot(path=path)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
