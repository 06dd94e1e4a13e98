"""docs/deploy/serve.yaml as `serve run` runs it, with the server on the cluster too, restarted and
scaled under load.
"""

import concurrent.futures
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from helpers.serve_ray.replica_cases import replica_processes
from helpers.server.live_servers import wait_until
from kvboost_edge.models.locate import locate_model

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

NAME = "kvboost-edge"
FILE = Path(__file__).parents[2] / "docs" / "deploy" / "serve.yaml"
GREEDY = {"temperature": 0, "ignore_eos": True}


class Cluster:
    """The file's application on the Ray cluster of the tests, at a free port."""

    def __init__(self, address, folder):
        import yaml

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.config = yaml.safe_load(FILE.read_text())
        assert self.config["http_options"] == {"host": "127.0.0.1", "port": 8000}
        self.config["http_options"]["port"] = port
        self._address = address
        self._file = folder / "serve.yaml"

    def deploy(self, **changes):
        """Deploy the application with other values, without waiting for them."""
        from kvboost_edge.serve_ray.start import _OWN

        self.config["applications"][0] |= changes
        self._file.write_text(json.dumps(self.config))  # JSON is YAML
        own = {name: value for name, value in _OWN.items() if value is not None}
        serve = [sys.executable, "-c", "from ray.serve.scripts import cli; cli()"]
        done = subprocess.run(
            [*serve, "run", "--non-blocking", str(self._file)],
            env={**os.environ, **own, "RAY_ADDRESS": self._address},
            cwd=FILE.parents[2],
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def client(self):
        return httpx.Client(base_url=self.url, timeout=60)

    def is_ready(self):
        with contextlib.suppress(httpx.HTTPError), self.client() as client:
            return client.get("/ready").status_code == 200
        return False

    def scale(self, count):
        """Set the number of replicas that Ray runs, without waiting for them."""
        self.deploy(deployments=[{"name": "engine", "num_replicas": count}])

    def states(self):
        """Return the number of replicas in each of Ray's states."""
        from ray import serve

        return dict(serve.status().applications[NAME].deployments["engine"].replica_states)

    def running(self):
        """Return the number of requests that each replica computes, from the server's metrics."""
        with self.client() as client:
            lines = client.get("/metrics").text.splitlines()
        told = [line for line in lines if line.startswith("vllm:num_requests_running{")]
        return {
            line.split('replica="')[1].split('"')[0]: int(float(line.split()[-1])) for line in told
        }

    def replicas(self):
        return set(self.running())

    def num_running(self):
        return sum(self.running().values())

    def ask(self, prompt, **fields):
        with self.client() as client:
            answer = client.post(
                "/v1/completions", json={"prompt": prompt, "max_tokens": 4, **GREEDY, **fields}
            )
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, prompt, **fields):
        """Return the data of a stream as far as it was received."""
        found = []
        body = {"prompt": prompt, "stream": True, **GREEDY, **fields}
        with (
            contextlib.suppress(httpx.HTTPError),
            self.client() as client,
            client.stream("POST", "/v1/completions", json=body) as answer,
        ):
            found.extend(line[6:] for line in answer.iter_lines() if line.startswith("data: "))
        return found


def text_of(events):
    """Return the text of a complete stream."""
    assert events[-1] == "[DONE]"
    return "".join(
        choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"]
    )


@pytest.fixture(scope="module")
def cluster(ray_cluster, tmp_path_factory):
    from ray import serve

    serve.shutdown()  # the cluster of other tests has no port
    found = Cluster(ray_cluster, tmp_path_factory.mktemp("deploy"))
    found.deploy()
    wait_until(found.is_ready, "the server to be ready", 180)
    yield found
    serve.shutdown()


def test_the_documented_serve_file_works(cluster, alone):
    wait_until(lambda: len(cluster.replicas()) == 2, "two replicas to tell their figures", 60)
    expected = alone.generate(
        "Hello", max_new_tokens=12, temperature=0.0, ignore_eos=True
    ).output_text
    assert cluster.ask("Hello", max_tokens=12)["choices"][0]["text"] == expected
    assert text_of(cluster.events("Hello", max_tokens=12)) == expected


def test_a_restarted_server_relearns_what_replicas_hold(cluster):
    """Each prompt was placed by a cache key of its own. A server that did not relearn the places
    would miss half of them.
    """
    prompts = [[20 + number, *range(100, 100 + 159)] for number in range(12)]
    for number, prompt in enumerate(prompts):
        cluster.ask(prompt, prompt_cache_key=f"key {number}")
    before = cluster.replicas()
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        streams = [
            threads.submit(cluster.events, [number, 7], max_tokens=1500) for number in range(30, 34)
        ]
        wait_until(lambda: cluster.num_running() == 4, "the streams to run", 60)
        [server] = replica_processes(NAME, "server")
        server.kill()
        for stream in streams:
            assert stream.result(timeout=120)[-1:] != ["[DONE]"]
    wait_until(lambda: not server.is_running(), "the server to end", 60)
    wait_until(cluster.is_ready, "the server to be back", 120)
    assert cluster.replicas() == before
    cached = [
        cluster.ask(prompt)["usage"]["prompt_tokens_details"]["cached_tokens"] for prompt in prompts
    ]
    assert cached == [159] * 12
    wait_until(lambda: not cluster.num_running(), "abandoned requests to end", 60)


def test_scaling_up_and_down_does_not_break_streams(cluster, alone):
    """The file's `deployments` set the number of replicas. The first replica stays, replicas that
    stop finish their streams, and every answer equals that of one engine.
    """
    prompts = [[number, 7] for number in range(40, 56)]
    whole = alone.generate_batch(prompts, max_new_tokens=200, temperature=0.0, ignore_eos=True)
    is_enough = threading.Event()

    def stream_on(prompt):
        """Run one stream after another, whatever happens to the replicas, and return their texts."""
        texts = []
        while not is_enough.is_set():
            texts.append(text_of(cluster.events(prompt, max_tokens=200)))
        return texts

    def scaled(count):
        cluster.scale(count)
        wait_until(
            lambda: len(cluster.replicas()) == count, f"{count} replicas to tell their figures", 120
        )
        return cluster.replicas()

    one = scaled(1)
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as threads:
        streams = [threads.submit(stream_on, prompt) for prompt in prompts]
        try:
            wait_until(cluster.num_running, "streams to run on one replica", 60)
            three = scaled(3)
            assert one < three

            def each_has_some():
                running = cluster.running()
                return running.keys() == three and all(running.values())

            wait_until(each_has_some, "each of three to have some", 120)
            assert scaled(1) < three
            wait_until(
                lambda: cluster.states() == {"RUNNING": 1},
                "the two others to have ended what they had",
                120,
            )
        finally:
            is_enough.set()
        texts = [set(stream.result(timeout=120)) for stream in streams]
    assert texts == [{result.output_text} for result in whole]


def test_a_new_model_waits_for_its_own_replicas(cluster, tmp_path):
    """While Ray replaces the replicas, those of the previous model still exist. The new server
    refuses them and waits.
    """
    model = Path(shutil.copytree(locate_model("kvboost-edge/demo"), tmp_path / "model"))
    with (model / "config.json").open("a") as config:
        config.write("\n")
    arguments = {
        **cluster.config["applications"][0]["args"],
        "model": str(model),
        "model_name": "another",
    }
    cluster.deploy(args=arguments, deployments=[])

    def models():
        with contextlib.suppress(httpx.HTTPError, ValueError, KeyError), cluster.client() as client:
            return [one["id"] for one in client.get("/v1/models").json()["data"]]
        return []

    wait_until(lambda: models() == ["another"], "the new server to answer", 180)
    assert cluster.ask("Hello")["usage"]["completion_tokens"] == 4
    wait_until(lambda: len(cluster.replicas()) == 2, "two replicas to tell their figures", 120)
