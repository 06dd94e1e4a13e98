"""rope_range="long" uses longrope's long factors for all lengths. It is exact, and its blocks are
never mixed with those of "short".
"""

import numpy as np
import pytest
import torch

from helpers.distance import distance
from helpers.gguf.writer import write_gguf
from helpers.models.specs import spec_of
from helpers.models.tiny_models import build_tiny_model, save_tiny_model
from helpers.runners.paged_driver import PagedDriver
from kvboost_edge import CPUPagedEngine
from kvboost_edge.backends.cpu import CPUBackend
from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.build import build_from_path
from kvboost_edge.errors import ConfigError, KVBoostError
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.config.architectures import LONG_RANGE, pin_notice
from kvboost_edge.models.config.spec import describe_model
from kvboost_edge.runners.native.runner import NativeRunner

pytestmark = pytest.mark.usefixtures("one_torch_thread")

ORIGINAL = 96
FIELDS = {
    "original_max_position_embeddings": ORIGINAL,
    "sliding_window": None,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0 + 0.2 * i for i in range(6)],
        "long_factor": [3.0 + 0.5 * i for i in range(6)],
    },
}
PROMPT = np.random.default_rng(7).integers(0, 256, 150).tolist()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_tiny_model("phi3", tmp_path_factory.mktemp("phi3"), **FIELDS)


def _logits(path, rope_range, prompt, budget=512):
    runner = NativeRunner.from_dir(Checkpoint.open(path, rope_range=rope_range), weights="f32")
    driver = PagedDriver(runner, CPUBackend(runner.info.kv_spec, 32, num_threads=1))
    logits = np.array(driver.prefill(driver.open(prompt), budget))
    runner.close()
    return logits


def test_the_long_range_equals_transformers(model_dir, caplog):
    model = build_tiny_model("phi3", **FIELDS)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        exact = model(torch.tensor([PROMPT]), use_cache=False).logits[0].numpy()
    logits = _logits(model_dir, "long", PROMPT)
    assert distance(logits, exact) <= 1e-4
    assert "limited to" not in caplog.text
    short = _logits(model_dir, "short", PROMPT[:ORIGINAL])
    assert f"limited to {ORIGINAL} tokens" in caplog.text
    assert distance(short, exact[:ORIGINAL]) > 1e-2


@pytest.mark.parametrize("count", [1, 50, ORIGINAL, ORIGINAL + 1])
def test_logits_do_not_depend_on_later_tokens(count, model_dir):
    np.testing.assert_array_equal(
        _logits(model_dir, "long", PROMPT[:count]), _logits(model_dir, "long", PROMPT, 23)[:count]
    )


def test_each_range_has_its_context_and_a_notice(model_dir):
    short, long = (Checkpoint.open(model_dir, rope_range=name).config for name in ("short", "long"))
    assert (describe_model(short).max_context, describe_model(long).max_context) == (ORIGINAL, 512)
    assert "rope_range='long' uses the factors for longer ones" in pin_notice(short)
    assert pin_notice(long) == ""
    dynamic = {
        "model_type": "llama",
        "max_position_embeddings": 512,
        "original_max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0},
    }
    assert "limited to 64" in pin_notice(dynamic)
    assert "rope_range" not in pin_notice(dynamic)
    assert LONG_RANGE in long
    assert LONG_RANGE not in short


def test_blocks_of_the_two_ranges_are_never_shared(model_dir, tmp_path):
    roots = []
    cached = []
    for rope_range in ("short", "long", "long"):
        options = {
            "rope_range": rope_range,
            "weights": "f32",
            "num_blocks": 32,
            "disk_cache_dir": tmp_path,
        }
        with CPUPagedEngine.from_pretrained(model_dir, **options) as engine:
            cached.append(engine.generate(PROMPT[:80], max_new_tokens=1).cached_tokens)
        parts = build_from_path(
            model_dir, EngineConfig.from_options(rope_range=rope_range, num_blocks=32)
        )
        roots.append((parts.root, parts.identity))
        parts.runner.close()
        parts.backend.close()
    assert cached == [0, 0, 79]  # all but the last token, whose logits are needed
    assert roots[1] == roots[2]
    assert {*roots[0]}.isdisjoint(roots[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rope_range": "longest"}, "rope_range='longest' is not one of"),
        ({"rope_range": "long", "runner": "torch"}, "rope_range='long'"),
    ],
)
def test_invalid_rope_range_options_are_refused(options, message, model_dir):
    with pytest.raises(KVBoostError, match=message):
        CPUPagedEngine.from_pretrained(model_dir, num_blocks=16, **options)


def test_models_with_one_range_are_refused_by_name(tmp_path):
    path = save_tiny_model("llama-yarn", tmp_path)
    with pytest.raises(ConfigError, match=r"rope_range='long'.*model_type='llama' does not have"):
        CPUPagedEngine.from_pretrained(path, num_blocks=16, rope_range="long")
    with pytest.raises(
        ConfigError, match="'rope_range' does not apply to a model that is already loaded"
    ):
        CPUPagedEngine(build_tiny_model("llama"), None, num_blocks=16, rope_range="long")


@pytest.mark.parametrize("rope_range", ["short", "long"])
def test_a_gguf_file_has_both_ranges(rope_range, model_dir, tmp_path):
    path = write_gguf(model_dir, tmp_path / "m.gguf")
    spec, expected = (spec_of(each, rope_range=rope_range) for each in (path, model_dir))
    assert spec.max_context == expected.max_context == (ORIGINAL if rope_range == "short" else 512)
    np.testing.assert_allclose(spec.ropes[0].frequencies, expected.ropes[0].frequencies, rtol=2e-7)
    assert spec.ropes[0].factor == pytest.approx(expected.ropes[0].factor, rel=1e-7)
    prompt = PROMPT[: 90 if rope_range == "short" else 150]
    assert distance(*(_logits(each, rope_range, prompt) for each in (path, model_dir))) <= 1e-5
