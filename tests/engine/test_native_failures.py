"""Requests on the native runner that fail, are cancelled or get NaN: they end alone and leave
nothing open.
"""

import pytest
from safetensors.numpy import load_file, save_file

from helpers.engine.native_bench import ALL_BITS, ROOT, Cold, Machine, NativeBench, assert_begins
from helpers.engine.native_kinds import machine_of, packages_for
from helpers.models.tiny_checkpoints import save_tiny_checkpoint
from helpers.random_ids import random_ids
from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.errors import KVBoostError

BAD = 255  # only in the prompt that must fail
GREEDY = SamplingParams(max_new_tokens=20, temperature=0.0, logprobs=2)
TEXT = random_ids(120, 5, 3, 250)


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    machine = machine_of("qwen3", "int8", tmp_path_factory.mktemp("plain"))
    yield machine
    machine.close()


@pytest.mark.parametrize("bits", ALL_BITS[1:], ids=str)
@pytest.mark.some(2)
def test_open_block_buffers_are_always_returned(machine, bits):
    """Finished, cancelled and preempted requests return their buffers, so two buffers always let
    two sequences run.
    """
    bench = NativeBench(machine, bits=bits, num_blocks=8, max_num_seqs=2, max_batch_tokens=24)
    for number in range(18):
        handles = [
            bench.submit(TEXT[20 * index : 33 + 21 * index + number % 8], GREEDY)
            for index in range(3)
        ]
        for _ in range(number % 9):
            bench.step()
        handles[number % 3].cancel()
        bench.run()
        assert all(handle.done for handle in handles)
        for handle in handles:
            handle.result(0)
    bench.assert_clean()


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory):
    """Llama in which only the token BAD has first-layer keys beyond float16, which are stored as
    infinity.
    """
    directory = save_tiny_checkpoint(
        "llama", tmp_path_factory.mktemp("overflow"), num_hidden_layers=2
    )
    path = directory / "model.safetensors"
    tensors = load_file(path)
    embed = tensors["model.embed_tokens.weight"]
    keys = tensors["model.layers.0.self_attn.k_proj.weight"]
    embed[:, 0] = 0.0
    keys[:, 0] = 1e6
    embed[BAD, 0] = 1.0
    save_file(tensors, path, metadata={"format": "pt"})
    machine = Machine(directory)
    yield machine
    machine.close()


@pytest.mark.parametrize("bits", ALL_BITS[:3], ids=str)
def test_non_finite_keys_end_only_their_request(overflowing, bits):
    """RELIABILITY 8: nothing of the request is published, and a request in the same batch stays
    equal to the bit.
    """
    prompt = [7, 8, 9, BAD, *range(40)]
    expected = Cold(overflowing, bits).answer(TEXT[:51], GREEDY)
    bench = NativeBench(overflowing, bits=bits, max_batch_tokens=128)
    bad = bench.submit(prompt, GREEDY)
    good = bench.submit(TEXT[:51], GREEDY)
    bench.run()
    with pytest.raises(KVBoostError, match="NaN or infinite logits"):
        bad.result(0)
    assert bench.manager.peek([*prompt, 1], ROOT) == 0
    assert_begins(good.result(0), expected, "in the batch of a request that failed")
    bench.assert_clean()


@pytest.mark.parametrize("bits", ALL_BITS[:2], ids=str)
@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.some(2)
def test_a_pass_that_fails_midway_leaves_no_open_blocks(machine, bits, at, monkeypatch):
    prompts = (TEXT[:50], TEXT[30:81], TEXT[40:108])
    cold = Cold(machine, bits)
    expected = [cold.answer(prompt, GREEDY) for prompt in prompts]
    bench = NativeBench(machine, bits=bits, max_num_seqs=2, max_batch_tokens=24)
    runner = bench.core._runner
    real = runner._run
    calls = []

    def fail(*args):
        real(*args)
        calls.append(len(calls))
        if len(calls) == 2 * at + 1:
            raise RuntimeError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_run", fail)
        handles = [bench.submit(prompt, GREEDY) for prompt in prompts[:2]]
        bench.run()
    assert any(isinstance(handle._error, RuntimeError) for handle in handles)
    for prompt, result in zip(prompts, expected, strict=True):
        assert_begins(bench.generate(prompt, GREEDY), result, f"{len(prompt)} tokens")
    bench.assert_clean()


@pytest.mark.parametrize(
    "kind", ["lfm2", "qwen3_5_text", "granitemoehybrid-experts", "nemotron_h-moe", "falcon_h1"]
)
def test_an_overflowing_state_ends_only_its_request(kind, tmp_path_factory):
    for package in packages_for(kind, "int8"):
        pytest.importorskip(package)
    machine = machine_of(kind, "int8", tmp_path_factory.mktemp("hybrid"))
    expected = [
        Cold(machine, (16, 16)).answer(prompt, GREEDY) for prompt in (TEXT[:40], TEXT[40:80])
    ]
    bench = NativeBench(machine)
    fine = bench.submit(TEXT[:40], GREEDY)
    bench.step()
    doomed = bench.submit(TEXT[40:80], GREEDY)
    bench.step()
    bench.step()
    assert bench.backend.states is not None
    assert bench.manager.states is not None
    (sequence,) = [one for one in bench.scheduler.running if one.index == doomed.index]
    bench.backend.states.poison([bench.manager.states._states[sequence.blocks._serial].slot])
    bench.run()
    with pytest.raises(KVBoostError, match="NaN or infinite logits"):
        doomed.result(0)
    assert_begins(fine.result(0), expected[0], "in the batch of a request that failed")
    assert_begins(bench.generate(TEXT[40:80], GREEDY), expected[1], "after a request that failed")
    machine.close()
