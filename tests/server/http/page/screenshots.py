"""Writes docs/screenshots/*.png: the page with the bundled model, in light and dark, on a desk and on a phone.

.venv/bin/python tests/server/http/page/screenshots.py
"""

from __future__ import annotations

import sys
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
STEP_SECONDS = 0.03
DESK = {"viewport": {"width": 1280, "height": 860}}
PHONE = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 1.5, "is_mobile": True, "has_touch": True}
SETTINGS = {"temperature": "0", "max_tokens": "24"}
QUESTIONS = (
    "What is the metal of Worr camera?",
    "What is the festival of Mount Hanol?",
    "What is the code of North Rend?",
)
OTHERS = ("What is the hobby of Brot Gorbel?", "What is the mine of Lake Brilo?", "What is the home of Jaina Faisa?")


def main() -> None:
    from browser import running_chromium
    from kvboost_edge import CPUPagedEngine
    from live_servers import serving

    FOLDER.mkdir(parents=True, exist_ok=True)
    document = resources.files("kvboost_edge").joinpath("assets/demo_document.txt").read_text(encoding="utf-8").strip()
    with (
        CPUPagedEngine.from_pretrained("kvboost-edge/demo", num_blocks=400, max_num_seqs=8) as engine,
        serving(engine) as server,
        running_chromium() as browser,
    ):
        for scheme in ("light", "dark"):
            for place, options in (("desk", DESK), ("phone", PHONE)):
                engine.reset_cache()
                page = browser.new_context(color_scheme=scheme, **options).new_page()
                page.goto(server.base_url)
                _settings(page, document)
                with _company(engine, document):
                    _talk(page)
                    if (place, scheme) == ("phone", "dark"):  # one picture of the narrow live view is enough
                        page.click("nav [data-view=live]")
                        page.wait_for_timeout(2500)
                    _save(page, f"{place}-{scheme}")
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
def _company(engine: Any, document: str) -> Iterator[None]:
    """Others ask about the same document meanwhile, slowly, so that blocks are shared while the picture is taken."""
    forward, stop = engine._parts.runner.forward, threading.Event()

    def slow_forward(batch: Any) -> Any:
        time.sleep(STEP_SECONDS)
        return forward(batch)

    def ask(question: str) -> None:
        messages = [{"role": "system", "content": document}, {"role": "user", "content": question}]
        while not stop.is_set():
            engine.generate(messages, max_new_tokens=60, temperature=1.2, stop_token_ids=[])

    engine._parts.runner.forward = slow_forward
    threads = [threading.Thread(target=ask, args=(question,)) for question in OTHERS]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        engine._parts.runner.forward = forward


def _save(page: Any, name: str) -> None:
    sharing = (
        "!document.querySelector('#live').checkVisibility() "
        "|| Number(document.querySelector('#count-shared').textContent)"
    )
    while not page.evaluate(sharing):
        page.wait_for_timeout(50)
    path = FOLDER / f"{name}.png"
    page.screenshot(path=path)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
