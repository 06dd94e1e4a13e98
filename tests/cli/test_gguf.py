"""Tests of the commands on a GGUF file, which contains the whole model."""

import pytest

from helpers.gguf.writer import write_gguf


@pytest.fixture(scope="module")
def gguf(tiny_model_dir, tmp_path_factory):
    return write_gguf(tiny_model_dir, tmp_path_factory.mktemp("gguf") / "tiny.gguf", kind="Q8_0")


def test_inspect_and_generate(gguf, answered):
    report = answered("inspect", gguf)
    assert (report["runner"], report["architecture"], report["backend"]) == (
        "native",
        "llama",
        "cpu",
    )
    assert report["kv_bytes_per_token"] == 2 * 3 * 2 * 16 * 2
    assert (
        answered("generate", "Hello", "-m", gguf, "-n", "4", "-o", "num_blocks=16")[
            "generated_tokens"
        ]
        > 0
    )
    assert (report["weight_dtypes"], report["bits_per_weight"]) == ("F32, Q8_0", 8.58)
    found = answered("doctor", gguf)[f"Model {gguf}"]
    assert (found["runner"], found["weight_formats"]) == ("native", "int8")
    assert 8.5 <= found["bits_per_weight"] <= 9


@pytest.mark.parametrize("option", ["runner=torch", "device=cuda"])
def test_options_that_need_torch_are_refused(gguf, option, printed):
    err = printed("generate", "Hello", "-m", gguf, "-o", option, code=2).err
    name, value = option.split("=")
    assert f"{name}='{value}': a GGUF file runs on the CPU only, in the native runner" in err
