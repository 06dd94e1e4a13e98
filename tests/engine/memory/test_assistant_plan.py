"""A Gemma 4 assistant as draft_model is planned with its memory, and refused if it does not fit."""

import json

import numpy as np
import pytest

from helpers.gguf.writer import write_gguf
from helpers.models.assistants import TARGETS, config_of, save_pair, write_gguf_assistant
from helpers.models.tensor_files import change_tensors
from helpers.models.tiny_models import save_tiny_model
from kvboost_edge import CPUPagedEngine
from kvboost_edge.cli.inspect import model_report
from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.build import draft_model_refusal
from kvboost_edge.engine.memory.check import plan_fit, planned_memory
from kvboost_edge.engine.memory.draft_plan import plan_draft
from kvboost_edge.engine.memory.selection import select_path
from kvboost_edge.errors import ConfigError, ModelFormatError
from kvboost_edge.host.memory import process_rss
from kvboost_edge.models.checkpoint import Checkpoint

GB = 10**9

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture(scope="module", params=TARGETS)
def pair(request, tmp_path_factory):
    return save_pair(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def fresh(tmp_path):
    return save_pair("gemma4", tmp_path)


def change_config(path, **fields):
    """Change an assistant's config. Dicts change the objects under their keys."""
    config = config_of(path)
    for key, value in fields.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")


def draft_of(path, own, **options):
    checkpoint = Checkpoint.open(path)
    config = EngineConfig(draft_model=own, **options)
    return plan_draft(checkpoint, select_path(checkpoint, config), config)


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.some(3)
def test_answers_equal_those_without_the_assistant(pair, bits):
    path, own = pair
    options = {"num_blocks": 64, "num_threads": 1, "kv_cache_bits": bits}
    settings = ({"temperature": 0.0}, {"temperature": 0.9, "seed": 5})
    found = []
    for drafting in ({"speculation": "off"}, {"speculation": "on", "draft_model": own}):
        with CPUPagedEngine.from_pretrained(path, **options, **drafting) as engine:
            found.append([engine.generate("a cat", 40, **one) for one in settings])
            stats = engine.paged_stats()
    expected, drafted = ([one.output_token_ids for one in several] for several in found)
    assert drafted == expected
    assert stats["drafts"]["mtp"]["num_drafts"] > 10
    assert stats["draft_pool_bytes"] == 0 < stats["draft_weight_bytes"]


def test_the_memory_plan_equals_the_engines_usage(pair):
    path, own = pair
    options = {"num_blocks": 40, "kv_cache_bits": 8, "weights": "int8", "draft_model": own}
    checkpoint = Checkpoint.open(path)
    config = EngineConfig(**options)
    selected = select_path(checkpoint, config)
    draft = plan_draft(checkpoint, selected, config)
    fit = plan_fit(checkpoint, config, selected, checkpoint.summary(), GB, None, draft)
    with CPUPagedEngine.from_pretrained(path, **options) as engine:
        stats = engine.paged_stats()
        assert engine._parts.drafter.backend is engine._parts.backend
    assert (fit.pool, fit.draft_pool) == (stats["pool_bytes"], stats["draft_pool_bytes"])
    assert 0 <= stats["draft_weight_bytes"] - fit.draft_weights < 20_000
    without = planned_memory(path, EngineConfig(num_blocks=40, kv_cache_bits=8, weights="int8"))
    assert planned_memory(path, config).nbytes == without.nbytes + fit.draft_weights


def test_draft_weights_set_the_weight_format(pair):
    path, own = pair
    sizes = [
        draft_of(path, own, draft_weights=weights).bytes_read
        for weights in ("f32", "int8", "auto", "int4")
    ]
    assert sizes[0] > 3 * sizes[1]
    assert sizes[1] == sizes[2] > sizes[3]
    bound = {"max_memory": process_rss() + 10**9, "num_blocks": 16, "max_model_len": 64}
    with CPUPagedEngine.from_pretrained(path, draft_model=own, **bound) as engine:
        info = engine._parts.drafter.runner.info
    assert (info.dtype, info.max_context) == ("int4", 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"backbone_hidden_size": 128},
            "the assistant has backbone_hidden_size=128, but the model has hidden_size=64; give",
        ),
        (
            {"text_config": {"vocab_size": 304}},
            "the assistant has vocab_size=304, but the model has vocab_size=300",
        ),
        (
            {"text_config": {"num_key_value_heads": 1, "per_layer_config": None}},
            r"layer 0 of the assistant \(sliding attention\) has another number of KV heads than "
            "the KV of the model that it attends to: 1, but the model has 2",
        ),
        (
            {"text_config": {"head_dim": 16, "global_head_dim": 64, "per_layer_config": None}},
            r"layer 0 of the assistant \(sliding attention\) has another head_dim than .*: 16, but "
            "the model has 32",
        ),
        (
            {"text_config": {"sliding_window": 32}},
            "another sliding window than .*: 32, but the model has 24",
        ),
        (
            {"text_config": {"rope_parameters": None}},
            r"another RoPE than .*, but the model has",
        ),
        (
            {"text_config": {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 300}},
            "has per-layer embeddings or experts",
        ),
        ({"text_config": 3}, "has text_config=3, which must be an object"),
        ({"model_type": "gemma4_unified_assistant"}, "layer 0|its family|has backbone"),
    ],
)
def test_an_assistant_of_another_model_is_refused(change, message, fresh):
    path, own = fresh
    change_config(own, **change)
    if change.get("model_type"):
        with pytest.raises(ConfigError, match="is refused") as error:
            draft_of(save_tiny_model("gemma3", path.parent / "other"), own)
        assert "drafts for models of its family, not for model_type='gemma3_text'" in str(
            error.value
        )
        return
    with pytest.raises(ConfigError, match=rf"draft_model=.* is refused: .*{message}"):
        draft_of(path, own)


def test_a_model_without_full_layers_of_the_kind_is_refused(fresh):
    path, own = fresh
    other = save_tiny_model(
        "gemma4", path.parent / "full", layer_types=["full_attention"] * 8, num_kv_shared_layers=0
    )
    with pytest.raises(ConfigError, match="needs the KV of a layer with sliding attention"):
        draft_of(other, own)


@pytest.mark.parametrize(
    "name", ["pre_projection.weight", "model.layers.1.self_attn.q_proj.weight"]
)
def test_a_damaged_assistant_is_refused(name, fresh):
    path, own = fresh
    change_tensors(own, {name: None})
    with pytest.raises(ConfigError, match="is refused: the weight files lack tensor"):
        draft_of(path, own)
    change_tensors(own, {name: np.zeros((32, 128), np.float32)})
    with pytest.raises(ConfigError, match=r"is refused: .* tensor .* has"):
        draft_of(path, own)


def test_an_assistant_needs_the_native_runner(fresh):
    path, own = fresh
    with pytest.raises(ConfigError, match="draft models need the native runner"):
        draft_of(path, own, runner="torch")


def test_a_short_vocabulary_is_refused_for_an_assistant(fresh):
    path, own = fresh
    with pytest.raises(ConfigError, match="draft_vocabulary=64 has no effect on an assistant"):
        draft_of(path, own, draft_vocabulary=64)


def test_several_models_share_a_draft_model_that_fits(fresh):
    path, own = fresh
    config = EngineConfig(draft_model=own)
    assert draft_model_refusal(path, config) == ""
    other = save_tiny_model("llama", path.parent / "other")
    assert "drafts for models of its family" in draft_model_refusal(other, config)


def test_an_assistant_alone_is_refused(fresh):
    _, own = fresh
    with pytest.raises(ModelFormatError, match="only drafts tokens for another model"):
        CPUPagedEngine.from_pretrained(own)
    gguf = write_gguf_assistant(own, own.parent / "own.gguf")
    for path in (own, gguf):
        with pytest.raises(ModelFormatError, match="only drafts tokens for another model"):
            model_report(Checkpoint.open(path), EngineConfig())


def gguf_pair(folder):
    path, own = save_pair("gemma4-wide", folder)
    return (
        write_gguf(path, folder / "m.gguf", kind="Q8_0"),
        write_gguf_assistant(own, folder / "own.gguf", "Q8_0"),
    )


def test_gguf_files_draft_without_changing_answers(tmp_path):
    path, own = gguf_pair(tmp_path)
    found = []
    for options in ({"speculation": "off"}, {"speculation": "on", "draft_model": own}):
        with CPUPagedEngine.from_pretrained(
            path, num_blocks=64, num_threads=1, **options
        ) as engine:
            found.append(engine.generate("a cat", 40, temperature=0.0).output_token_ids)
            counts = engine.paged_stats()["drafts"]
    assert found[0] == found[1]
    assert counts["mtp"]["num_drafts"] > 3
    stored = draft_of(path, own, draft_weights="auto")
    assert stored.info.weight_bytes == draft_of(path, own, draft_weights="int8").info.weight_bytes


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"embedding_length_out": 128}, "has backbone_hidden_size=128, but the model has"),
        ({"nextn_predict_layers": 4}, "must be less than block_count=3"),
        ({"attention.sliding_window": 32}, "another sliding window than .*: 32, but .* has 24"),
        ({"attention.head_count_kv": 1}, "another number of KV heads than .*: 1, but .* has 2"),
        ({"tensor_parts": 2}, "key 'gemma4-assistant.tensor_parts' is not supported"),
    ],
)
def test_a_gguf_assistant_of_another_model_is_refused(keys, message, tmp_path):
    path, own = save_pair("gemma4-wide", tmp_path)
    own = write_gguf_assistant(own, tmp_path / "own.gguf", **keys)
    with pytest.raises(ConfigError, match=rf"draft_model=.* is refused: .*{message}"):
        draft_of(path, own)


def test_a_gguf_assistant_alone_is_refused(tmp_path):
    _, own = gguf_pair(tmp_path)
    with pytest.raises(ModelFormatError, match="only drafts tokens for another model"):
        CPUPagedEngine.from_pretrained(own)
