"""End-to-end tests of the command line on a tiny random model."""

import errno
import io
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from helpers.json_files import change_json
from helpers.models.tiny_models import save_tiny_model
from kvboost_edge import CPUPagedEngine
from kvboost_edge.cli import chat
from kvboost_edge.cli.app import app
from kvboost_edge.cli.chat import _Conversation
from kvboost_edge.cli.console import piped_text
from kvboost_edge.cli.warmup import _forms
from kvboost_edge.errors import RequestError
from kvboost_edge.models.fingerprint import fingerprint_of_directory
from kvboost_edge.server.serve_options import command_options

ROOT = Path(__file__).parents[2]
COMMANDS = (
    "generate",
    "chat",
    "demo",
    "doctor",
    "models",
    "pull",
    "rm",
    "inspect",
    "eval",
    "bench",
    "warmup",
    "kernels",
    "launch",
    "reuse-check",
)
SMALL = ("-o", "num_blocks=64", "-o", "dtype=float32")


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_texts_have_one_style(command, printed):
    out = printed(*command.split(), "--help").out
    assert "<bool>" not in out
    assert "[[" not in out
    assert "[default:" not in out
    if command:
        assert "Examples" in out
        assert f"kvboost-edge {command}" in out


def test_help_names_each_default():
    """Defaults that are plain values are appended to the help text. The text itself names all
    others.
    """
    without = [
        (name, parameter.name)
        for name, command in typer.main.get_command(app).commands.items()
        for parameter in command.params
        if parameter.default in (None, "")
        and not (parameter.required or parameter.multiple or parameter.is_eager)
        and "Default: " not in parameter.help
    ]
    # --model is an alias of the argument MODEL, which has the default; inspect requires a model.
    assert without == [
        ("doctor", "model"),
        ("inspect", "name"),
        ("inspect", "model"),
        ("reuse-check", "model"),
    ]
    assert not [
        name
        for name, option in command_options().items()
        if option.kind is not bool and not option.many and not option.shown_default
    ]


def test_no_arguments_show_the_commands(printed):
    shown = "".join(printed(code=2))
    assert all(command in shown for command in COMMANDS)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_failure_to_write_is_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvboost_edge", "models", "--suggest"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == (
        "kvboost-edge: error: the output cannot be written: No space left on device; free space, "
        "or use another file\n"
    )


FULL = "No space left on device"
QUOTA = "Disk quota exceeded"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(errno.ENAMETOOLONG, "File name too long", "a"), "a: File name too long"),
        (OSError(errno.ECONNRESET, "Connection reset by peer"), "Connection reset by peer"),
        (OSError("no details"), "no details"),
        (OSError(errno.ENOSPC, FULL, "a"), f"a: {FULL}; free space, or use another file"),
        (OSError(errno.EDQUOT, QUOTA, "a"), f"a: {QUOTA}; free space, or use another file"),
    ],
)
def test_only_errors_of_a_full_disk_advise_to_free_space(error, line, printed, monkeypatch):
    def fail(**_):
        raise error

    monkeypatch.setattr("kvboost_edge.cli.app.app", fail)
    assert printed(code=1).err == f"kvboost-edge: error: {line}\n"


@pytest.mark.skipif(sys.platform == "win32", reason="other limits of file names")
def test_a_model_name_that_is_too_long_for_a_file_is_one_line(refused):
    name = "x" * 300
    assert refused("inspect", name, code=1) == f"kvboost-edge: error: {name}: File name too long"


def test_generate_streams_text_and_a_summary(tiny_model_dir, printed):
    err = printed("generate", "Hello", "-m", tiny_model_dir, "-n", "8", *SMALL).err
    assert "8 tokens" in err or "stop" in err
    assert "prompt tokens" in err


def test_generate_fills_the_context_by_default(printed):
    flags = ("--raw", "--ctx-size", "112", "--temperature", "0")
    err = printed("generate", "The colour of Teamar boat is blue", *flags).err
    prompt_tokens, generated = (
        int(number) for number in re.findall(r"(\d+) (?:prompt )?tokens", err.replace("\n", " "))
    )
    assert prompt_tokens + generated == 112
    assert generated > 64
    assert "length: token limit (-n) or context length" in " ".join(err.split())


def test_generate_fills_a_pool_smaller_than_the_context_by_default(printed):
    flags = ("--raw", "-o", "num_blocks=6", "--temperature", "0", "--json")
    answer = json.loads(printed("generate", "The colour of Teamar boat is blue", *flags).out)
    assert answer["finish_reason"] == "length"
    # The KV of the last token is never stored.
    assert answer["prompt_tokens"] + answer["generated_tokens"] == 6 * 16 + 1


SAID = [{"role": "user", "content": "Hello"}]
BRIEF = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("flags", "prompt", "sampling"),
    [
        (["--raw", "-s", "temperature=0.8", "-s", "seed=3"], "Hello", {"temperature": 0.8}),
        (
            ["--raw", "--temperature", "0.8", "--top-p", "0.5", "--seed", "3"],
            "Hello",
            {"top_p": 0.5, "temperature": 0.8},
        ),
        (["--seed", "3"], SAID, {}),
        (["--chat", "--seed", "3"], SAID, {}),
        (["--system", "Be brief.", "--seed", "3"], [BRIEF, *SAID], {}),
    ],
)
def test_generate_json_equals_the_engine(flags, prompt, sampling, tiny_model_dir, answered):
    shown = answered("generate", "Hello", "-m", tiny_model_dir, "-n", "8", *flags, *SMALL)
    with CPUPagedEngine.from_pretrained(tiny_model_dir, num_blocks=64, dtype="float32") as engine:
        result = engine.generate(prompt, max_new_tokens=8, seed=3, **sampling)
    assert shown["output_token_ids"] == list(result.output_token_ids)
    assert shown["output_text"] == result.output_text
    assert shown["finish_reason"] == result.finish_reason


def test_generate_json_names_the_tokens_of_log_probabilities(tiny_model_dir, answered):
    asked = {"logprobs": 2, "prompt_logprobs": 1, "temperature": 0}
    flags = [part for name, value in asked.items() for part in ("-s", f"{name}={value}")]
    shown = answered("generate", "Hello", "-m", tiny_model_dir, "-n", "8", "--raw", *flags, *SMALL)
    with CPUPagedEngine.from_pretrained(tiny_model_dir, num_blocks=64, dtype="float32") as engine:
        result = engine.generate("Hello", max_new_tokens=8, **asked)

        def named(token_id, logprob):
            text = engine.tokenizer.decode([token_id], skip_special_tokens=False)
            return {"token": text, "token_id": token_id, "logprob": logprob}

        for name in ("logprobs", "prompt_logprobs"):
            assert shown[name] == [
                one
                and {
                    **named(one.token_id, one.logprob),
                    "top": [named(*pair) for pair in one.top],
                }
                for one in getattr(result, name)
            ]
    assert "".join(one["token"] for one in shown["logprobs"]) == shown["output_text"]
    assert shown["prompt_logprobs"][0] is None


def test_sampling_options_override_a_greedy_default(answered):
    settings = {"do_sample": True, "min_p": 0.0, "top_p": 1.0, "seed": 7}
    flags = [part for name, value in settings.items() for part in ("-s", f"{name}={value}")]
    shown = answered("generate", "Hello", "-n", "16", *flags)
    with CPUPagedEngine.from_pretrained("kvboost-edge/demo", num_blocks=64) as engine:
        assert engine.sampling_defaults.temperature == 0
        sampled, greedy = (
            engine.generate(SAID, 16, **options).output_token_ids for options in (settings, {})
        )
    assert shown["output_token_ids"] == list(sampled) != list(greedy)


def test_generate_reads_the_prompt_from_standard_input(tiny_model_dir, answered, typed):
    typed("Hello")
    shown = answered("generate", "-", "-m", tiny_model_dir, "-n", "2", "--raw", *SMALL)
    assert shown["prompt"] == "Hello"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("Grüße 👋\r\nund\rmehr\n".encode(), "Grüße 👋\nund\nmehr\n"),
        (b"a\xff\xfe", "standard input is not UTF-8 (byte 0xff at offset 1); convert it to UTF-8"),
        ("é".encode()[:1], "standard input is not UTF-8 (byte 0xc3 at offset 0)"),
    ],
)
def test_standard_input_is_read_as_utf8(data, expected, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "latin-1"))
    if expected.startswith("standard input"):
        with pytest.raises(RequestError, match=re.escape(expected)):
            piped_text()
    else:
        assert piped_text() == expected


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        (["--temperature", "1", "-s", "temperature=1"], "given twice"),
        (["--raw", "--system", "Be brief."], "--system"),
        (["--threads", "2", "-o", "num_threads=2"], "given twice"),
        (["-o", "no_such=1"], "no_such"),
        (["-o", "kv_cache_bits=5"], "kv_cache_bits"),
        (["-o", "kv_cache_bits=8,4,4"], "kv_cache_bits"),
        (["--kv-cache-bits", "8", "-o", "kv_cache_bits=4"], "given twice"),
        (["--kv-cache-bits", "8,4", "-o", "runner=torch"], "kv_cache_bits"),
    ],
)
def test_invalid_options_are_one_clean_line(extra, named, tiny_model_dir, refused):
    assert named in refused("generate", "Hello", "-m", tiny_model_dir, *extra)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        (["-n", "60", "--ctx-size", "64"], "context of 64"),
        (["-m", "/no/such/directory"], "/no/such/directory"),
    ],
)
def test_errors_are_one_clean_line(extra, named, tiny_model_dir, refused):
    assert named in refused("generate", "Hello", "-m", tiny_model_dir, *extra, code=1)


def test_chat_reuses_earlier_turns(tiny_model_dir, printed, typed):
    typed(
        "Hello there, how are you today?\n\n/help\nAnd now something "
        "else.\n/stats\n/reset\nHi\n/quit\n"
    )
    out = printed("chat", "-m", tiny_model_dir, "-n", "8", *SMALL).out
    cached = [int(count) for count in re.findall(r"(\d+) from the cache", out)]
    assert len(cached) == 3
    assert cached[0] == 0
    assert cached[1] >= 32  # the first turn: more than two blocks
    assert "num_blocks" in out
    assert "new conversation" in out


@pytest.mark.parametrize("leave", ["/quit", "/exit", "/bye"])
def test_chat_names_an_unknown_command_and_ends(leave, tiny_model_dir, printed, typed):
    typed(f"/help\n/nonsense now\n{leave}\nHi\n")
    out, err = printed("chat", "-m", tiny_model_dir, "-n", "4", *SMALL)
    assert [line for line in err.splitlines() if "command" in line] == ["unknown command /nonsense"]
    assert out.count("/reset starts a new") == 3
    assert "from the cache" not in out


def test_chat_survives_a_refused_turn(tiny_model_dir, printed, typed):
    typed("x" * 600 + "\nHi\n")
    out, err = printed("chat", "-m", tiny_model_dir, "-n", "4", *SMALL, code=1)
    assert "refused" in err
    assert out.count("from the cache") == 1


def test_a_chat_that_outgrows_the_pool_continues(tiny_model_dir, tmp_path, printed, typed):
    """The pool fits two turns. The third one is rejected, saved, and sent again without the first."""
    file = tmp_path / "chat.json"
    long = "x" * 20
    typed(f"/drop\n{long}1\n{long}2\n{long}3\n/save {file}\n/drop 9\n/drop\n{long}4\n/drop\n")
    options = ("-n", "4", "--temperature", "0", "--system", "Hi", "-o", "num_blocks=6")
    options += ("-o", "dtype=float32")
    out, err = printed("chat", "-m", tiny_model_dir, *options, code=1)
    assert re.findall(r"(\d+) prompt tokens", out) == ["38", "67", "67", "67"]
    said = re.findall(r"^(?:/drop|this turn was refused: the request needs 7 blocks).*", err, re.M)
    assert [text.partition(";")[0].partition(" (")[0] for text in said] == [
        "/drop 1: the conversation has 0 turns",
        "this turn was refused: the request needs 7 blocks",
        "/drop 9: the conversation has 2 turns",
        "this turn was refused: the request needs 7 blocks",
    ]
    assert (
        " ".join(out.split()).count("the conversation is unchanged: /drop removes its oldest") == 2
    )
    kept = json.loads(file.read_text(encoding="utf-8"))
    assert [one["role"] for one in kept] == ["system", *["user", "assistant"] * 2, "user"]
    assert [one["content"][-1] for one in kept if one["role"] == "user"] == ["1", "2", "3"]


def test_chat_keeps_the_part_of_an_interrupted_answer(
    tiny_model_dir, tmp_path, printed, typed, monkeypatch
):
    pieces = []
    write = _Conversation._write

    def interrupted(conversation, piece):
        write(conversation, piece)
        pieces.append(piece)
        if len(pieces) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(_Conversation, "_write", interrupted)
    file = tmp_path / "chat.json"
    typed(f"Hi\nGo on\n/save {file}\n")
    out = printed("chat", "-m", tiny_model_dir, "-n", "8", "--temperature", "0", *SMALL).out
    first, second = "".join(pieces[:3]), "".join(pieces[3:])
    assert f"{first}\nstopped; the part received was kept\n" in out
    assert json.loads(file.read_text(encoding="utf-8")) == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "Go on"},
        {"role": "assistant", "content": second},
    ]
    assert out.count("from the cache") == 1


def test_chat_removes_a_turn_that_is_interrupted_before_its_answer(
    tiny_model_dir, printed, typed, monkeypatch
):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "answer", interrupted)
    typed("Hi\n/drop\n")
    out, err = printed("chat", "-m", tiny_model_dir, *SMALL)
    assert "stopped; this turn was removed" in out
    assert "/drop 1: the conversation has 0 turns" in err


def test_inspect_shows_the_contents_of_the_files(tiny_model_dir, answered):
    report = answered("inspect", tiny_model_dir)
    assert report["architecture"] == "llama"
    assert report["supported"] is True
    assert (report["runs_on"], report["read_from"]) == ("native, torch", "safetensors, GGUF, ONNX")
    assert report["compared_with"] == "transformers; llama.cpp (GGUF)"
    assert (
        report["kv_bytes_per_token"] == 2 * 3 * 2 * 16 * 2
    )  # K and V, 3 layers, 2 kv heads of 16, float16
    assert report["kv_bytes_per_block"] == 16 * report["kv_bytes_per_token"]
    assert (report["runner"], report["weights"]) == ("native", "int8")
    assert (report["backend"], report["device"]) == ("cpu", "cpu")
    assert len(report["fingerprint"]) == 64
    with CPUPagedEngine.from_pretrained(tiny_model_dir, num_blocks=64) as engine:
        assert report["sampling_defaults"] == engine.sampling_defaults.as_dict()
    told = answered("inspect", tiny_model_dir, "-o", "default_temperature=0.2")
    assert told["sampling_defaults"]["temperature"] == 0.2
    files = (tiny_model_dir / "model.safetensors").stat().st_size
    assert 0 < report["weight_bytes"] < files


def test_inspect_prints_a_table(tiny_model_dir, printed):
    out = printed("inspect", tiny_model_dir, "-o", "backend=reference").out
    assert "fingerprint" in out
    assert "reference" in out


@pytest.mark.parametrize("runner", ["native", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "half checkpoint"])
def test_inspect_agrees_with_the_engine(runner, dtype, tiny_model_dir, tmp_path, answered):
    """Both agree on the block size and the runner, also for half-precision checkpoints, which are
    computed in float32 on the CPU.
    """
    options = {"runner": runner, "dtype": dtype}
    directory = tiny_model_dir
    if dtype == "half checkpoint":
        options = {"runner": runner}
        directory = shutil.copytree(tiny_model_dir, tmp_path / "half")
        change_json(directory / "config.json", dtype="float16")
    report = answered(
        "inspect",
        directory,
        *(word for name, value in options.items() for word in ("-o", f"{name}={value}")),
    )
    with CPUPagedEngine.from_pretrained(directory, num_blocks=8, **options) as engine:
        assert report["kv_bytes_per_block"] == engine.paged_stats()["bytes_per_block"]
        assert report["runner"] == engine.paged_stats()["runner"] == runner


def test_a_damaged_weight_file_is_named(tiny_model_dir, tmp_path, printed):
    directory = shutil.copytree(tiny_model_dir, tmp_path / "cut")
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    assert "model.safetensors" in printed("inspect", directory, code=1).err


def test_doctor_describes_the_machine_and_the_kernels(tiny_model_dir, answered):
    report = answered("doctor", tiny_model_dir)
    assert report["Processor"]["threading_layer"].startswith("kernel-team")
    assert report["Processor"]["kernel_path"] in (
        "amx+vnni512",
        "vnni512",
        "vnni256",
        "avx2",
        "neon",
        "plain",
    )
    assert report["Processor"]["attention_path"].endswith(" on quantized blocks, float on others")
    assert report["Processor"]["kernel_library"] == "none: KVBOOST_EDGE_KERNELS=none"
    assert report["Processor"]["amx"].startswith(("used: ", "not used: "))
    assert report["Memory"]["available_bytes"] > 0
    assert float(report["Memory"]["read_bandwidth"].split(" GB/s")[0]) > 0.1
    assert report["Versions"]["numba"]
    assert report["Accelerator"]["reason"]
    if report["Accelerator"]["device"] == "cpu":
        assert report["Accelerator"]["flash_attention"] == "vanilla"
    model = report[f"Model {tiny_model_dir}"]
    assert model["runner"] == "native"
    assert model["backend_reason"]
    assert model["fits"] is True
    assert (
        model["needed_bytes"]
        == model["weight_bytes"] + model["pool_bytes"]
        <= model["available_bytes"]
    )
    assert model["packed_bytes_int4"] < model["packed_bytes_int8"] < model["packed_bytes_f32"]
    assert model["file_bytes"] > 0
    assert model["pool_tokens"] >= model["context"]
    assert model["packed_file"].endswith("already packed") or model["packing_peak_bytes"] < 1e9


@pytest.mark.parametrize("command", ["doctor", "inspect"])
def test_every_row_of_a_report_has_a_value(command, tiny_model_dir, printed):
    lines = printed(command, tiny_model_dir).out.splitlines()
    rows = [line.split("│")[1:3] for line in lines if line.startswith("│")]
    assert rows
    assert [name for name, value in rows if name.strip() and not value.strip()] == []


def test_doctor_refuses_what_the_engine_would(
    tiny_model_dir, tmp_path, monkeypatch, answered, printed
):
    """Doctor does not pack the model. It gives the engine's error message, and both commands exit
    with 1.
    """
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path))
    argv = [tiny_model_dir, "-o", "weights=int4", "-o", "num_blocks=1000000000"]
    found = answered("doctor", *argv, code=1)[f"Model {tiny_model_dir}"]
    assert found["fits"] is False
    assert "(1000000000 blocks of " in found["fit_reason"]
    assert "weights='int4'" not in found["memory_options"], (
        "the weights already have the suggested format"
    )
    assert "max_cache_bytes or num_blocks" in found["memory_options"]
    assert found["packed_file"].startswith(f"will be written to {tmp_path / 'packed'}: ")
    assert not (tmp_path / "packed").exists()
    message = " ".join(printed("generate", "Hello", "-m", *argv, code=1).err.split())
    assert found["fit_reason"].partition(" exceed memory")[0] in message


def test_doctor_counts_states_and_refuses_too_few(tmp_path, monkeypatch, answered):
    """The recurrent states of a hybrid model count in the needed memory. Doctor does not pack the
    model.
    """
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path / "cache"))
    path = save_tiny_model("lfm2", tmp_path / "model")
    argv = ["doctor", path, "-o", "weights=int8", "-o", "num_blocks=64", "-o", "max_num_seqs=3"]
    found = answered(*argv)[f"Model {path}"]
    sizes = [found[name] for name in ("weight_bytes", "pool_bytes", "state_bytes")]
    assert min(sizes) > 0
    assert (found["fits"], found["needed_bytes"]) == (True, sum(sizes))
    found = answered(*argv, "-o", "max_state_bytes=50", code=1)[f"Model {path}"]
    assert found["fits"] is False
    assert found["fit_reason"].startswith("max_state_bytes=50 holds 0 states of ")
    assert "3 sequences need 4 states" in found["fit_reason"]
    assert not (tmp_path / "cache" / "packed").exists()


def test_doctor_reports_a_pool_too_large_for_the_torch_runner(tiny_model_dir, answered):
    """The torch runner does not reject the pool early, but the memory check uses the same
    arithmetic.
    """
    argv = ["doctor", tiny_model_dir, "-o", "runner=torch", "-o", "num_blocks=1000000000"]
    found = answered(*argv, code=1)[f"Model {tiny_model_dir}"]
    assert found["runner"] == "torch"
    assert found["fits"] is False
    assert found["fit_reason"].endswith(" GB missing")
    assert found["needed_bytes"] > found["available_bytes"]


def test_doctor_suggests_unused_options_that_save_memory(tiny_model_dir, tmp_path, answered):
    def memory_options(model, *options):
        given = (word for option in options for word in ("-o", option))
        return answered("doctor", model, *given)[f"Model {model}"]["memory_options"]

    assert "kv_cache_bits=8 or 4:" in memory_options(tiny_model_dir)
    assert "kv_cache_bits=4:" in memory_options(tiny_model_dir, "kv_cache_bits=8")
    assert "kv_cache_bits" not in memory_options(tiny_model_dir, "kv_cache_bits=4")
    assert "max_state_bytes" not in memory_options(tiny_model_dir)
    recurrent = save_tiny_model("lfm2", tmp_path)
    assert "max_state_bytes or max_num_seqs: the states, " in memory_options(recurrent)
    assert "max_draft_tokens" not in memory_options(recurrent), (
        "drafts that were not requested need no memory"
    )
    assert "max_draft_tokens" not in memory_options(
        recurrent, "speculation=off", "max_draft_tokens=4"
    )
    assert "max_draft_tokens: draft tokens, " in memory_options(recurrent, "speculation=on")
    assert "max_draft_tokens: draft tokens, " in memory_options(recurrent, "max_draft_tokens=4")


def test_doctor_shows_the_path_of_the_packed_weights(
    tiny_model_dir, tmp_path, monkeypatch, answered, printed
):
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path))
    int4 = ("-o", "weights=int4")

    def packed_file(*options):
        return answered("doctor", tiny_model_dir, *int4, *options)[f"Model {tiny_model_dir}"][
            "packed_file"
        ]

    printed("generate", "Hello", "-m", tiny_model_dir, "-n", "1", *int4, "-o", "num_blocks=8")
    (file,) = (tmp_path / "packed").glob("*.kvpack")
    assert packed_file() == f"{file}: already packed"
    assert packed_file("-o", "pack_cache=false").startswith("none (pack_cache=False)")
    file.unlink()
    monkeypatch.setattr("kvboost_edge.engine.memory.check.free_bytes", lambda directory: 1000)
    assert "no room: " in packed_file()
    assert "packed in memory at every start. Make room, or set KVBOOST_EDGE_CACHE" in packed_file()


@pytest.mark.parametrize("weights", ["int8", "int4-asym"])
def test_warmup_shows_the_kernel_directory_and_the_weight_format(
    weights, tiny_model_dir, answered, printed
):
    given = ("-o", f"weights={weights}")
    assert answered("inspect", tiny_model_dir, *given)["weights"] == weights
    out = " ".join(
        printed("warmup", "-m", tiny_model_dir, *given, "--kv-cache-bits", "16").out.split()
    )
    assert f"1 configuration compiled, {tiny_model_dir} ready" in out
    assert f"({weights} weights)" in out
    assert "compiled kernels are in" in out


def test_doctor_reports_a_missing_model(printed):
    out = printed("doctor", "/no/such/directory", code=1).out
    assert "problem" in out
    assert "kernel path" in out


def test_kv_cache_bits_changes_the_pool_size(tiny_model_dir, answered):
    sizes = []
    for bits in ("16", "8", "8,4", "4"):
        given = ("--kv-cache-bits", bits)
        sizes.append(answered("inspect", tiny_model_dir, *given)["kv_bytes_per_block"])
        argv = [
            "generate",
            "Hello",
            "-m",
            tiny_model_dir,
            "-n",
            "20",
            *given,
            "-o",
            "num_blocks=32",
        ]
        assert answered(*argv)["generated_tokens"] > 0
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 4


def test_warmup_packs_a_model_in_one_format(tiny_model_dir, tmp_path, monkeypatch, printed):
    """The other formats are compiled with the bundled model, so a large model is not packed five
    times.
    """
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path))
    monkeypatch.setattr("kvboost_edge.cli.warmup._forms", lambda options: [{"weights": "int4"}])
    printed("warmup", "-m", tiny_model_dir)
    names = [path.name.split("-") for path in (tmp_path / "packed").iterdir()]
    own = fingerprint_of_directory(tiny_model_dir)[:40]
    assert [form for digest, form in names if digest == own] == ["int8.kvpack"]
    assert [form for digest, form in names if digest != own] == ["int4.kvpack"]
    assert "nowhere" in printed("warmup", "-m", tiny_model_dir / "nowhere", code=1).err


def test_warmup_compiles_every_variant():
    weights = [{"weights": name} for name in ("int8", "int4", "int4-asym", "bf16", "f32")]
    widths = [{"kv_cache_bits": bits} for bits in ((8, 8), (8, 4), (4, 8), (4, 4))]
    assert _forms({}) == weights + widths
    assert _forms({"kv_cache_bits": 8}) == weights
    assert _forms({"weights": "int4"}) == [{}, *widths]
    assert _forms({"runner": "torch"}) == []


def test_demo_shows_the_shared_prefix(printed):
    out = printed("demo").out
    assert "cold" in out
    assert "the same tokens" in out
    assert "DIFFERENT TOKENS" not in out
    assert "█" in out
    assert "shared_blocks" not in out
    assert "shared_blocks" in printed("demo", "--stats").out


def test_interrupt_ends_generation_with_130(tiny_model_dir):
    argv = [
        sys.executable,
        "-m",
        "kvboost_edge",
        "generate",
        "Hello",
        "-m",
        str(tiny_model_dir),
        "-n",
        "480",
    ]
    argv += ["-s", "ignore_eos=true", "-s", "temperature=1.0", *SMALL]
    with subprocess.Popen(
        argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.read(1)  # the answer has begun
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err.decode()
    assert b"Traceback" not in err


def test_generate_reports_tokens_restored_from_disk(tiny_model_dir, tmp_path, printed):
    argv = [
        "generate",
        "Hello there, how are you today? " * 4,
        "-m",
        tiny_model_dir,
        "-n",
        "2",
        *SMALL,
    ]
    lines = [
        " ".join(printed(*argv, "-o", f"disk_cache_dir={tmp_path}").err.split()) for _ in range(2)
    ]
    assert "tier disk: 0 blocks, 0 MB" in lines[0]
    assert " 0 from the cache ·" in lines[0]
    cached = lines[1].split(" from the cache (")[0].split()[-1]
    assert int(cached) >= 32
    assert f"{cached} from the cache ({cached} from disk) ·" in lines[1]


def test_the_draft_tokens_of_an_answer_are_shown(tiny_model_dir, printed, answered):
    argv = ["generate", "Hello", "-m", tiny_model_dir, "-n", "12", "--temperature", "0", *SMALL]
    argv += ["-s", "ignore_eos=true", "-s", "speculation=on"]
    assert "draft" not in printed(*argv[:-1], "speculation=off").err.splitlines()[-1]
    argv += ["--draft-model", tiny_model_dir]
    result = answered(*argv)
    counts = result["drafts"]["draft_model"]
    assert set(counts) == {"num_drafts", "drafted_tokens", "accepted_by_position"}
    assert sum(counts["accepted_by_position"]) > 0
    line = " ".join(printed(*argv).err.split())
    # The number of draft tokens depends on measured times.
    (shown,) = re.findall(r" per second · (\d+) of (\d+) draft tokens accepted · ", line)
    assert 0 < int(shown[0]) <= int(shown[1])
