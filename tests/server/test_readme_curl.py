"""The README's curl examples, run as they stand against a live server."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from helpers.tools import find_curl, must_run

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^(curl (?:[^\n]*\\\n)*[^\n]*)$", README, flags=re.MULTILINE)


@pytest.mark.skipif(find_curl() is None and not must_run(), reason="curl is not installed")
@pytest.mark.parametrize(
    "example", EXAMPLES, ids=lambda text: re.search(r"8000(\S+)", text).group(1)
)
def test_example_answers(example, live_server):
    command = example.replace("http://127.0.0.1:8000", live_server.base_url)
    done = subprocess.run(
        ["bash", "-c", f"{command} --silent --show-error --fail-with-body --max-time 60"],
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
        assert json.loads(done.stdout)
