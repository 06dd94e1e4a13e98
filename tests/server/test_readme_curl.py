"""Tests of the curl examples in the README and the docs on a real server."""

import contextlib
import json
import re
import subprocess
from pathlib import Path

import pytest

from helpers.engine.fake_runner import fake_engine
from helpers.server.live_servers import serving
from helpers.tools import find_curl, must_run

ROOT = Path(__file__).parents[2]
GUIDES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("tutorial", "how-to")
    for path in (ROOT / "docs" / folder).glob("*.md")
)
PAGES = ["README.md", "docs/apis.md", "docs/structured.md", "docs/tools.md", *GUIDES]


def examples_of(page):
    """Return the curl commands of a page; in lists they are indented.

    Commands with a key are left out, and the model's name is replaced by the server's.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(r"^( *)(curl .*(?:\n\1 .*)*)", text, flags=re.MULTILINE)
    commands = [command.replace(f"\n{indent}", "\n") for indent, command in found]
    commands = [command for command in commands if "/dev/null" not in command]
    commands = [command for command in commands if "Bearer" not in command]
    commands = [re.sub(r"\?model=\w+", "", command) for command in commands]
    return [re.sub(r'(?<="model": )"[\w:.-]+"', '"kvboost-edge/demo"', one) for one in commands]


CHANGES = ("/api/pull", "/api/create", "/api/copy", "/api/delete", '"mario"')
"""Routes and models that need a hub; tests/server/models/ has a local one."""
INFILL = "8000/infill"
"""A route for models with infill tokens, which the demo model does not have."""
EXAMPLES = [
    (page, example)
    for page in PAGES
    for example in examples_of(page)
    if not any(route in example for route in (*CHANGES, INFILL))
]


@contextlib.contextmanager
def server_of(example, usual):
    """Yield the usual server, or one whose requests choose their prefill if the example does."""
    if '"prefill"' not in example:
        yield usual
        return
    with fake_engine(prefill="on-request") as engine:
        engine.tokenizer.chat_template = "{{ messages[0].content }}"
        with serving(engine) as live:
            yield live


@pytest.mark.skipif(find_curl() is None and not must_run(), reason="curl is not installed")
@pytest.mark.parametrize(
    ("page", "example"),
    EXAMPLES,
    ids=[f"{page}{re.search(r'8000([^ ]+)', text).group(1)}" for page, text in EXAMPLES],
)
def test_documented_curl_commands_work(page, example, live_server):
    options = "--silent --show-error --fail-with-body --max-time 60"
    if "/v1/requests/last" in example:
        with live_server.client() as client:
            client.post("/v1/completions", json={"prompt": "Doc 7.", "max_tokens": 1})
    if "/v1/sessions/" in example:
        with live_server.client() as client:
            client.post("/v1/sessions", json={"name": "travel", "tokens": [5] * 20})
    with server_of(example, live_server) as server:
        command = re.sub(r"(http://127\.0\.0\.1|localhost):8000", server.base_url, example)
        done = subprocess.run(
            ["bash", "-c", command.replace("curl", f"curl {options}", 1)],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    if '"stream": true' in example:
        events = [line for line in done.stdout.splitlines() if line.startswith("data: ")]
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[0].removeprefix("data: "))["choices"]
    elif "/metrics" in example:
        assert "vllm:num_requests_running" in done.stdout
    else:
        answer = json.loads(done.stdout)
        assert answer
        if "tools" in example:
            assert answer["choices"][0]["message"]["tool_calls"]
