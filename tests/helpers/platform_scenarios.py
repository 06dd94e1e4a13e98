"""Typical uses of the package on another platform. `python -m helpers.platform_scenarios DOUBLE
DIRECTORY` runs each scenario and prints a JSON object with the failures.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import pkgutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Imports of the package, made before the double is installed, because libraries check
# `sys.platform` too.
LIBRARIES = (
    *("fastapi", "h11", "httpx", "huggingface_hub", "jinja2", "llguidance", "numba", "numpy"),
    *("prometheus_client", "psutil", "pytest", "rich.console", "rich.progress", "safetensors"),
    *("starlette.responses", "tokenizers", "typer", "uvicorn", "xxhash", "http.server", "tempfile"),
    *("llvmlite.binding", "multiprocessing", "concurrent.futures.thread", "shutil", "email.parser"),
    *("numba.core.caching", "numba.core.typed_passes", "numba.core.registry", "numba.extending"),
    *("huggingface_hub.constants", "huggingface_hub.errors", "asyncio.unix_events", "webbrowser"),
    *("uvicorn.protocols.http.h11_impl", "uvicorn.lifespan.off", "uvicorn.loops.asyncio"),
    *("fastapi.responses", "rich.live", "rich.table", "rich.markdown", "rich.prompt", "redis"),
    *("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter"),
)
# Extras that this test leaves out, because their libraries take seconds to import.
LEFT_OUT = ("onnxruntime", "ray", "torch", "transformers")
PROMPT = "What is the metal of Worr camera? What is the festival of Mount Hanol? " * 3
OPTIONS: dict[str, Any] = {"num_blocks": 64, "num_threads": 1}

SCENARIOS: dict[str, Callable[[Path], None]] = {}


def scenario(function: Callable[[Path], None]) -> Callable[[Path], None]:
    SCENARIOS[function.__name__] = function
    return function


@scenario
def every_module_is_imported(home: Path) -> None:
    import kvboost_edge

    for found in pkgutil.walk_packages(kvboost_edge.__path__, "kvboost_edge."):
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            if str(error.name).partition(".")[0] not in LEFT_OUT:
                raise


@scenario
def an_engine_restores_blocks_from_disk(home: Path) -> None:
    from kvboost_edge import CPUPagedEngine

    expected = json.loads((home / "expected.json").read_text(encoding="utf-8"))
    for run in ("cold", "restored"):
        with CPUPagedEngine.from_pretrained(disk_cache_dir=home / "blocks", **OPTIONS) as engine:
            result = engine.generate(PROMPT, max_new_tokens=12, temperature=0.0)
            stats = engine.paged_stats()
        assert list(result.output_token_ids) == expected["ids"], run
        assert (result.hit_tokens.get("disk", 0) > 0) is (run == "restored"), result.hit_tokens
        assert stats["process_peak_bytes"] >= stats["process_rss_bytes"] > 0


@scenario
def a_shared_cache_has_one_owner(home: Path) -> None:
    from helpers.tiers.disk_cases import chain, has_all, opened, opened_apart, read, write
    from kvboost_edge.tiers.disk.survey import delete_space, find_spaces
    from kvboost_edge.tiers.disk.system_calls import Files

    blocks = chain(40)
    root = home / "shared"
    with opened(root) as owner:
        assert write(owner, blocks) == len(blocks)
        with opened_apart(root) as reader:
            assert owner.stat().writable
            assert not reader.stat().writable
            assert read(reader, blocks) > 0
            (space,) = find_spaces(root, Files())
            assert space.in_use
            assert not delete_space(space, Files())
    with opened(root) as owner:
        assert owner.stat().writable
        assert has_all(owner, blocks)
        for seed in range(1, 16):  # more than fits, so that segments are deleted
            write(owner, chain(40, seed))
        assert owner.stat().evicted > 0
        assert owner.stat().errors == 0, owner.stat()
    (space,) = find_spaces(root, Files())
    assert not space.in_use
    assert delete_space(space, Files())
    assert find_spaces(root, Files()) == []
    assert not space.path.exists()


@scenario
def a_session_is_replaced_while_it_is_read(home: Path) -> None:
    from kvboost_edge.tiers.disk.session_records import Session, SessionStore

    def made(name: str, text: str) -> Session:
        content = {"messages": [{"role": "user", "content": text}], "tools": None}
        return Session.of(
            name, "model", [1, 2, 3], content, block_size=16, block_bytes=1, ttl=60.0, now=now
        )

    now = time.time()
    store = SessionStore(home / "sessions")
    store.put("t", None, made("one", "first"))
    (path,) = [one for one in (home / "sessions").rglob("*") if one.is_file()]
    reader = open(path, "rb")  # noqa: SIM115 - closed by the timer
    timer = threading.Timer(0.03, reader.close)
    timer.start()
    store.put("t", None, made("one", "second"))
    timer.join()
    found = store.find("t", None, "one")
    assert found is not None
    assert found.content["messages"][0]["content"] == "second"
    assert store.remove("t", None, "one")
    assert not path.exists()


@scenario
def packed_weights_in_use_are_not_deleted(home: Path) -> None:
    from kvboost_edge import CPUPagedEngine
    from kvboost_edge.cli.cache.cached_files import WEIGHTS, delete_entry, find_entries
    from kvboost_edge.tiers.disk.system_calls import Files

    def kept() -> list[Any]:
        return [one for one in find_entries(home / "none", Files()) if one.kind == WEIGHTS]

    with CPUPagedEngine.from_pretrained(**OPTIONS):
        (one,) = kept()
        assert one.in_use
        assert not delete_entry(one, Files())
        assert one.path.exists()
    (one,) = kept()
    assert not one.in_use
    assert delete_entry(one, Files())
    assert not one.path.exists()


@scenario
def equal_weights_that_are_mapped_meanwhile_are_taken(home: Path) -> None:
    from kvboost_edge.host import atomic_files

    with pytest_patches() as patch:
        finish, held = atomic_files.finish_file, list[Any]()

        def finish_second(file: Any, path: Path) -> None:
            """Imitate another process that finishes first and maps its file."""
            data = Path(file.name).read_bytes()
            if sys.platform == "win32" and path.suffix == ".kvpack" and not held:
                path.write_bytes(data)
                held.append(open(path, "rb"))  # noqa: SIM115
            finish(file, path)

        patch.setattr(atomic_files, "finish_file", finish_second)
        patch.setenv("KVBOOST_EDGE_CACHE", str(home / "meanwhile"))
        from kvboost_edge import CPUPagedEngine

        with CPUPagedEngine.from_pretrained(**OPTIONS) as engine:
            result = engine.generate(PROMPT, max_new_tokens=12, temperature=0.0)
        for file in held:
            file.close()
    expected = json.loads((home / "expected.json").read_text(encoding="utf-8"))
    assert list(result.output_token_ids) == expected["ids"]
    names = [one.name for one in (home / "meanwhile/packed").iterdir()]
    assert len([name for name in names if name.endswith(".kvpack")]) == 1, names
    assert not [name for name in names if name.startswith(".new-")], names


@scenario
def a_model_is_pulled_and_removed(home: Path) -> None:
    from helpers.models.fake_hub import fake_hub
    from kvboost_edge.models.locate.managed import managed_models
    from kvboost_edge.models.pull import registry_client as registry
    from kvboost_edge.models.pull.download import pull_model

    name, path = "someone/Tiny-GGUF", "tiny-Q4_0.gguf"
    with pytest_patches() as patch, fake_hub(name, {path: b"GGUF" * 9000}, home, patch) as hub:
        patch.setattr(registry, "_RETRY_SECONDS", 0.0)
        store = managed_models()
        hub.cut = 5000  # the download is resumed
        model = pull_model(f"{name}:Q4_0", store)
        found = store.path_of(model)
        assert found is not None
        assert found.read_bytes() == hub.files[path]
        assert pull_model(f"{name}:Q4_0", store).folder == model.folder
        with open(found, "rb"):  # an engine that has the model loaded
            store.remove(f"{name}:Q4_0")
        assert store.models() == []
        assert found.exists() is (sys.platform == "win32")
        again = store.path_of(pull_model(f"{name}:Q4_0", store))
        assert again is not None
        assert again.read_bytes() == hub.files[path]
        store.remove(f"{name}:Q4_0")
        assert not again.exists()


@scenario
def batches_and_their_files(home: Path) -> None:
    from kvboost_edge.errors import ConfigError, RequestError
    from kvboost_edge.server.batches.answered_lines import RecordFile
    from kvboost_edge.server.batches.batch_store import BatchStore
    from kvboost_edge.server.settings import ServerSettings

    def raises(kind: type[Exception], call: Callable[[], Any]) -> bool:
        try:
            call()
        except kind:
            return True
        return False

    settings = ServerSettings()
    with contextlib.closing(BatchStore(home / "batches", settings)) as store:
        assert raises(ConfigError, lambda: BatchStore(home / "batches", settings))
        space = store.space(None)
        upload = space.upload()
        upload.write(b"{}\n")
        file = upload.finish("in.jsonl", 3600)
        upload.close()
        batch = space.create_batch(file.id, "/v1/completions", "1h", 3600, 3600, None)
        answers = space.batch_directory(batch) / "answers.jsonl"
        records = RecordFile(answers)
        records.append("a", b'{"custom_id": "a"}')
        assert raises(RequestError, lambda: RecordFile(answers))
        records.close()
        again = RecordFile(answers)
        assert again.answered == {"a"}
        again.close()
        batch.finalizing_at = space.now()
        space.publish(batch)
        batch.end("completed", space.now())
        space.save(batch)
        output = space.file(str(batch.output_file_id))
        with open(space.path_of(output), "rb") as reader:  # imitates a client that downloads it
            space.delete_file(output.id)
            assert reader.read() == b'{"custom_id": "a"}\n'
        space.expire()
        assert not space.path_of(output).exists()
    with contextlib.closing(BatchStore(home / "batches", settings)) as store:
        assert store.space(None).batch(batch.id).status == "completed"


@scenario
def a_server_answers_and_drains(home: Path) -> None:
    import httpx

    from kvboost_edge.server.__main__ import main

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    answers: list[Any] = []
    number = getattr(signal, "SIGBREAK", signal.SIGTERM)
    ended = threading.Event()

    def use() -> None:
        try:
            while not ended.wait(0.05):
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"{url}/ready").status_code == 200:
                        break
            body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
            answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60).json())
            answers.append(httpx.get(f"{url}/v1/stats").json())
            answers.append(httpx.get(f"{url}/metrics").status_code)
        finally:
            if not ended.is_set():
                os.kill(os.getpid(), number)

    client = threading.Thread(target=use)
    client.start()
    flags = ("--port", str(port), "--num-blocks", "64", "--batch-dir", str(home / "served"))
    try:
        code = main([*flags, "--disk-cache-dir", str(home / "served-blocks")])
    finally:
        ended.set()
        client.join()
    expected = json.loads((home / "expected.json").read_text(encoding="utf-8"))
    assert (code, len(answers)) == (0, 3), (code, answers)
    assert answers[0]["choices"][0]["text"] == expected["text"], answers[0]
    assert answers[1]["memory"]["process_rss_bytes"] > 0, answers[1]


@scenario
def the_machine_is_described(home: Path) -> None:
    from kvboost_edge.host.memory import available_bytes, give_back, process_peak, total_bytes
    from kvboost_edge.host.open_files import allow_open_files, num_open_files
    from kvboost_edge.host.processor import default_num_threads, describe_cpu

    assert default_num_threads() >= 1
    assert describe_cpu().affinity >= 1
    assert process_peak() > 0
    assert total_bytes() > available_bytes() > 0
    assert allow_open_files(num_open_files() + 1) > 0
    give_back()


@contextlib.contextmanager
def pytest_patches() -> Iterator[Any]:
    import pytest

    with pytest.MonkeyPatch.context() as patch:
        yield patch


def run(double: str, home: Path) -> dict[str, str]:
    for name in LIBRARIES:
        importlib.import_module(name)
    import huggingface_hub

    # Its names are imported on first use.
    assert huggingface_hub.get_token
    huggingface_hub.get_session()
    for name in LEFT_OUT:
        sys.modules[name] = None  # type: ignore[assignment]
    from helpers.platform_doubles import install

    assert not [name for name in sys.modules if name.startswith("kvboost_edge")]
    asyncio.new_event_loop().close()
    install(double)
    failures = {}
    for name, call in SCENARIOS.items():
        begun = time.perf_counter()
        try:
            call(home)
        except BaseException:
            failures[name] = traceback.format_exc()
        print(f"{name}: {time.perf_counter() - begun:.1f} s", file=sys.stderr)
    return failures


if __name__ == "__main__":
    found = run(sys.argv[1], Path(sys.argv[2]))
    (Path(sys.argv[2]) / "failures.json").write_text(json.dumps(found), encoding="utf-8")
