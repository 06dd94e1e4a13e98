"""Hybrid models: logits against float64, drafts, and the reference backend."""

import dataclasses

import numpy as np
import pytest

from helpers.distance import distance
from helpers.models.tiny_models import build_tiny_model, save_tiny_model
from helpers.oracles.packed_plan import hybrid_logits, packed_floats
from helpers.random_ids import random_ids
from helpers.runners.paged_driver import PagedDriver
from helpers.runners.recurrent_driver import StateDriver
from kvboost_edge.backends.base import PassStates
from kvboost_edge.backends.select import choose_backend, make_backend
from kvboost_edge.config import EngineConfig
from kvboost_edge.errors import ConfigError
from kvboost_edge.runners.native.runner import NativeRunner
from kvboost_edge.runners.native.select_native import RECURRENT, moved_keys_refusal

# The last two have layers with a single part each, and layers with both KV and recurrent state.
FAMILIES = (
    "lfm2",
    "lfm2-plain",
    "qwen3_5_text",
    "qwen3_5_text-even",
    "granitemoehybrid-groups",
    "nemotron_h-moe",
    "falcon_h1",
)
# Distance of the logits from float64, with 8-bit activations and models made sensitive. LFM2's
# layers multiply three inputs with each other, and so their errors.
LIMITS = {"f32": (1e-5, 1e-5), "bf16": (2e-3, 2e-3), "int8": (0.1, 0.05), "int4": (0.1, 0.05)}
PROMPT = random_ids(77, 7)
OTHER = random_ids(45, 8)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    found = {}

    def directory(family):
        if family not in found:
            found[family] = save_tiny_model(family, tmp_path_factory.mktemp(family))
        return found[family]

    return directory


@pytest.fixture(scope="module")
def runners(directories):
    """Runners by family and options, each made once."""
    found = {}

    def runner(family, weights="f32", bits=(16, 16), threads=1):
        key = (family, weights, bits, threads)
        if key not in found:
            directory = directories(family)
            found[key] = NativeRunner.from_dir(
                directory, weights=weights, kv_bits=bits, num_threads=threads
            )
        return found[key]

    yield runner
    for one in found.values():
        one.close()


def drive(runner, backend="cpu", threads=1):
    made = make_backend(
        choose_backend(backend),
        runner.info.kv_spec,
        40,
        threads,
        num_state_slots=8,
        num_draft_rows=12,
    )
    return StateDriver(runner, made)


def whole(runner, tokens, backend="cpu"):
    """Compute all logits of a text in one pass, alone."""
    driver = drive(runner, backend)
    return driver.prefill(driver.open(tokens))


def _of_rows(runner, backend, logit_rows, hidden_state_rows):
    """Return logits and states of these rows of a text, computed in one pass, alone."""
    spec = runner.info.kv_spec
    if spec.states:
        driver = drive(runner, backend)
    else:
        driver = PagedDriver(runner, make_backend(choose_backend(backend), spec, 40, 1))
    return driver.step_for([(driver.open(PROMPT), len(PROMPT))], logit_rows, hidden_state_rows)


@pytest.mark.parametrize(
    "family", ["lfm2", "qwen3_5_text", "granitemoehybrid-h", "granitemoehybrid-groups"]
)
@pytest.mark.parametrize("weights", LIMITS)
def test_logits_are_close_to_float64_on_the_same_weights(family, weights, directories, runners):
    expected = hybrid_logits(*packed_floats(directories(family), weights), PROMPT)
    logits = whole(runners(family, weights), PROMPT)
    limit = LIMITS[weights][family != "lfm2"]
    assert distance(logits, expected) <= limit


@pytest.mark.parametrize("family", FAMILIES)
def test_chunking_changes_no_bit_on_the_reference_backend(family, runners):
    """The chunks include ones without any wanted logits. engine/test_invariance.py covers the CPU
    backend.
    """
    runner = runners(family)
    expected = whole(runner, PROMPT, "reference")
    for chunk in (1, 16, 50):
        driver = drive(runner, "reference")
        np.testing.assert_array_equal(driver.prefill(driver.open(PROMPT), chunk), expected)
    driver = drive(runner, "reference")
    sequence = driver.open(PROMPT)
    for count in (1, 20, 30):
        driver.step_for([(sequence, count)], [])
    logits, states = driver.step_for([(sequence, 26)], [3, 20, 25], hidden_state_rows=[0, 25])
    np.testing.assert_array_equal(logits, expected[[54, 71, 76]])
    again = drive(runner, "reference")
    _, all_states = again.step_for(
        [(again.open(PROMPT), len(PROMPT))], [], hidden_state_rows=range(len(PROMPT))
    )
    np.testing.assert_array_equal(states, all_states[[51, 76]])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h-moe", "qwen3", "gemma4"])
def test_rows_may_want_logits_and_states(family, backend, runners):
    runner = runners(family)
    every = range(len(PROMPT))
    expected, _ = _of_rows(runner, backend, every, [])
    _, all_states = _of_rows(runner, backend, [], every)
    for logit_rows in ([], [76], [3, 5, 70], every):
        for hidden_state_rows in ([3], [5, 20, 76], every):
            logits, states = _of_rows(runner, backend, logit_rows, hidden_state_rows)
            np.testing.assert_array_equal(logits, expected[list(logit_rows)])
            np.testing.assert_array_equal(states, all_states[list(hidden_state_rows)])


@pytest.mark.parametrize(
    "family",
    ["lfm2", "qwen3_5_text-even", "granitemoehybrid-groups", "nemotron_h-moe", "falcon_h1"],
)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_accepted_drafts_change_no_bit(family, backend, runners):
    runner = runners(family)
    expected = [whole(runner, text, backend) for text in (PROMPT, OTHER)]
    driver = drive(runner, backend)
    texts = [driver.open(text) for text in (PROMPT, OTHER)]
    driver.step([(texts[0], 20), (texts[1], 3)])
    driver.drafts = {id(texts[0]): 5, id(texts[1]): 7}
    slots = np.array([driver.slots[id(text)][1] for text in texts], np.int32)
    before = driver.pool.checksums(slots.tolist())
    for rows, logits, start in zip(
        driver.step([(texts[0], 6), (texts[1], 9)]), expected, (20, 3), strict=True
    ):
        np.testing.assert_array_equal(rows, logits[start : start + len(rows)])
    assert driver.pool.checksums(slots.tolist()) != before, (
        "the rows without drafts must change the states"
    )
    saves = np.array([[1, 4, driver.free.pop()]], np.int32)
    runner.accept_drafts(driver.layout, np.array([5, 7], np.int32), PassStates(slots, slots, saves))
    for text, logits, start in zip(texts, expected, (26, 12), strict=True):
        np.testing.assert_array_equal(driver.prefill(text), logits[start:])
    again = driver.open(OTHER[:9])
    driver.prefill(again)
    saved, computed = driver.pool.read_slots([int(saves[0, 2]), driver.slots[id(again)][1]])
    np.testing.assert_array_equal(saved, computed)


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text", "granitemoehybrid-h", "falcon_h1"])
def test_a_nan_state_affects_only_its_sequence(family, runners):
    runner = runners(family)
    expected = whole(runner, OTHER)
    driver = drive(runner)
    broken = driver.open(PROMPT)
    sound = driver.open(OTHER)
    driver.step([(broken, 20), (sound, 20)])
    driver.pool.poison([driver.slots[id(broken)][1]])
    rows = driver.step([(broken, 5), (sound, 25)])
    assert np.isnan(rows[0][:2]).all()
    np.testing.assert_array_equal(rows[1], expected[20:])


def test_a_backend_with_other_states_is_refused(runners):
    runner = runners("lfm2")
    spec = runner.info.kv_spec
    assert len(spec.states) == 3
    for states in (spec.states[:2], ()):
        backend = make_backend(
            choose_backend("cpu"),
            dataclasses.replace(spec, states=states),
            4,
            1,
            num_state_slots=3 * bool(states),
        )
        with pytest.raises(ConfigError, match="was created for other layers"):
            runner.bind(backend)
        backend.close()


def test_moved_keys_are_refused_with_the_reason(runners):
    runner = runners("lfm2")
    drive(runner)
    assert runner.moved_keys_refusal == RECURRENT
    config = build_tiny_model("lfm2").config.to_dict()
    assert moved_keys_refusal(EngineConfig(), config, "cpu") == RECURRENT
    assert "recurrent" in RECURRENT
