"""Tests of every option that a release accepted, each with a value, and of the exit codes.

An entry is never removed, since scripts depend on it.
"""

import functools

import pytest
import typer.main

from kvboost_edge.cli.app import app, run
from kvboost_edge.config import EngineConfig
from kvboost_edge.errors import ConfigError
from kvboost_edge.server.__main__ import main
from kvboost_edge.server.flags import parse_flags

ENGINE = ("--kv-cache-bits 8,4", "--option num_threads=2", "-o dtype=float32")
PACKED = ("--pack-cache", "--no-pack-cache")
MODEL = ("--model x", "-m x")
REQUEST = (
    "--max-new-tokens 4",
    "-n max",
    "--sampling top_p=0.9",
    "-s seed=1",
    "--json-schema FILE",
    "--grammar FILE",
    "--mode chunk_kv_reuse",
    "--recompute-strategy cacheblend",
    "--recompute-overlap 8",
    "--recompute-ratio 0.2",
    "--temperature 0.5",
    "--top-p 0.9",
    "--seed 7",
    "--threads 2",
    "--ctx-size 512",
    "--max-model-len 512",
    "--max-memory 4GB",
    "--draft-model x",
    "--arithmetic exact",
    "--prefill exact",
)
CLIENT = ("--url http://x", "--api-key key")
COMMANDS = {  # name: (required arguments, options with a value)
    "generate": (
        "Hello",
        (*MODEL, *REQUEST, "--chat", "--raw", "--system Text", *ENGINE, *PACKED, "--json"),
    ),
    "chat": ("", (*MODEL, "--system Text", "--session x", *CLIENT, *REQUEST, *ENGINE, *PACKED)),
    "demo": ("", (*ENGINE, *PACKED, "--stats")),
    "doctor": (
        "",
        (
            *("x", *MODEL, *ENGINE, "--ctx-size 512", "--max-memory 4GB"),
            *("--draft-model x", "--json"),
        ),
    ),
    "models": ("", ("word", "--suggest", "--option num_threads=2", "-o dtype=float32", "--json")),
    "pull": ("qwen3:0.6b", ("--registry https://x.example", "--max-bytes 10GB", "--json")),
    "rm": ("qwen3:0.6b", ("other",)),
    "inspect": ("", ("x", *MODEL, *ENGINE, "--json")),
    "eval": (
        "FILE",
        (
            *(*MODEL, "--against weights=int4", "--window 64", "--arithmetic exact"),
            *("--prefill exact", "--retrieval 5"),
            *(*ENGINE, *PACKED, "--json"),
        ),
    ),
    "reuse-check": ("", ("x", *MODEL, *ENGINE, *PACKED, "--json")),
    "bench": (
        "",
        (
            *MODEL,
            "--n-prompt 32",
            "-p 16,32",
            "--n-gen 8",
            "-n 0",
            "--n-depth 64",
            "-d 0,64",
            "--warm 16",
            "--restart",
            "--no-restart",
            "--shared 4",
            "--repetitions 1",
            "-r 3",
            "--warmup",
            "--no-warmup",
            "--output csv",
            "-o json",
            "--kv-cache-bits 8,4",
            "--threads 2",
            "-t 1",
            "--ctx-size 512",
            "--max-model-len 512",
            "--max-memory 4GB",
            "--draft-model x",
            "--speculation off,lookup",
            "--option num_threads=2",
            *PACKED,
        ),
    ),
    "warmup": ("", (*MODEL, "--mode baseline", *ENGINE)),
    "launch": ("claude", (*CLIENT, *MODEL, "--exec", "-- -p Hello", "--unknown")),
    "cache": (
        "prune",
        (
            "word",
            "--disk-cache-dir DIR",
            "--max-disk-bytes 4GB",
            "--older-than 2.5",
            "--yes",
            "-y",
            "--dry-run",
            "--json",
        ),
    ),
    "kernels": (
        "build",
        ("--target x86-64-avx2", "--target all", "--out DIR", "--jobs 2", "--json"),
    ),
    "why": ("", ("req-1", *CLIENT, "--list", "--json")),
    "ps": ("", (*CLIENT, "--json")),
    "warm": ("--from-request FILE", (*CLIENT, "--pin", "--ttl 60", "--json")),
}
SERVE = """
--model x
-m x
--warm Text
--warm-document Text
--workers 2
--ray-address auto
--api-key key
--api-key-file {keys}
--admin-api-key key
--admin-api-key-file {keys}
--insecure
--allowed-host x.example
--cors-origin https://x.example
--model-name x
--host localhost
--port 0
--max-batch-size 3
--batch-window-ms 0.5
--max-queue-size 0
--max-queue-tokens 77
--request-timeout 1.5
--drain-seconds 0
--max-body-bytes 4096
--max-connections 5
--header-seconds 2
--body-seconds 3
--write-seconds 4
--keep-alive-seconds 5
--request-history 0
--otel-endpoint http://127.0.0.1:4318
--keep-alive 60
--no-model-changes
--model-registry https://models.example.org
--max-pull-bytes 10GB
--max-model-bytes 8e9
--max-model-bytes 8GiB
--normalise tools,billing
--normalise off
--normalize tools,billing
--normalize off
--context-overflow drop_oldest
--mode chunk_kv_reuse
--log-level error
--log-format text
--device cpu
--dtype float32
--backend default
--backend cpu-paged
--runner native
--weights int4-asym
--rope-range long
--max-model-len 4096
--ctx-size 4096
--max-cache-bytes 4e9
--max-cache-bytes 500M
--max-memory 1GB
--max-state-bytes 4000000
--block-size 32
--num-blocks 9
--kv-cache-bits 8
--kv-cache-bits 8,4
--max-batch-tokens 64
--max-pinned-blocks 0
--num-threads 1
--threads 1
--recompute-strategy cacheblend
--recompute-overlap 8
--recompute-ratio 0.25
--chunk-size 64
--chunk-boundary-window 8
--overlap-k 16
--sink-tokens 16
--primer-tokens 32
--reuse-gate off
--speculation on
--max-draft-tokens 7
--draft-model x
--model-draft x
--draft-weights int8
--draft-vocabulary 0
--revision main
--disk-cache-dir off
--redis-url redis://x
--max-disk-bytes 8e9
--no-pack-cache
--redis-trust
""".strip().splitlines()
# Flags that require another flag, which is named here.
NEEDED = {
    "--redis-trust": ["--redis-url", "redis://x"],
    "--draft-weights": ["--draft-model", "x"],
}
WRONG = (
    "generate x --no-such",
    "generate",
    "generate x extra",
    "generate x -n many",
    "generate x -n",
    "generate x --mode fast",
    "generate x --recompute-overlap 1.5",
    "generate x --recompute-ratio much",
    "generate x -o num_threads",
    "generate x -o no_such=1",
    "generate x -s top_p=2",
    "generate x -s top_p",
    "generate x --kv-cache-bits 5",
    "chat --api-key x",
    "chat --url http://x -o dtype=float32",
    "inspect",
    "inspect x --model y",
    "launch",
    "launch netscape",
    "cache",
    "cache burn",
    "cache prune --max-disk-bytes much",
    "cache prune --older-than long",
    "warm",
    "warm --from-request no-such-file",
    "no-such",
    "",
)
SERVE_WRONG = (
    "--no-such",
    "extra",
    "--mod x",
    "--port many",
    "--port 9.5",
    "--port",
    "--port 70000",
    "--max-batch-size 0",
    "--request-timeout long",
    "--request-timeout nan",
    "--keep-alive -1",
    "--max-model-bytes 0",
    "--max-model-bytes large",
    "--normalise everything",
    "--context-overflow shout",
    "--log-level loud",
    "--log-format xml",
    "--workers 0",
    "--workers few",
    "--host 0.0.0.0",
    "--allowed-host http://x",
    "--otel-endpoint 127.0.0.1:4318",
    "--cors-origin *",
    "--api-key-file no-such-file",
    "--warm @no-such-file",
    "--no-pack-cache=1",
)
ENGINE_WRONG = {  # 1: refused by the engine's configuration, 2: refused by the parser
    "--backend nonsense": 1,
    "--dtype float8": 1,
    "--block-size 8": 1,
    "--block-size few": 2,
    "--kv-cache-bits 5": 1,
    "--kv-cache-bits eight": 2,
    "--max-cache-bytes 0": 1,
    "--max-cache-bytes much": 2,
    "--recompute-strategy left": 1,
    "--recompute-ratio 2": 1,
    "--num-threads 0": 1,
    "--max-draft-tokens 64": 1,
}
EACH = [(name, option) for name, (_, options) in COMMANDS.items() for option in options]


@pytest.fixture(autouse=True)
def no_settings_in_the_environment(monkeypatch):
    for name in ("KVBOOST_API_KEY", "KVBOOST_API_KEYS", "KVBOOST_EDGE_REDIS_URL"):
        monkeypatch.delenv(name, raising=False)


def code_of(command, argv):
    try:
        return command(argv)
    except SystemExit as stop:
        return stop.code


@pytest.mark.parametrize(("name", "option"), EACH, ids=lambda text: text.replace(" ", "="))
def test_commands_accept_every_option(name, option):
    required, _ = COMMANDS[name]
    given = read(name, required, option)
    defaults = ("--pack-cache", "--restart", "--warmup", "-n max")
    assert given != read(name, required) or option in defaults, (
        "the option has no effect, although its value is not the default"
    )
    if option.startswith("--") and len(option.split()) == 2 and option[2] != " ":
        assert read(name, required, option.replace(" ", "=")) == given


@functools.cache
def commands():
    """Return the commands by name; building their parsers takes longer than parsing."""
    return typer.main.get_command(app).commands


def read(name, *words):
    """Return the parameters and remaining arguments that the command's function would receive."""
    command = commands()[name]
    context = command.make_context(name, " ".join(words).split())
    return context.params, context.args


@functools.cache
def default_options():
    return parse_flags([], "kvboost-server")


def served(argv):
    options = parse_flags(argv, "kvboost-server")
    EngineConfig.from_options(**options.engine)
    return options


@pytest.mark.parametrize("line", SERVE)
def test_the_server_accepts_every_flag(line, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("key\n")
    argv = line.format(keys=keys).split()
    needed = NEEDED.get(argv[0], [])
    options = served([*argv, *needed])
    assert options != default_options()
    if len(argv) == 2 and line.startswith("--"):
        assert parse_flags([f"{argv[0]}={argv[1]}", *needed], "kvboost-server") == options


@pytest.mark.parametrize("name", ["", *COMMANDS, "serve"])
def test_help_exits_with_0(name, capsys):
    for flag in ("--help", "-h"):
        assert run([*name.split(), flag]) == 0
    if not name:
        assert code_of(main, ["--help"]) == code_of(main, ["-h"]) == 0
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("line", WRONG)
def test_wrong_usage_exits_with_2(line, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(line.split()) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("line", SERVE_WRONG)
def test_wrong_usage_of_the_server_exits_with_2(line, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert code_of(main, line.split()) == 2
    assert run(["serve", *line.split()]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(("line", "code"), ENGINE_WRONG.items(), ids=lambda one: str(one))
def test_exit_codes_of_the_servers_engine_flags(line, code):
    """The values are checked without a model. The server itself loads the model before it rejects
    them.
    """
    if code == 2:
        assert code_of(main, line.split()) == 2
    else:
        with pytest.raises(ConfigError):
            served(line.split())
