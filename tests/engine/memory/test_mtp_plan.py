"""The MTP head of a model: it is planned with its memory, loaded by default, and turned off by
options.
"""

import bisect
import logging

import numpy as np
import pytest

from helpers.models.mtp_heads import save_with_head, write_gguf_with_head, write_head_file
from helpers.models.tensor_files import change_tensors
from helpers.models.tiny_checkpoints import save_tiny_checkpoint
from kvboost_edge import CPUPagedEngine
from kvboost_edge.config import EngineConfig
from kvboost_edge.engine import build
from kvboost_edge.engine.memory import check
from kvboost_edge.engine.memory.check import plan_fit, planned_memory
from kvboost_edge.engine.memory.draft_plan import plan_draft
from kvboost_edge.engine.memory.pool_size import gb, most_sequences
from kvboost_edge.engine.memory.selection import select_path
from kvboost_edge.errors import CapacityError, ConfigError, ModelFormatError
from kvboost_edge.host.memory import process_rss
from kvboost_edge.models.checkpoint import Checkpoint

GB = 10**9
FAMILIES = ("qwen3_5_text", "glm4_moe")

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture(scope="module", params=FAMILIES)
def path(request, tmp_path_factory):
    return save_with_head(request.param, tmp_path_factory.mktemp(request.param))


def _draft(path, **options):
    checkpoint = Checkpoint.open(path)
    config = EngineConfig(**options)
    return plan_draft(checkpoint, select_path(checkpoint, config), config)


def test_the_memory_plan_equals_the_engines_usage(path):
    options = {"num_blocks": 40, "kv_cache_bits": 8, "weights": "int8"}
    checkpoint = Checkpoint.open(path)
    config = EngineConfig(**options)
    selected = select_path(checkpoint, config)
    draft = plan_draft(checkpoint, selected, config)
    fit = plan_fit(checkpoint, config, selected, checkpoint.summary(), GB, None, draft)
    lm_head = 304 * (64 + 2 * 2)  # rows of tiles, each with a scale for 32 codes
    assert draft.bytes_read == draft.info.weight_bytes + lm_head
    with CPUPagedEngine.from_pretrained(path, **options) as engine:
        stats = engine.paged_stats()
        kv = engine._parts.drafter.runner.info.kv_spec
        assert engine._parts.drafter.runner.info.joins_hidden_states
    assert (kv.block_size, kv.bits, len(kv.layers)) == (16, (8, 8), 1)
    assert (fit.pool, fit.draft_pool) == (stats["pool_bytes"], stats["draft_pool_bytes"])
    num_open = most_sequences(config, 40, 16) + 1
    assert stats["draft_pool_bytes"] == (
        40 * kv.bytes_per_block + num_open * kv.bytes_per_open_block
    )
    assert 0 <= stats["draft_weight_bytes"] - fit.draft_weights < 20_000
    without = planned_memory(path, EngineConfig(**options, mtp="off")).nbytes
    planned = planned_memory(path, config).nbytes
    assert planned == without + fit.draft_weights + fit.draft_pool


@pytest.mark.parametrize("options", [{"mtp": "off"}, {"speculation": "off"}])
def test_the_head_is_not_loaded_if_turned_off(path, options):
    assert _draft(path) is not None
    assert _draft(path, **options) is None


def test_other_runners_do_not_load_the_head(tmp_path):
    path = save_with_head("glm4_moe", tmp_path)
    assert _draft(path, runner="torch") is None
    with pytest.raises(ConfigError, match="draft_vocabulary=64 has no effect without draft_model"):
        _draft(path, draft_vocabulary=64, runner="torch")


def test_a_draft_model_replaces_the_head(path, tmp_path):
    draft = save_tiny_checkpoint("llama", tmp_path, num_hidden_layers=1)
    planned = _draft(path, draft_model=draft)
    assert not planned.is_mtp_head
    assert planned.checkpoint.path == draft
    with CPUPagedEngine.from_pretrained(path, draft_model=draft, num_blocks=16) as engine:
        assert not engine._parts.drafter.runner.info.joins_hidden_states


@pytest.mark.parametrize("form", ["safetensors", "GGUF"])
@pytest.mark.some(3)
def test_answers_equal_those_without_the_head(path, form, tmp_path):
    if form == "GGUF":
        path = write_gguf_with_head(path, tmp_path / "m.gguf")
    options = {"num_blocks": 64, "num_threads": 1}
    settings = ({"temperature": 0.0}, {"temperature": 0.9, "seed": 5})
    found = []
    for speculation in ("off", "on"):
        with CPUPagedEngine.from_pretrained(path, speculation=speculation, **options) as engine:
            found.append([engine.generate("a cat", 40, **one) for one in settings])
            counts = engine.paged_stats()["drafts"]
    expected, drafted = ([one.output_token_ids for one in several] for several in found)
    assert drafted == expected
    assert counts["mtp"]["num_drafts"] > 10


def test_the_head_computes_kv_of_warmed_prompts(path, monkeypatch):
    with CPUPagedEngine.from_pretrained(path, num_blocks=64) as engine:
        runner = engine._parts.drafter.runner
        forward = runner.forward
        counts = []
        monkeypatch.setattr(
            runner, "forward", lambda batch: counts.append(len(batch.token_ids)) or forward(batch)
        )
        engine.warm(list(range(3, 63)))
        assert sum(counts) == 60
        engine.generate(list(range(63, 103)), max_new_tokens=0)
        assert sum(counts) == 100
        engine.generate(list(range(103, 143)), max_new_tokens=0, speculation="off")
        if "qwen" not in str(path):  # recurrent, so it refuses documents
            engine.warm(documents=[list(range(143, 183))])
        engine.logits(list(range(183, 223)))
        assert sum(counts) == 100


def test_a_head_in_its_own_file_is_given_as_draft_model(path, tmp_path):
    alone = write_head_file(path, tmp_path / "head.gguf")
    options = {"num_blocks": 64, "num_threads": 1, "kv_cache_bits": 8}
    planned = _draft(path, draft_model=alone, draft_weights="int8", kv_cache_bits=8)
    own = _draft(path, weights="int8", kv_cache_bits=8)
    assert planned.is_mtp_head
    assert _draft(path, draft_model=alone, draft_vocabulary=64).info.short_vocabulary == 64
    assert planned.info.kv_spec == own.info.kv_spec
    assert planned.bytes_read == own.bytes_read
    found = []
    for more in ({"speculation": "off"}, {"draft_model": str(alone), "speculation": "on"}):
        with CPUPagedEngine.from_pretrained(path, **options, **more) as engine:
            answer = engine.generate("a cat", 40, temperature=0.0, logprobs=2)
            found.append((answer.output_token_ids, answer.logprobs))
            stats = engine.paged_stats()
    assert found[0] == found[1]
    assert stats["drafts"]["mtp"]["num_drafts"] > 10
    assert 0 < stats["draft_pool_bytes"] < stats["pool_bytes"] * 4
    with pytest.raises(ModelFormatError, match=r"give its model as the model, and this file as"):
        CPUPagedEngine.from_pretrained(alone)


@pytest.mark.parametrize(
    ("fields", "more", "message"),
    [
        ({"hidden_size": 128}, {}, "another hidden size: 128, but the model has 64"),
        ({"num_key_value_heads": 4}, {}, "another number of KV heads: 4, but the model has 2"),
        ({"vocab_size": 320}, {}, "another vocabulary: 320, but the model has 300"),
        ({}, {"d2t": np.zeros(32, np.float32)}, "tensor 'd2t' belongs to an LM head for a part"),
        (
            {},
            {"output.weight": np.ones((96, 64), np.float32)},
            r"tensor 'output\.weight' belongs to an LM head for a part of the vocabulary",
        ),
        ({}, {"blk.{}.nextn.eh_proj.weight": None}, "lacks tensor 'mtp.projection.weight'"),
    ],
)
def test_head_files_that_do_not_fit_are_refused(fields, more, message, tmp_path):
    path = save_with_head("qwen3_5_text", tmp_path / "model")
    other = save_with_head("qwen3_5_text", tmp_path / "other", **fields)
    layers = len(Checkpoint.open(other).spec.layers)
    more = {name.format(layers): tensor for name, tensor in more.items()}
    alone = write_head_file(other, tmp_path / "head.gguf", ("output_norm.weight",), more=more)
    with pytest.raises(ConfigError, match=message) as caught:
        _draft(path, draft_model=alone)
    assert f"draft_model={str(alone)!r} is refused: " in str(caught.value)


def test_max_memory_covers_the_head(path):
    bound = {"max_memory": process_rss() + 10**9, "num_blocks": 16, "max_model_len": 64}
    with CPUPagedEngine.from_pretrained(path, **bound, mtp="off") as engine:
        alone = engine.paged_stats()
    with CPUPagedEngine.from_pretrained(path, **bound) as engine:
        both = engine.paged_stats()
        assert engine._parts.drafter.runner.info.max_context == 64
    assert both["buffer_bytes"] > alone["buffer_bytes"]
    assert both["draft_weight_bytes"] > 0 == alone["draft_weight_bytes"]
    with pytest.raises(CapacityError) as caught:
        CPUPagedEngine.from_pretrained(path, num_blocks=10**9)
    assert "head" not in str(caught.value), "without the head, the model does not fit either"


@pytest.mark.parametrize("speculation", ["auto", "on"])
def test_an_engine_starts_without_a_head_that_does_not_fit(path, speculation, monkeypatch, caplog):
    """The least memory with which the model alone fits is found by bisection."""
    options = {"num_blocks": 40, "max_num_seqs": 2, "speculation": speculation}
    checkpoint = Checkpoint.open(path)
    config = EngineConfig(**options)
    selected = select_path(checkpoint, config)
    draft = plan_draft(checkpoint, selected, config)

    def refusal(available, head):
        summary = checkpoint.summary()
        return plan_fit(checkpoint, config, selected, summary, available, None, head).refusal

    least = bisect.bisect_left(range(GB), True, key=lambda size: not refusal(size, None))
    assert refusal(least, draft)
    monkeypatch.setattr(build, "available_on", lambda device: least)
    monkeypatch.setattr(check, "available_on", lambda device: least)
    with (
        caplog.at_level(logging.WARNING),
        CPUPagedEngine.from_pretrained(path, **options) as engine,
    ):
        assert engine._parts.drafter is None
        assert len(engine.generate("a cat", 4, ignore_eos=True).output_token_ids) == 4
    said = "the multi-token prediction head is not used, because the model does not fit with it: "
    warned = [one for one in caplog.messages if said in one]
    block = draft.info.kv_spec.bytes_per_block
    assert len(warned) == 1
    assert f"{gb(draft.info.weight_bytes)} of the weights and {block} bytes of each" in warned[0]
    without = planned_memory(path, EngineConfig(**options, mtp="off")).nbytes
    monkeypatch.setattr(check, "process_rss", lambda: 0)
    assert planned_memory(path, config).nbytes == without
    monkeypatch.setattr(check, "process_rss", lambda: GB)  # other models, which can be unloaded
    head = draft.info.weight_bytes + 40 * block
    assert without + head <= planned_memory(path, config).nbytes < without + 2 * head
    monkeypatch.setattr(build, "available_on", lambda device: least - 1)
    with pytest.raises(CapacityError):
        CPUPagedEngine.from_pretrained(path, **options)


def test_a_head_file_that_does_not_fit_is_refused(path, tmp_path):
    alone = write_head_file(path, tmp_path / "head.gguf")
    with pytest.raises(CapacityError, match=r"prediction head takes .*; leave draft_model out$"):
        CPUPagedEngine.from_pretrained(path, draft_model=alone, num_blocks=10**9)


def test_a_damaged_head_is_not_used(tmp_path, caplog):
    path = save_with_head("qwen3_5_text", tmp_path)
    change_tensors(path, {"mtp.fc.weight": None})
    with (
        caplog.at_level(logging.WARNING),
        CPUPagedEngine.from_pretrained(path, num_blocks=16) as engine,
    ):
        assert engine._parts.drafter is None
    assert "head is not used: the weight files lack tensor 'mtp.projection.weight'" in caplog.text


def test_invalid_values_of_mtp_are_refused():
    with pytest.raises(ConfigError, match="mtp='on' is not one of"):
        EngineConfig(mtp="on")
