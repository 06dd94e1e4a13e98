"""The commands on a GGUF file: it is the whole model."""

import json

import pytest

from helpers.gguf.writer import write_gguf
from kvboost_edge.cli.app import run


@pytest.fixture(scope="module")
def gguf(tiny_model_dir, tmp_path_factory):
    return write_gguf(tiny_model_dir, tmp_path_factory.mktemp("gguf") / "tiny.gguf", kind="Q8_0")


def test_inspect_and_generate(gguf, capsys):
    assert run(["inspect", str(gguf), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["runner"], report["architecture"], report["backend"]) == ("native", "llama", "cpu")
    assert report["kv_bytes_per_token"] == 2 * 3 * 2 * 16 * 2
    assert run(["generate", "Hello", "-m", str(gguf), "-n", "4", "--json", "-o", "num_blocks=16"]) == 0
    assert json.loads(capsys.readouterr().out)["generated_tokens"] > 0
    assert run(["doctor", str(gguf), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[f"Model {gguf}"]["runner"] == "native"


@pytest.mark.parametrize("option", ["runner=torch", "dtype=float16", "device=cuda"])
def test_what_asks_for_torch_is_refused(gguf, option, capsys):
    assert run(["generate", "Hello", "-m", str(gguf), "-o", option]) == 1
    assert "a GGUF file needs the native runner" in capsys.readouterr().err
