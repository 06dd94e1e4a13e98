"""The README's curl examples, run as they stand against a live server."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from helpers.tools import find_curl, must_run

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^curl .*(?:\n .*)*", README, flags=re.MULTILINE)


@pytest.mark.skipif(find_curl() is None and not must_run(), reason="curl is not installed")
@pytest.mark.parametrize(
    "example", EXAMPLES, ids=lambda text: re.search(r"8000(\S+)", text).group(1)
)
def test_example_answers(example, live_server):
    command = example.replace("http://127.0.0.1:8000", live_server.base_url)
    options = "--silent --show-error --fail-with-body --max-time 60"
    if "/v1/requests/last" in example:
        with live_server.client() as client:
            client.post("/v1/completions", json={"prompt": "Doc 7.", "max_tokens": 1})
    done = subprocess.run(
        ["bash", "-c", command.replace("curl", f"curl {options}", 1)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    if "tools" in example:
        assert answer["choices"][0]["message"]["tool_calls"]
    assert answer
