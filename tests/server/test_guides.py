"""Tests of the tutorial's client and the guides' commands on a real server."""

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.server.live_servers import serving
from kvboost_edge.cli.app import run

ROOT = Path(__file__).parents[2]
TUTORIAL = (ROOT / "docs/tutorial/coding-assistant.md").read_text(encoding="utf-8")
METRIC = re.compile(r"`((?:kvboost|vllm|llamacpp):\w+)`")


def test_the_tutorials_client_hits_the_cache(live_server, tmp_path, monkeypatch, capsys):
    [program] = re.findall(r"^```python\n(.*?)^```", TUTORIAL, flags=re.DOTALL | re.MULTILINE)
    assert "http://127.0.0.1:8000/v1" in program
    program = program.replace("http://127.0.0.1:8000", live_server.base_url)
    (tmp_path / "assistant.py").write_text(program, encoding="utf-8")
    text = "Doc 7.\n" + "The colour of Teamar boat is blue. The owner of Teamar boat is Dibel. " * 9
    (tmp_path / "context.txt").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    questions = ["What is the colour?", "Who is the owner?"]
    monkeypatch.setattr(sys, "argv", ["assistant.py", *questions])
    runpy.run_path("assistant.py", run_name="__main__")
    shown = capsys.readouterr().out
    counts = re.findall(r"^(\d+) prompt tokens, (\d+) cached, first token", shown, re.M)
    (_, _), (tokens, cached) = [(int(one), int(two)) for one, two in counts]
    assert 0 < tokens - cached < 40


def test_the_batch_program_of_the_guide_works(demo_engine, tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs/apis.md").read_text(encoding="utf-8")
    [program] = re.findall(r"^```python\n(import time\n.*?)^```", page, flags=re.DOTALL | re.M)
    guide = (ROOT / "docs/how-to/batches.md").read_text(encoding="utf-8")
    lines = re.findall(r'^ *(\{"custom_id".*)$', guide, flags=re.M)
    (tmp_path / "questions.jsonl").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with serving(demo_engine, batch_dir=tmp_path / "batches") as server:
        program = program.replace("http://127.0.0.1:8000", server.base_url)
        (tmp_path / "batch.py").write_text(program, encoding="utf-8")
        runpy.run_path("batch.py", run_name="__main__")
    assert capsys.readouterr().out.startswith("completed")
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == len(lines) == 2


@pytest.mark.parametrize("client", ["claude", "codex", "opencode", "openwebui"])
def test_launch_prints_the_settings_of_a_client(live_server, client, capsys):
    assert run(["launch", client, "--url", live_server.base_url]) == 0
    printed = capsys.readouterr().out
    page = "open-webui" if client == "openwebui" else "coding-agents"
    guide = (ROOT / f"docs/how-to/{page}.md").read_text(encoding="utf-8")
    assert f"kvboost-edge launch {client}" in guide
    for name in re.findall(r"`([A-Z_]{8,})(?:=\w+)?`", guide):
        if name.startswith(("OPENAI", "DEFAULT")) and client == "openwebui":
            assert f"export {name}=" in printed
    assert live_server.base_url in printed


def test_the_persistent_cache_guides_request_is_warmed(live_server, tmp_path, monkeypatch):
    guide = (ROOT / "docs/how-to/persistent-cache.md").read_text(encoding="utf-8")
    [command] = re.findall(r"^ *(echo '.*?' > request\.json)$", guide, flags=re.DOTALL | re.M)
    monkeypatch.chdir(tmp_path)
    subprocess.run([shutil.which("sh") or "sh", "-c", command], check=True)
    assert run(["warm", "--from-request", "request.json", "--url", live_server.base_url]) == 0
    assert run(["why", "--list", "--url", live_server.base_url]) == 0


def test_metrics_named_in_the_docs_exist(live_server):
    with live_server.client() as client:
        client.post("/v1/completions", json={"prompt": "Doc 7.", "max_tokens": 2})
        shown = client.get("/metrics").text
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs/how-to").glob("*.md")]
    named = {name for page in pages for name in METRIC.findall(page)}
    assert len(named) >= 9
    assert [name for name in sorted(named) if f"# HELP {name}" not in shown] == []
