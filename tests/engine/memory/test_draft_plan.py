"""A draft model: its check and its memory plan, before anything is loaded."""

import json

import pytest

from helpers.models.embedding_models import save_bidirectional_model
from helpers.models.tiny_checkpoints import save_tiny_checkpoint
from helpers.models.tiny_models import build_tiny_model, save_tiny_model
from helpers.onnx.blocks import Form
from helpers.onnx.concat import ConcatDecoder
from helpers.onnx.writer import write_onnx
from kvboost_edge import CPUPagedEngine
from kvboost_edge.cli.doctor import doctor_report
from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.build import draft_model_refusal
from kvboost_edge.engine.memory import selection
from kvboost_edge.engine.memory.check import plan_fit, planned_memory
from kvboost_edge.engine.memory.draft_plan import plan_draft, select_with_draft
from kvboost_edge.engine.memory.pool_size import most_sequences
from kvboost_edge.engine.memory.selection import select_path
from kvboost_edge.engine.spec_decode import model_drafts
from kvboost_edge.errors import CapacityError, ConfigError, RequestError
from kvboost_edge.host.memory import process_rss
from kvboost_edge.models.checkpoint import Checkpoint

GB = 10**9
PROMPT = "the cat sat on the mat and the cat sat on the mat and"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Directories of a model and of a smaller one whose vocabulary has other padding."""
    folder = tmp_path_factory.mktemp("pair")
    target = _saved(folder / "target", num_hidden_layers=3)
    return target, _saved(folder / "draft", num_hidden_layers=1, vocab_size=310)


def _saved(folder, **fields):
    folder.mkdir()
    return save_tiny_checkpoint("llama", folder, **fields)


def _fit(target, **options):
    checkpoint = Checkpoint.open(target)
    config = EngineConfig(**options)
    selected = select_path(checkpoint, config)
    draft = plan_draft(checkpoint, selected, config)
    return plan_fit(checkpoint, config, selected, checkpoint.summary(), GB, None, draft)


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 40},
        {"max_cache_bytes": 3_000_000},
        {"num_blocks": 40, "kv_cache_bits": 8, "draft_weights": "int8"},
    ],
    ids=str,
)
def test_the_memory_plan_equals_the_engines_usage(pair, options):
    target, draft = pair
    fit = _fit(target, draft_model=draft, **options)
    with CPUPagedEngine.from_pretrained(target, draft_model=str(draft), **options) as engine:
        stats = engine.paged_stats()
        parts = engine._parts
        assert parts.drafter is not None
        kv = parts.drafter.runner.info.kv_spec
        bits = options.get("kv_cache_bits", 16)
        assert (kv.block_size, kv.bits) == (16, (bits, bits))
        assert parts.drafter.runner.info.dtype.startswith(options.get("draft_weights", "int4"))
    assert (fit.pool, fit.draft_pool) == (stats["pool_bytes"], stats["draft_pool_bytes"])
    num_blocks = stats["num_blocks"]
    num_open = most_sequences(EngineConfig(), num_blocks, 16) + 1
    assert stats["draft_pool_bytes"] == (
        num_blocks * kv.bytes_per_block + num_open * kv.bytes_per_open_block
    )
    assert 0 <= stats["draft_weight_bytes"] - fit.draft_weights < 20_000
    assert fit.needed == (
        fit.info.weight_bytes + fit.pool + fit.draft.weight_bytes + fit.draft_pool
    )
    if "max_cache_bytes" in options:
        assert fit.pool + fit.draft_pool <= options["max_cache_bytes"]
    assert planned_memory(target, EngineConfig(draft_model=draft, num_blocks=40)).nbytes > (
        planned_memory(target, EngineConfig(num_blocks=40)).nbytes + kv.bytes_per_block * 40
    )


def test_the_chosen_weight_format_leaves_room_for_the_draft_model(pair, monkeypatch):
    """Int8 weights are chosen if models and pools take at most half of the memory that the draft
    model's weights leave.
    """
    target, draft = pair
    options = {"num_blocks": 40, "max_num_seqs": 2}
    fit = _fit(target, draft_model=draft, weights="int8", **options)
    least = 2 * (fit.info.weight_bytes + fit.pool + fit.draft_pool) + fit.draft_weights
    checkpoint = Checkpoint.open(target)
    for available, with_draft in ((least, "int8"), (least - 1, "int4")):
        monkeypatch.setattr(selection, "available_bytes", lambda available=available: available)
        for more, expected in (({}, "int8"), ({"draft_model": draft}, with_draft)):
            selected, planned = select_with_draft(checkpoint, EngineConfig(**options, **more))
            assert selected.runner.weights == expected
            assert (planned is None) == (not more)
            with CPUPagedEngine.from_pretrained(target, **options, **more) as engine:
                assert engine.runner_info.dtype.startswith(expected)
    report = doctor_report(str(target), {}, EngineConfig(draft_model=draft, **options))
    assert report[f"Model {target}"]["weights"] == "int4"


def test_answers_equal_those_without_a_draft_model(pair):
    target, draft = pair
    options = {"num_blocks": 64, "num_threads": 1}
    settings = ({"temperature": 0.0}, {"temperature": 0.9, "seed": 5})
    answers = []
    for more in (
        {"speculation": "off"},
        {"draft_model": draft, "speculation": "on"},
        {"draft_model": target, "draft_weights": "auto", "speculation": "on"},
    ):
        with CPUPagedEngine.from_pretrained(target, **options, **more) as engine:
            found = [engine.generate(PROMPT, max_new_tokens=40, **one) for one in settings]
        answers.append([one.output_token_ids for one in found])
    assert answers[1] == answers[0]
    assert answers[2] == answers[0]
    assert sum(one.accepted_tokens for one in found) > 20, (
        "a model must accept most drafts of itself"
    )


def test_a_vocabulary_of_all_ids_is_not_short(pair):
    target, draft = pair  # with 310 rows
    options = {"num_blocks": 64, "num_threads": 1, "draft_model": draft, "speculation": "on"}
    found = []
    for count in (None, 0, 310, 400, 309):
        with CPUPagedEngine.from_pretrained(target, **options, draft_vocabulary=count) as engine:
            answer = engine.generate(PROMPT, max_new_tokens=40, temperature=0.0)
            found.append(answer.output_token_ids)
            assert engine.paged_stats()["draft_vocabulary"] == (309 if count == 309 else 310)
            info = engine._parts.drafter.runner.info
            assert info.short_vocabulary == (309 if count == 309 else 0)
    assert found == found[:1] * 5


@pytest.mark.parametrize(
    ("constraint", "forced"),
    [({"regex": "[a-z ]{30}"}, False), ({"choice": ["the same text again", "another"]}, True)],
)
def test_structured_output_outside_the_short_vocabulary_is_unchanged(
    pair, constraint, forced, monkeypatch
):
    """The draft model chooses from ids of digits and punctuation, but the grammar allows letters
    only. It drafts nothing, and forced tokens are drafted nevertheless.
    """
    monkeypatch.setattr(model_drafts, "_MOST_RARE", 128)
    target, _ = pair
    options = {"num_blocks": 64, "num_threads": 1}
    drafting = {"draft_model": target, "speculation": "on", "draft_vocabulary": 32}
    found = []
    for more in ({"speculation": "off"}, drafting):
        with CPUPagedEngine.from_pretrained(target, **options, **more) as engine:
            for drawn in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3}):
                found.append(
                    engine.generate(
                        "0 1 2 3 4 5", max_new_tokens=30, **constraint, **drawn, logprobs=2
                    )
                )
    for off, on in zip(found[:2], found[2:], strict=True):
        assert on.output_token_ids == off.output_token_ids
        assert on.logprobs == off.logprobs
        assert min(on.output_token_ids) >= 32
        assert ("grammar" in on.drafts) == forced
        assert "draft_model" not in on.drafts


def test_draft_p_min_does_not_change_answers(pair):
    """The answers stay the same. The draft model is the model itself; since no token has a
    probability of 1, a minimum of 1.0 prevents all drafts.
    """
    target, _ = pair
    options = {"num_blocks": 64, "num_threads": 1}
    more = {"draft_model": target, "draft_weights": "auto", "speculation": "on"}
    with CPUPagedEngine.from_pretrained(target, **options, **more) as engine:
        for settings in ({"temperature": 0.0}, {"temperature": 0.9, "seed": 5}):
            found = {
                least: engine.generate(
                    # A salt of its own hides the other requests' history from prompt lookup.
                    "a cat",
                    40,
                    **settings,
                    draft_p_min=least,
                    cache_salt=str(least),
                )
                for least in (None, 0.0, 1.0)
            }
            assert len({tuple(one.output_token_ids) for one in found.values()}) == 1
            drafted = {least: one.drafts.get("draft_model") for least, one in found.items()}
            assert drafted[0.0].drafted_tokens > 0
            assert drafted[1.0] is None or drafted[1.0].drafted_tokens == 0
    with (
        CPUPagedEngine.from_pretrained(target, **options) as engine,
        pytest.raises(RequestError, match=r"draft_p_min=0\.5 has no effect without a draft"),
    ):
        engine.generate(PROMPT, 4, draft_p_min=0.5)


def test_token_ids_only_the_target_has_are_padding_for_the_draft_model(pair, tmp_path, caplog):
    _, draft = pair  # with 310 rows
    target = _saved(tmp_path / "longer", vocab_size=320)
    ids = [5, 6, 319, 7, 315] * 6
    answers = []
    for more in ({"speculation": "off"}, {"draft_model": draft, "speculation": "on"}):
        with CPUPagedEngine.from_pretrained(target, num_blocks=64, **more) as engine:
            found = engine.generate(ids, 20, temperature=0.0, ignore_eos=True)
        answers.append(found.output_token_ids)
    assert answers[0] == answers[1]
    assert found.drafted_tokens > 0
    assert not caplog.records


def test_a_pair_that_does_not_fit_is_refused_with_the_draft_models_share(pair):
    target, draft = pair
    with pytest.raises(CapacityError) as caught:
        CPUPagedEngine.from_pretrained(target, draft_model=draft, num_blocks=10**9)
    assert "The draft model takes " in str(caught.value)
    assert str(caught.value).endswith("leave draft_model out, or choose a smaller one")
    config = {"max_memory": 10**6, "draft_model": draft}
    with pytest.raises(CapacityError, match="The draft model takes"):
        CPUPagedEngine.from_pretrained(target, **config)


def test_max_memory_covers_both_models(pair):
    target, draft = pair
    # The process already holds what other tests have loaded.
    bound = {"max_memory": process_rss() + 10**9, "num_blocks": 16, "max_model_len": 64}
    with CPUPagedEngine.from_pretrained(target, **bound) as engine:
        alone = engine.paged_stats()
    with CPUPagedEngine.from_pretrained(target, **bound, draft_model=draft) as engine:
        both = engine.paged_stats()
        assert engine._parts.drafter.runner.info.max_context == 64
    assert both["buffer_bytes"] > alone["buffer_bytes"]
    assert both["draft_weight_bytes"] > 0 == alone["draft_weight_bytes"]


def _renamed_token(path):
    """Give another text to the last token of a model's vocabulary."""
    file = path / "tokenizer.json"
    state = json.loads(file.read_text(encoding="utf-8"))
    state["added_tokens"][-1]["content"] = "<|other|>"
    file.write_text(json.dumps(state), encoding="utf-8")
    config = path / "tokenizer_config.json"
    text = config.read_text(encoding="utf-8").replace("<|assistant|>", "<|other|>")
    config.write_text(text, encoding="utf-8")


def test_another_vocabulary_is_refused_with_the_first_difference(pair, tmp_path):
    target, _ = pair
    other = _saved(tmp_path / "other", num_hidden_layers=1)
    _renamed_token(other)
    said = (
        r"draft_model='.*other' is refused, because the vocabularies differ: token 260 is "
        r"'<\|assistant\|>' in target and '<\|other\|>' in other"
    )
    with pytest.raises(ConfigError, match=said):
        CPUPagedEngine.from_pretrained(target, draft_model=other, num_blocks=16)
    assert "token 260" in draft_model_refusal(target, EngineConfig(draft_model=other))
    same = _saved(tmp_path / "target", num_hidden_layers=1)
    _renamed_token(same)
    with pytest.raises(ConfigError, match="in the draft model's target"):
        CPUPagedEngine.from_pretrained(target, draft_model=same, num_blocks=16)


def test_a_served_model_is_not_its_own_draft_model(pair):
    target, draft = pair
    assert draft_model_refusal(target, EngineConfig()) == ""
    assert draft_model_refusal(target, EngineConfig(draft_model=draft)) == ""
    itself = draft_model_refusal(target, EngineConfig(draft_model=target))
    assert itself == "it is the draft model itself"


def _vision(folder):
    folder.mkdir()
    config = {"model_type": "siglip_vision_model", "architectures": ["SiglipVisionModel"]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


DRAFTERS = {
    "hybrid": (lambda path: save_tiny_model("lfm2", path), "have a recurrent state"),
    "torch only": (
        lambda path: save_tiny_model("stablelm", path),
        "a draft model needs the native runner",
    ),
    "ONNX": (
        lambda path: write_onnx(build_tiny_model("llama"), path, Form(concat=True), ConcatDecoder),
        "it is an ONNX file",
    ),
    "embedding": (lambda path: save_bidirectional_model(path), "it computes embeddings"),
    "vision": (_vision, "is refused: .*siglip_vision_model"),
    "missing": (lambda path: path, "is refused: there is no model directory"),
}


@pytest.mark.parametrize("kind", DRAFTERS)
def test_unsupported_draft_models_are_refused_by_name(pair, tmp_path, kind):
    make, said = DRAFTERS[kind]
    path = make(tmp_path / "draft")
    with pytest.raises(ConfigError, match=said) as caught:
        CPUPagedEngine.from_pretrained(pair[0], draft_model=path, num_blocks=16)
    assert f"draft_model={str(path)!r} is refused: " in str(caught.value)


def test_draft_models_need_the_native_runner(pair):
    target, draft = pair
    with pytest.raises(ConfigError, match=r"target runs on the torch runner .* need the native"):
        CPUPagedEngine.from_pretrained(target, draft_model=draft, runner="torch", num_blocks=16)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"draft_weights": "int8"}, "draft_weights='int8' has no effect without draft_model"),
        ({"draft_weights": "int3"}, "draft_weights='int3' is not one of"),
        ({"draft_vocabulary": -1}, "draft_vocabulary=-1 must be"),
        (
            {"draft_vocabulary": 64, "speculation": "off"},
            "draft_vocabulary=64 has no effect with speculation='off'",
        ),
        (
            {"draft_vocabulary": 64, "mtp": "off"},
            "draft_vocabulary=64 has no effect without draft_model or mtp='auto'",
        ),
        ({"draft_model": ""}, "draft_model='' must be a path, a hub id or None"),
        ({"draft_model": 5}, "draft_model=5 must be a path"),
        (
            {"draft_model": "m", "speculation": "off"},
            "draft_model='m' has no effect with speculation='off'",
        ),
    ],
)
def test_contradictory_options_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        EngineConfig(**options)


@pytest.mark.parametrize("count", [0, 64])
def test_a_short_vocabulary_is_refused_without_a_drafter(pair, count):
    said = rf"draft_vocabulary={count} has no effect without draft_model, because target has no mul"
    with pytest.raises(ConfigError, match=said):
        CPUPagedEngine.from_pretrained(pair[0], draft_vocabulary=count, num_blocks=16)
