"""Tests of models that clients create from others: their defaults, templates and files, and
rejected requests.
"""

import dataclasses
import json
import logging
import sys
from pathlib import Path

import ollama
import pytest

from helpers.server.changed_models import NAME, closing_client, names
from helpers.server.live_servers import serving, wait_until
from helpers.server.served_models import CountedSource
from kvboost_edge.errors import ConfigError
from kvboost_edge.models.locate import managed as store_module
from kvboost_edge.models.locate.managed import ManagedModel, managed_models
from kvboost_edge.server.__main__ import _managed
from kvboost_edge.server.model_defaults import ModelDefaults
from kvboost_edge.server.models.changes import ManagedModels
from kvboost_edge.server.models.created import ModelOverrides, created_from
from kvboost_edge.server.models.served import ModelSource
from kvboost_edge.server.serve_options import options_from

ASK = [{"role": "user", "content": "Once there was a word."}]
SYSTEM = "You are Mario."
SAMPLED = {"temperature": 0.9, "top_k": 20, "seed": 7, "num_predict": 12, "repeat_penalty": 1.1}
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
GO = "{{ if .System }}{{ .System }}{{ end }}{{ .Prompt }}"
MODELFILE = f'''# as older clients send it
FROM a
SYSTEM """{SYSTEM}"""
TEMPLATE """{TEMPLATE}"""
PARAMETER temperature 0.9
PARAMETER top_k 20
PARAMETER seed 7
PARAMETER num_predict 12
PARAMETER repeat_penalty 1.1
PARAMETER stop "<end>"
PARAMETER stop "word"
LICENSE MIT
'''


def said(client, model, **fields):
    answer = client.chat(model, fields.pop("messages", ASK), **fields)
    return answer.message.content, answer.eval_count


def test_ollamas_client_creates_a_model(serve):
    with serve() as server, closing_client(server) as client:
        events = list(
            client.create("mario", from_="a", system=SYSTEM, parameters=SAMPLED, stream=True)
        )
        assert [event.status for event in events] == [
            "reading model metadata",
            "creating system layer",
            "creating parameters layer",
            "writing manifest",
            "success",
        ]
        assert names(server) == ["a", "mario"]
        whole = [{"role": "system", "content": SYSTEM}, *ASK]
        expected = said(client, "a", messages=whole, options=SAMPLED)
        assert said(client, "mario") == expected == said(client, "mario:latest")
        assert expected != said(client, "a", options=SAMPLED)
        # Values in the request have precedence.
        other = {**SAMPLED, "seed": 8, "num_predict": 5}
        assert said(client, "mario", options={"seed": 8, "num_predict": 5}) == said(
            client, "a", messages=whole, options=other
        )
        # A created model passes on its defaults.
        assert client.create("luigi", from_="mario", system="You are Luigi.").status == "success"
        whole[0] = {"role": "system", "content": "You are Luigi."}
        assert said(client, "luigi") == said(client, "a", messages=whole, options=SAMPLED)
        client.copy("luigi", "third")
        assert said(client, "third") == said(client, "luigi")


def test_a_created_model_has_its_own_template(serve):
    with serve() as server, closing_client(server) as client, server.client() as http:
        options = {"temperature": 0, "num_predict": 12}
        client.create("other", from_="a", template=TEMPLATE, system=SYSTEM, parameters=options)
        prompt = f"[system] {SYSTEM}\n[user] {ASK[0]['content']}\n[assistant]"
        ids = server.engine.tokenizer.encode(prompt, False)
        body = {"model": "a", "prompt": ids, "max_tokens": 12, "temperature": 0}
        expected = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        answer = client.chat("other", ASK)
        assert answer.message.content == expected
        assert answer.message.content != said(client, "a", options=options)[0]
        rendered = http.post("/apply-template", json={"model": "other", "messages": ASK}).json()
        assert rendered["prompt"] == prompt
        assert client.show("other").template == TEMPLATE
        # The source model keeps its own template.
        assert client.show("a").template not in ("", TEMPLATE)


def test_an_older_modelfile_field_is_accepted_and_shown(serve):
    with serve() as server, closing_client(server) as client, server.client() as http:
        body = {"name": "old", "modelfile": MODELFILE}
        lines = http.post("/api/create", json=body).text.strip().splitlines()
        assert [json.loads(line)["status"] for line in lines][1:-2] == [
            f"creating {layer} layer" for layer in ("template", "system", "license", "parameters")
        ]
        shown = client.show("old")
        assert shown.parameters.splitlines() == [
            f"{name:<30} {value}"
            for name, value in (
                ("num_predict", 12),
                ("repeat_penalty", 1.1),
                ("seed", 7),
                ("stop", '"<end>"'),
                ("stop", '"word"'),
                ("temperature", 0.9),
                ("top_k", 20),
            )
        ]
        assert (shown.template, shown.license) == (TEMPLATE, "MIT")
        assert shown.details.parent_model == "a"
        assert http.post("/api/show", json={"model": "old"}).json()["system"] == SYSTEM
        # The shown Modelfile creates the same model.
        again = {"model": "again", "modelfile": shown.modelfile, "stream": False}
        assert http.post("/api/create", json=again).json() == {"status": "success"}
        assert client.show("again").parameters == shown.parameters
        assert said(client, "again") == said(client, "old")
        listed = {one.model: one for one in client.list().models}
        assert listed["old:latest"].details.parent_model == "a"
        assert listed["old:latest"].digest != listed["again:latest"].digest


def test_created_models_survive_a_restart_and_their_source(serve, hub):
    with serve() as server, closing_client(server) as client:
        client.pull(NAME)
        parameters = {"temperature": 0, "num_predict": 9, "num_ctx": 100}
        client.create("mario", from_=NAME, system=SYSTEM, parameters=parameters)
        client.create("of-a", from_="a", system=SYSTEM)
        expected = said(client, "mario")
        assert client.delete(NAME).status == "success"
        assert said(client, "mario") == expected
        with pytest.raises(ollama.ResponseError, match=r"name a model of this server, or pull it"):
            client.create("x", from_=NAME)
    with serve() as server, closing_client(server) as client, server.client() as http:
        assert names(server) == ["a", "mario", "of-a"]
        assert said(client, "mario") == expected
        listed = {one["id"]: one for one in http.get("/v1/models").json()["data"]}
        assert listed["mario"]["max_model_len"] == 100
        assert "num_ctx                        100" in client.show("mario").parameters
        long = [{"role": "user", "content": "word " * 40}]
        with pytest.raises(ollama.ResponseError, match="100 tokens"):
            client.chat("mario", long)
        # A new model of the same name replaces it, even while it is loaded.
        client.create("mario", from_="mario", parameters={"num_predict": 3})
        assert said(client, "mario")[1] == 3
        client.delete("mario")
        assert names(server) == ["a", "of-a"]
        assert not list(managed_models().root.rglob("*.gguf"))
    with serve(model_name="b") as server:  # the source model is not served
        assert names(server) == ["b"]
    assert len(hub.downloads()) == 1


def test_defaults_of_the_command_line_are_inherited(serve):
    defaults = {"a": ModelDefaults("Be brief.", {"temperature": 0.0, "top_k": 3})}
    with serve(model_defaults=defaults) as server, closing_client(server) as client:
        client.create("b", from_="a", parameters={"top_k": 5, "num_predict": 8})
        assert said(client, "b") == said(client, "a", options={"num_predict": 8})
        state = server.kv.models.find("b").state
        assert state.defaults.system == "Be brief."
        assert state.sampling_defaults.top_k == 5


FROM_A = {"model": "x", "from": "a"}


@pytest.mark.parametrize(
    ("body", "status", "problem"),
    [
        ({"from": "a"}, 400, "model is missing; name the model"),
        ({"model": "x"}, 400, "from is missing; name the model to start from"),
        ({"model": "../x", "from": "a"}, 400, "is invalid"),
        ({"model": "a", "from": "a"}, 400, "given on the command line"),
        ({"model": "x", "from": "y"}, 404, "model 'y' not found; name a model of this server"),
        ({"model": "x", "from": "/etc/passwd"}, 400, "is invalid"),
        ({"model": "x", "from": "../../x.gguf"}, 400, "is invalid"),
        ({**FROM_A, "files": {"a.gguf": "sha256:0"}}, 400, "files: is not supported: files cannot"),
        ({**FROM_A, "adapters": {"a": "b"}}, 400, "adapters: is not supported: LoRA"),
        ({**FROM_A, "quantize": "q4_K_M"}, 400, "quantize: is not supported: a created model"),
        ({**FROM_A, "messages": ASK}, 400, "messages: is not supported: send these"),
        ({**FROM_A, "path": "/x/Modelfile"}, 400, "path: is not supported: paths of the server"),
        ({**FROM_A, "renderer": "qwen3"}, 400, "renderer: is not supported"),
        ({**FROM_A, "remote_host": "x"}, 400, "remote_host: is not supported"),
        ({**FROM_A, "sytem": "x"}, 400, "did you mean 'system'?"),
        ({**FROM_A, "parameters": {"temperature": 9}}, 400, "temperature"),
        ({**FROM_A, "parameters": {"tfs_z": 0.5}}, 400, "this sampler is not supported"),
        ({**FROM_A, "parameters": {"top_kk": 5}}, 400, "did you mean 'top_k'?"),
        ({**FROM_A, "template": GO}, 400, "is a Go template"),
        ({**FROM_A, "template": "{{ .Prompt }}"}, 400, "is a Go template"),
        ({**FROM_A, "template": "{% for"}, 400, "the template cannot be used"),
        ({**FROM_A, "template": "Hello"}, 400, "does not write a user's message"),
        (
            {
                **FROM_A,
                "template": "{% for i in range(99999) %}{% for j in range(99999) %}a{% endfor %}{% endfor %}",
            },
            400,
            "exceeded its limits",
        ),
        ({**FROM_A, "template": "{# " + "x" * (1 << 16) + " #}"}, 400, "over the limit"),
        ({**FROM_A, "modelfile": "FROM a"}, 400, "modelfile and from are both given"),
        ({"model": "x", "modelfile": "SYSTEM x"}, 400, "has no FROM line"),
        ({"model": "x", "modelfile": "FROM a\nFROM a"}, 400, "line 2: FROM is given twice"),
        ({"model": "x", "modelfile": "FROM a\nADAPTER b"}, 400, "line 2: ADAPTER is not supported"),
        ({"model": "x", "modelfile": "FROM a\nMESSAGE user x"}, 400, "MESSAGE is not supported"),
        ({"model": "x", "modelfile": "FROM a\nFOO b"}, 400, "'FOO' is not one of FROM"),
        ({"model": "x", "modelfile": 'FROM a\n\nSYSTEM """x'}, 400, "line 3: the text that begins"),
        ({"model": "x", "modelfile": "FROM a\nPARAMETER top_k"}, 400, "needs a name and a value"),
        ({"model": "x", "modelfile": "FROM a\nPARAMETER top_k x"}, 400, "top_k"),
        ({"model": "x", "modelfile": f"FROM a\nTEMPLATE {GO}"}, 400, "is a Go template"),
    ],
)
def test_invalid_create_requests_are_refused(created_server, body, status, problem):
    for streams in (True, False):
        with created_server.client() as client:
            answer = client.post("/api/create", json={**body, "stream": streams})
        # A stream begins with the progress, so later problems are its last line.
        error = json.loads(answer.text.strip().splitlines()[-1])["error"]
        assert problem in error
        assert answer.status_code in ((200, status) if streams else (status,))
    assert names(created_server) == ["a"]


@pytest.fixture(scope="module")
def created_server(tmp_path_factory, tiny_model_dir):
    """Server whose model store stays empty."""
    store = store_module.ModelStore(tmp_path_factory.mktemp("store"))
    with (
        CountedSource(tiny_model_dir).open() as engine,
        serving(engine, managed=ManagedModels(store, None), model_name="a") as server,
    ):
        yield server


def test_the_total_size_of_model_records_is_bounded(serve, monkeypatch):
    monkeypatch.setattr(store_module, "_MAX_RECORD_BYTES", 2000)
    with serve() as server, server.client() as client:
        body = {"model": "x", "from": "a", "system": "x" * 2000, "stream": False}
        answer = client.post("/api/create", json=body)
        assert (answer.status_code, "more than 2000" in answer.json()["error"]) == (400, True)
        monkeypatch.setattr(store_module, "_MAX_MODELS", 1)
        for name, status in (("y", 200), ("z", 400)):
            answer = client.post("/api/create", json={"model": name, "from": "a", "stream": False})
            assert answer.status_code == status
        assert "which is the limit" in answer.json()["error"]


def test_a_damaged_record_is_refused_when_it_is_loaded(serve):
    with serve() as server, closing_client(server) as client:
        client.create("x", from_="a", system=SYSTEM)
        served = server.kv.models.find("x")
        served.record = dataclasses.replace(served.record, sampling={"top_k": -5})
        with pytest.raises(ollama.ResponseError, match=r"top_k=-5"):
            client.chat("x", ASK)
        served.record = dataclasses.replace(served.record, sampling={"tmp": 1})
        with pytest.raises(ConfigError, match="has a parameter 'tmp', which is not one of"):
            served.defaults(server.kv.settings)


def test_prompts_are_not_logged(serve, caplog):
    with caplog.at_level(logging.DEBUG), serve() as server, closing_client(server) as client:
        client.create("x", from_="a", system="a secret system message")
        client.chat("x", ASK, options={"num_predict": 2})
    assert "model created" in caplog.text
    assert "secret" not in caplog.text


def test_created_models_share_weights_and_disk_blocks(tiny_model_dir, tmp_path, monkeypatch):
    """A created model and its source are loaded together."""
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path))
    source = CountedSource(tiny_model_dir, disk_cache_dir=str(tmp_path / "blocks"))
    managed = ManagedModels(managed_models(), lambda model: source.source)
    with (
        source.open() as engine,
        serving(engine, managed=managed, model_name="a") as server,
        closing_client(server) as client,
        server.client() as http,
    ):
        client.create("b", from_="a", system=SYSTEM, parameters={"temperature": 0})
        chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "word " * 20}]
        body = {"model": "a", "messages": chat, "temperature": 0, "max_tokens": 1}
        usage = http.post("/v1/chat/completions", json=body).json()["usage"]
        whole = usage["prompt_tokens"] // engine.config.block_size
        assert whole > 4
        wait_until(
            lambda: engine.paged_stats()["tiers"]["disk"]["blocks"] >= whole, "the blocks on disk"
        )
        body = {"model": "b", "messages": chat[1:], "max_tokens": 1}
        usage = http.post("/v1/chat/completions", json=body).json()["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached >= (whole - 1) * engine.config.block_size
        if sys.platform == "linux":
            maps = Path("/proc/self/maps").read_text().splitlines()
            found = [line.split() for line in maps if line.endswith(".kvpack")]
            mapped = [(row[1], row[4]) for row in found if row[5].startswith(str(tmp_path))]
            assert mapped == [("r--s", mapped[0][1])] * 2  # one file, shared through the page cache


def test_max_model_len_limits_a_created_models_context(hub):
    """max_memory is left to the loader, which applies it to all models together."""
    seen = []

    def source(model, options):
        assert "max_memory" not in options.engine
        seen.append((model, options.engine["max_model_len"]))
        return ModelSource(lambda: 0, None)

    given = {"model": ["a=kvboost-edge/demo"], "max_model_len": 500, "max_memory": 1 << 30}
    options = options_from(given)
    managed = _managed(options, source)
    for context in (None, 300, 900):
        model = ManagedModel(name="m", origin="a", served="a", context=context)
        managed.source_of(model).plan()
    assert seen == [("kvboost-edge/demo", length) for length in (500, 300, 500)]


def test_null_values_remove_inherited_defaults():
    base = ManagedModel(name="b", origin="o", folder="f", sampling={"max_tokens": 5, "seed": 3})
    model = created_from(base, "x", ModelOverrides(sampling={"max_tokens": None, "top_k": 4}))
    assert (model.origin, model.folder, model.sampling) == ("o", "f", {"seed": 3, "top_k": 4})
