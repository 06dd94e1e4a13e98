"""Messages before and during the start of replicas, mostly without Ray, and the command as users
run it.
"""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import httpx
import psutil
import pytest

from helpers.server.live_servers import wait_until
from kvboost_edge.config import GenerationMode
from kvboost_edge.errors import (
    BackendUnavailable,
    CapacityError,
    ConfigError,
    ModelFormatError,
    install_extra,
)
from kvboost_edge.host.processor import default_num_threads
from kvboost_edge.serve_ray.replica import own_options
from kvboost_edge.serve_ray.run_directory import MEMORY_PLACE
from kvboost_edge.serve_ray.start import (
    _OWN,
    flags_of,
    loading_error,
    own_cluster,
    replica_options,
)
from kvboost_edge.server.__main__ import _ended_by_signal, main
from kvboost_edge.server.flags import parse_flags


def test_a_replica_uses_its_cpus_and_available_memory():
    assert own_options({}, 3.0, 0) == {"num_threads": 3}
    assert own_options({"num_threads": 1}, 3.0, 1 << 20)["num_threads"] == 1
    assert own_options({}, 0.5, 0) == {}
    with pytest.raises(CapacityError, match=f"memory={1 << 60} bytes"):
        own_options({}, 1.0, 1 << 60)


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        (
            "Traceback\n  x\nkvboost_edge.errors.ModelFormatError: /m has no config.json",
            ModelFormatError,
            "no config",
        ),
        (
            "ray.x: ConfigError: a\nray::R() CapacityError: weights 9 GB exceed memory",
            CapacityError,
            "weights 9 GB",
        ),
        (
            "The replica died.\nThe actor is dead because it was killed",
            BackendUnavailable,
            "it was killed",
        ),
        ("", BackendUnavailable, "Ray gives no reason"),
    ],
)
def test_an_error_while_loading_is_reported(text, kind, words):
    error = loading_error(text)
    assert type(error) is kind
    assert words in str(error)


def test_replicas_are_prepared_for_the_default_mode():
    flags = ["--mode", "chunk_kv_reuse", "--warm-system", "You are kind."]
    options = replica_options(parse_flags(flags, "kvboost-server"))
    assert options.mode is GenerationMode.CHUNK_KV_REUSE
    assert options.warm_systems == ("You are kind.",)


def test_arguments_of_a_serve_file_are_the_commands_flags(monkeypatch):
    monkeypatch.setenv("KVBOOST_EDGE_SERVE_FLAGS", "--workers 3 --model-name 'a b'")
    assert flags_of({}) == ["--workers", "3", "--model-name", "a b"]
    found = flags_of(
        {
            "num_threads": 2,
            "insecure": True,
            "redis_trust": False,
            "warm": ["x", "y"],
            "api-key": "k",
        }
    )
    assert found == [
        "--num-threads",
        "2",
        "--insecure",
        "--warm",
        "x",
        "--warm",
        "y",
        "--api-key",
        "k",
    ]
    assert parse_flags(found, "test").warm == ("x", "y")
    for name in ("port", "ray_address", "ray-address"):
        with pytest.raises(ConfigError, match=f"{name}=1 is set by Ray"):
            flags_of({name: 1})


@pytest.mark.cluster
def test_a_failed_ray_start_leaves_nothing(monkeypatch):
    """This holds for any error that Ray raises. Other processes of this one, which are not part of
    Ray, continue.
    """
    ray = pytest.importorskip("ray")
    started = []

    def init(_temp_dir, **_):
        for words in ([_temp_dir], []):
            started.append(
                subprocess.Popen(
                    [sys.executable, "-c", "import sys; sys.stdin.read()", *words], stdin=PIPE
                )
            )
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    with (
        pytest.raises(
            BackendUnavailable, match="could not be started on this machine: The current node"
        ),
        own_cluster(1),
    ):
        pass
    is_running = [
        process.poll() is None for process in started
    ]  # they end by themselves once they can read
    for process in started:
        process.communicate(timeout=60)
    assert is_running == [False, True]


@pytest.mark.cluster
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_ray_start_leaves_nothing(number, monkeypatch):
    """The signal ends this process as before. Ray's handler would end it with another status."""
    ray = pytest.importorskip("ray")
    utils = pytest.importorskip("ray._private.utils")
    started = []

    def init(_temp_dir, **_):
        utils.set_sigterm_handler(lambda *_: sys.exit(number))
        command = [sys.executable, "-c", "import sys; sys.stdin.read()", _temp_dir]
        started.append(subprocess.Popen(command, stdin=PIPE))
        signal.raise_signal(number)

    monkeypatch.setattr(ray, "init", init)
    with _ended_by_signal(), pytest.raises((SystemExit, KeyboardInterrupt)) as told, own_cluster(1):
        pass
    is_running = [process.poll() is None for process in started]
    for process in started:
        process.communicate(timeout=60)
    assert is_running == [False]
    assert (told.type, *told.value.args) == (
        (SystemExit, 0) if number == signal.SIGTERM else (KeyboardInterrupt,)
    )


def test_without_ray_the_flag_names_the_missing_extra(monkeypatch, capsys):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "ray" else real(name, *rest),
    )
    assert main(["--workers", "2"]) == 1
    assert "--workers 2 needs Ray" in (told := capsys.readouterr().err)
    assert install_extra("ray") in told


def _command(*flags):
    own = ["--port", "0", "--disk-cache-dir", "off", "--num-blocks", "256"]
    return [sys.executable, "-m", "kvboost_edge", "serve", *own, *flags]


@pytest.mark.parametrize(
    ("flags", "words", "code"),
    [
        (["--workers", "1000"], "workers=1000 with 1 threads each need 1000 CPUs", 2),
        (["--workers", "2", "--model", "/nowhere/at/all"], "/nowhere/at/all", 1),
        (
            ["--ray-address", "127.0.0.1:1"],
            "ray_address='127.0.0.1:1': no Ray cluster answers there",
            1,
        ),
    ],
)
@pytest.mark.cluster
@pytest.mark.slow
def test_invalid_flags_are_reported_before_the_start(flags, words, code):
    done = subprocess.run(
        _command(*flags), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code, done.stderr
    assert words in done.stderr


@pytest.mark.cluster
@pytest.mark.slow
def test_a_cluster_without_enough_cpus_is_reported(ray_cluster):
    own = {name: value for name, value in _OWN.items() if value is not None}
    flags = ["--ray-address", ray_cluster, "--workers", "5"]
    done = subprocess.run(
        _command(*flags),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, **own},
    )
    assert done.returncode == 2, done.stderr
    assert "workers=5 with 1 threads each need 5 CPUs, but only 4 are available" in done.stderr


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.skipif(default_num_threads() < 2, reason="two replicas need two CPUs")
def test_the_command_serves_and_leaves_nothing_behind(tmp_path):
    """On SIGTERM a running stream is finished. Afterwards no process, file or variable is left."""
    log = (tmp_path / "log").open("w+")
    environment = {**os.environ, "TMPDIR": "/tmp", "HOME": str(tmp_path)}
    flags = ["--workers", "2", "--num-threads", "1"]
    with subprocess.Popen(_command(*flags), stdout=log, stderr=log, env=environment) as process:
        try:

            def address():
                assert process.poll() is None, Path(log.name).read_text()
                found = re.search(r'"url": "(http://[^"]+)"', Path(log.name).read_text())
                return found[1] if found else None

            wait_until(address, "the server to listen", 180)
            children = psutil.Process(process.pid).children(recursive=True)
            [raylet] = [child for child in children if "raylet" in child.name()]
            found = re.search(r"/[\w/]+/kvray-\w+", " ".join(raylet.cmdline()))
            assert found
            files = Path(found[0])
            assert files.is_dir()
            assert files.stat().st_mode & 0o77 == 0, (
                "the directory must not be accessible to other users"
            )
            assert files.parent in (Path(MEMORY_PLACE), Path("/tmp"))
            body = {
                "prompt": "Count",
                "max_tokens": 300,
                "temperature": 0,
                "stream": True,
                "ignore_eos": True,
            }
            with (
                httpx.Client(base_url=str(address()), timeout=60) as client,
                client.stream("POST", "/v1/completions", json=body) as answer,
            ):
                lines = answer.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                events = [line[6:] for line in lines if line.startswith("data: ")]
            assert events[-1] == "[DONE]"
            assert any(
                json.loads(event).get("choices", [{}])[0].get("finish_reason")
                for event in events[:-1]
            )
            assert process.wait(timeout=60) == 0, Path(log.name).read_text()
        finally:
            process.kill()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
    assert not files.exists()
    assert not (tmp_path / ".ray").exists()
    log.close()
