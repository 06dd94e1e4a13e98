"""Tests of the commands' flags: names, defaults, the settings that they reach, and rejected values."""

import dataclasses
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.engine.fake_runner import expected_tokens, fake_engine
from kvboost_edge.cli.app import run
from kvboost_edge.config import CHOICES, EngineConfig, GenerationMode
from kvboost_edge.errors import ConfigError, install_extra
from kvboost_edge.host.file_memo import cache_directory
from kvboost_edge.server.__main__ import main
from kvboost_edge.server.flags import parse_flags
from kvboost_edge.server.serve_options import DEMO_MODEL, NamedModel, command_options
from kvboost_edge.server.settings import ServerSettings, tenant_of_key
from kvboost_edge.server.work.engine_warmup import prepare

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("kept_logging")


@pytest.fixture(autouse=True)
def no_keys_in_the_environment(monkeypatch):
    for name in ("KVBOOST_API_KEY", "KVBOOST_API_KEYS", "KVBOOST_EDGE_REDIS_URL"):
        monkeypatch.delenv(name, raising=False)


def parse(*argv):
    return parse_flags(argv, "kvboost-server")


def test_default_values_of_flags():
    options = parse()
    assert options.model == DEMO_MODEL
    assert options.settings == ServerSettings(model_name=DEMO_MODEL)
    assert set(options.engine) == {"disk_cache_dir"}, (
        "the server must leave other options to the engine"
    )
    assert Path(options.engine["disk_cache_dir"]) == cache_directory() / "blocks"
    settings = options.settings
    assert (settings.host, settings.port, settings.max_batch_size, settings.max_queue_size) == (
        "127.0.0.1",
        8000,
        None,
        256,
    )
    assert (settings.batch_window_ms, settings.request_timeout, settings.drain_seconds) == (
        20,
        120,
        30,
    )
    assert (settings.header_seconds, settings.body_seconds, settings.write_seconds) == (10, 30, 30)


@pytest.mark.parametrize(
    ("flag", "text", "value"),
    [
        ("port", "9", 9),
        ("model-name", "served", "served"),
        ("max-batch-size", "3", 3),
        ("batch-window-ms", "0", 0.0),
        ("max-queue-size", "0", 0),
        ("max-queue-tokens", "77", 77),
        ("request-timeout", "1.5", 1.5),
        ("drain-seconds", "0", 0.0),
        ("max-body-bytes", "4096", 4096),
        ("max-connections", "5", 5),
        ("header-seconds", "2", 2.0),
        ("body-seconds", "3", 3.0),
        ("write-seconds", "4", 4.0),
        ("keep-alive-seconds", "5", 5.0),
        ("log-level", "error", "error"),
        ("log-format", "text", "text"),
        ("host", "localhost", "localhost"),
        ("mode", "chunk_kv_reuse", GenerationMode.CHUNK_KV_REUSE),
    ],
)
def test_server_flags_set_their_settings(flag, text, value):
    assert getattr(parse(f"--{flag}", text).settings, flag.replace("-", "_")) == value


@pytest.mark.parametrize(
    ("flag", "text", "name", "value"),
    [
        ("device", "cpu", "device", "cpu"),
        ("dtype", "float32", "dtype", "float32"),
        ("backend", "default", "backend", "auto"),
        ("backend", "cpu-paged", "backend", "cpu"),
        ("backend", "reference", "backend", "reference"),
        ("runner", "native", "runner", "native"),
        ("weights", "int8", "weights", "int8"),
        ("weights", "int4-asym", "weights", "int4-asym"),
        ("max-cache-bytes", "4e9", "max_cache_bytes", 4e9),
        ("max-cache-bytes", "4000000000", "max_cache_bytes", 4_000_000_000),
        ("max-cache-bytes", "4GiB", "max_cache_bytes", 4 * 2**30),
        ("block-size", "32", "block_size", 32),
        ("num-blocks", "9", "num_blocks", 9),
        ("kv-cache-bits", "8", "kv_cache_bits", 8),
        ("kv-cache-bits", "8,4", "kv_cache_bits", (8, 4)),
        ("max-batch-tokens", "64", "max_batch_tokens", 64),
        ("num-threads", "1", "num_threads", 1),
        ("revision", "main", "revision", "main"),
        ("max-batch-size", "3", "max_num_seqs", 3),
    ],
)
def test_engine_flags_set_their_options(flag, text, name, value):
    assert parse(f"--{flag}", text).engine[name] == value


def test_no_pack_cache_stores_no_packed_weights():
    assert parse_flags(["--no-pack-cache"], "p").engine == {"pack_cache": False}
    asked = parse_flags(["--no-pack-cache", "--disk-cache-dir", "/elsewhere"], "p").engine
    assert asked == {"pack_cache": False, "disk_cache_dir": "/elsewhere"}


def test_a_redis_server_by_flag_or_environment(monkeypatch):
    url = "redis://:hidden@host:1/2"
    another = "redis://another"
    assert parse("--redis-url", url, "--redis-trust").engine | {"disk_cache_dir": ""} == {
        "disk_cache_dir": "",
        "redis_url": url,
        "redis_trust": True,
    }
    monkeypatch.setenv("KVBOOST_EDGE_REDIS_URL", url)
    assert parse().engine["redis_url"] == url
    assert parse("--redis-url", another).engine["redis_url"] == another
    assert "hidden" not in repr(parse())


def test_recompute_flags_have_the_engines_defaults(capsys):
    flags = (
        "--recompute-strategy",
        "cacheblend",
        "--recompute-overlap",
        "8",
        "--recompute-ratio",
        "0.25",
    )
    assert parse(*flags).engine | {"disk_cache_dir": ""} == {
        "disk_cache_dir": "",
        "recompute_strategy": "cacheblend",
        "recompute_overlap": 8,
        "recompute_ratio": 0.25,
    }
    with pytest.raises(SystemExit):
        parse("--help")
    shown = " ".join(capsys.readouterr().out.split())
    defaults = EngineConfig()
    for name in flags[::2]:
        said = shown.split(name + " ")[-1].split(" --")[0]
        assert f"Default: {getattr(defaults, name[2:].replace('-', '_'))}" in said


def test_every_setting_has_a_flag(capsys):
    with pytest.raises(SystemExit) as stop:
        parse("--help")
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    singular = {
        "api_keys": "api-key",
        "model_aliases": "model-name",
        "admin_api_keys": "admin-api-key",
        "allowed_hosts": "allowed-host",
        "cors_origins": "cors-origin",
        "model_changes": "no-model-changes",
        "model_registries": "model-registry",
    }
    for field in dataclasses.fields(ServerSettings):
        assert f"--{singular.get(field.name, field.name.replace('_', '-'))}" in shown
    for name in ("--model", "--device", "--backend", "--kv-cache-bits", "--warm", "--workers"):
        assert name in shown
    assert "KVBOOST_API_KEYS" in shown
    assert "KVBOOST_ADMIN_API_KEYS" in shown


def test_repeatable_flags_and_keys(tmp_path, monkeypatch):
    monkeypatch.setenv("KVBOOST_API_KEYS", "c,d")
    monkeypatch.setenv("KVBOOST_ADMIN_API_KEY", "f")
    (tmp_path / "keys").write_text("b\n")
    options = parse(
        *(
            "--api-key",
            "a",
            "--api-key-file",
            str(tmp_path / "keys"),
            "--host",
            "0.0.0.0",
            "--admin-api-key",
            "e",
        ),
        *(
            "--allowed-host",
            "x.example",
            "--allowed-host",
            "y.example",
            "--cors-origin",
            "https://z.example",
        ),
    )
    assert options.settings.api_keys == ("a", "b", "c", "d")
    assert options.settings.admin_api_keys == ("e", "f")
    assert options.settings.allowed_hosts == ("x.example", "y.example")
    assert options.settings.cors_origins == ("https://z.example",)
    admin_only = parse("--admin-api-key-file", str(tmp_path / "keys"))
    assert admin_only.settings.admin_api_keys == ("b", "f")


def test_the_served_name_contains_no_path(tmp_path, monkeypatch):
    (tmp_path / "my-model").mkdir()
    (tmp_path / "link.gguf").symlink_to(tmp_path / "my-model")
    assert parse("--model", str(tmp_path / "link.gguf")).settings.model_name == "link.gguf"
    monkeypatch.chdir(tmp_path / "my-model")
    assert parse("--model", ".").settings.model_name == "my-model"
    assert parse("--model", str(tmp_path / "my-model")).settings.model_name == "my-model"
    assert parse("--model", "owner/hub-model").settings.model_name == "owner/hub-model"
    assert parse("-m", "owner/hub-model", "--model-name", "short").settings.model_name == "short"


def test_warm_texts_are_given_or_read_from_files(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("from a file")
    assert parse("--warm", "given", "--warm", f"@{file}").warm == ("given", "from a file")
    assert parse("--warm-document", f"@{file}", "--warm-document", "two").warm_documents == (
        "from a file",
        "two",
    )
    assert parse("--warm-system", f"@{file}", "--warm-system", "two").warm_systems == (
        "from a file",
        "two",
    )
    for flag in ("--warm", "--warm-system", "--warm-document"):
        with pytest.raises(ConfigError, match="missing"):
            parse(flag, f"@{tmp_path / 'missing'}")


def test_documents_are_chunked_and_warmed_for_each_key():
    text = "".join(f"Note {number} says that it is note {number}. " for number in range(5))
    argv = [
        "--chunk-size",
        "48",
        "--overlap-k",
        "16",
        "--primer-tokens",
        "32",
        "--reuse-gate",
        "off",
    ]
    options = parse(*argv, "--warm-document", text, "--api-key", "a" * 20, "--api-key", "b" * 20)
    wanted = {
        name: options.engine[name]
        for name in ("chunk_size", "overlap_k", "primer_tokens", "reuse_gate")
    }
    with fake_engine(128, **wanted) as engine:
        tenants = [tenant_of_key(key) for key in options.settings.all_keys]
        prepare(engine, options.warm, options.warm_documents, tenants)
        prompt = [*range(20), *engine.tokenizer.encode(text, False), 7]
        for key in ("a" * 20, "b" * 20, "c" * 20):
            result = engine.generate(
                prompt,
                4,
                mode="chunk_kv_reuse",
                recompute_strategy="none",
                tenant=tenant_of_key(key),
            )
            assert (result.reused_span_tokens > 100) == (key[0] != "c")
            assert list(result.output_token_ids) == expected_tokens(prompt, 4)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--workers", "0"], "workers=0"),
        (["--host", "0.0.0.0"], "--insecure"),
        (["--port", "70000"], "port=70000"),
        (["--max-batch-size", "0"], "max_batch_size=0"),
        (["--request-timeout", "nan"], "request_timeout"),
        (["--request-timeout", "0"], "request_timeout"),
        (["--batch-window-ms", "-1"], "batch_window_ms"),
        (["--allowed-host", "http://x"], "allowed_hosts"),
        (["--cors-origin", "*"], "cors_origins"),
        (["--kv-cache-bits", "5"], "kv_cache_bits"),
        (["--backend", "nonsense"], "backend"),
        (["--chunk-size", "8"], "chunk_size=8"),
        (["--overlap-k", "-1"], "overlap_k=-1"),
        (["--sink-tokens", "128"], "sink_tokens=128"),
        (["--chunk-boundary-window", "128"], "chunk_boundary_window=128"),
        (["--recompute-strategy", "left"], "recompute_strategy='left'"),
        (["--recompute-ratio", "2"], "recompute_ratio=2"),
    ],
)
def test_invalid_values_exit_with_2_and_one_line(argv, words, capsys):
    assert main(argv) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("kvboost-server: error: ")
    assert words in error


def help_of(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    return " ".join(capsys.readouterr().out.split())


def test_the_help_lists_choices_and_defaults(capsys):
    shown = help_of(capsys)
    for flag in (
        "runner",
        "backend",
        "dtype",
        "weights",
        "rope-range",
        "reuse-gate",
        "speculation",
    ):
        assert f"--{flag} {{{','.join(CHOICES[flag.replace('-', '_')])}}}" in shown
    assert "--recompute-strategy {none,selective,cacheblend,query}" in shown
    assert "--normalise, --normalize KINDS Changes by clients" in shown
    assert "Default: tools,arguments,billing,thinking" in shown
    assert "'" not in shown.split("--normalize")[1].split("Limits:")[0], (
        "the help must not show Python representations"
    )
    for name, declared in command_options().items():
        last = sorted(declared.flags(name), key=len)[-1]
        described = shown.split(f"{last} ")[1]
        described = re.split(r" --[\w-]+ ", described)[0]
        assert declared.help in described or declared.off in described
        if declared.kind is not bool and declared.shown_default:
            assert f"Default: {declared.shown_default}" in described, name


def test_wrong_usage_prints_one_line_and_points_to_help(capsys):
    for argv, named in (
        (["--modl", "x"], "--modl"),
        (["--log-level", "loud"], "loud"),
        (["--port", "many"], "many"),
    ):
        with pytest.raises(SystemExit):
            parse(*argv)
        first, second = capsys.readouterr().err.splitlines()
        assert first.startswith("kvboost-server: error: ")
        assert named in first
        assert second == "Try 'kvboost-server --help'."


def test_a_misspelled_flag_or_value_suggests_the_right_one(capsys):
    for argv, said in (
        (["--thread", "2"], "No such option: --thread. Did you mean --threads?"),
        (["--temperatur", "0"], "No such option: --temperatur. Did you mean --temperature?"),
        (["--batch-window-ms", "x"], "Invalid value for '--batch-window-ms': 'x' is not a number"),
        (
            ["--kv-cache-bits", "8,4,4"],
            "Invalid value for '--kv-cache-bits': kv_cache_bits='8,4,4' must be 16, 8, 4, or a "
            "pair such as 8,4 for keys and values",
        ),
    ):
        with pytest.raises(SystemExit):
            parse(*argv)
        assert capsys.readouterr().err.splitlines()[0] == f"kvboost-server: error: {said}"


def test_serve_is_a_command_of_the_package(capsys):
    assert run(["serve", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "kvboost-edge serve" in shown
    assert "Examples" in shown
    assert run(["serve", "--workers", "0"]) == 2
    assert "kvboost-edge: error: workers=0" in capsys.readouterr().err


def run_code(code):
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_missing_extra_is_named():
    code = (
        "import sys; sys.modules['uvicorn'] = None\n"
        "from kvboost_edge.server.__main__ import main\n"
        "sys.exit(main(['--port', '0']))"
    )
    done = run_code(code)
    assert done.returncode == 1
    assert install_extra("server") in done.stderr
    assert "'uvicorn'" in done.stderr
    assert "Traceback" not in done.stderr


def test_parsing_flags_imports_no_web_framework():
    code = (
        "import sys, kvboost_edge, kvboost_edge.cli.app, kvboost_edge.server.flags, "
        "kvboost_edge.server.__main__\n"
        "print([name for name in ('fastapi', 'starlette', 'uvicorn', 'prometheus_client', 'h11', "
        "'torch', 'numba') if name in sys.modules])"
    )
    done = run_code(code)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_model_may_have_several_names():
    options = parse_flags(["--model-name", "one, two", "--model-name", "three"], "x")
    assert options.settings.model_names == ("one", "two", "three")
    assert parse_flags([], "x").settings.model_names == ("kvboost-edge/demo",)
    with pytest.raises(ConfigError, match="model_name"):
        parse_flags(["--model-name", "one,,two"], "x")


def test_several_models_each_with_its_names(tmp_path):
    odd = tmp_path / "a=b"
    odd.mkdir()
    options = parse_flags(
        ["--model", str(odd), "-m", "coder, gpt-4o=owner/hub-model", "--model", "owner/another"],
        "x",
    )
    assert (options.model, options.settings.model_names) == (str(odd), ("a=b",))
    assert options.others == (
        NamedModel(("coder", "gpt-4o"), "owner/hub-model"),
        NamedModel(("owner/another",), "owner/another"),
    )
    alone = parse_flags(["--model", "mine=owner/hub-model", "--model-name", "yours"], "x")
    assert (alone.model, alone.settings.model_names, alone.others) == (
        "owner/hub-model",
        ("mine", "yours"),
        (),
    )
    assert parse_flags(["--model", f"mine={DEMO_MODEL}"], "x").settings.model_names == ("mine",)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--model", "a", "--model", "b", "--model-name", "c"], "--model NAME=MODEL"),
        (["--model", "a=x", "--model", "b,a=y"], "the name 'a'"),
        (["--model", "x", "--model", "x"], "the name 'x'"),
        (["--model", "=x", "--model", "y"], "model_name"),
        (["--model", "a=x", "--model", "b=./no-such-folder"], "'./no-such-folder' does not exist"),
        (["--keep-alive", "-1"], "keep_alive"),
        (["--max-model-bytes", "0"], "max_model_bytes=0"),
    ],
)
def test_ambiguous_model_names_are_refused(argv, words):
    with pytest.raises(ConfigError, match=words):
        parse_flags(argv, "x")


def test_only_the_first_model_is_kept_loaded_by_default():
    default = parse_flags([], "x").settings
    said = parse_flags(["--keep-alive", "60", "--max-model-bytes", "8e9"], "x")
    assert [default.keep_alive_of(number) for number in (0, 1, 2)] == [math.inf, 300, 300]
    assert [said.settings.keep_alive_of(number) for number in (0, 1)] == [60, 60]
    assert said.settings.max_model_bytes == 8_000_000_000
