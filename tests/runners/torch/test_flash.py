"""Flash attention patched into a user's transformers model: the same logits as eager attention, and
correct counts.

The kernels run over fibers (the project's) or on the CPU (torch's), while the tests pretend that
the model's device supports them.
"""

import itertools

import pytest
import torch

import kvboost_edge
from helpers.cuda.standin import StandIn, needs_kernels, standing_in
from helpers.models.tiny_models import build_tiny_model
from kvboost_edge.backends import cuda
from kvboost_edge.errors import ModelFormatError, RequestError
from kvboost_edge.runners.torch import flash

pytestmark = [needs_kernels, pytest.mark.usefixtures("one_torch_thread")]

# Plain attention, GQA and sinks with windows, softcap with windows, and windows alone.
FAMILIES = ("llama", "gpt_oss", "gemma2", "gemma3")
OFF = {"kvboost_cuda": 3e-2, "torch_flash": 1e-4}


@pytest.fixture(params=["kvboost_cuda", "torch_flash"])
def tier(request, monkeypatch):
    """A tier of kernels that every device is made to support."""
    name = request.param
    monkeypatch.setattr(flash, "find_tier", lambda device: name)
    with standing_in() as (kernels, _):
        monkeypatch.setattr(cuda, "extension", lambda: kernels)
        yield name


def tiny(family, tier):
    """Build a model, in float16 for the project's kernels, which do not compute in float32."""
    model = build_tiny_model(family).eval()
    return model.half() if tier == "kvboost_cuda" else model


def draw(*shape):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0))


def distance(got, wanted):
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def passes(model):
    """Return the logits of a prompt in one pass, of the same in three passes (fewer queries than
    keys), and of a padded batch.
    """
    ids = draw(2, 40)
    with torch.inference_mode():
        logits = [model(ids).logits]
        past = None
        parts = []
        for start, stop in ((0, 17), (17, 39), (39, 40)):
            output = model(ids[:, start:stop], past_key_values=past, use_cache=True)
            past = output.past_key_values
            parts.append(output.logits)
        logits.append(torch.cat(parts, dim=1))
        mask = torch.ones(2, 40, dtype=torch.int64)
        mask[1, :9] = 0
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        padded = model(ids, attention_mask=mask, position_ids=positions).logits
    return [*logits, padded[0], padded[1, 9:]]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.some(2)
def test_logits_equal_eager_attention(family, tier):
    model = tiny(family, tier)
    model.set_attn_implementation("eager")
    wanted = passes(model)
    assert flash.install(model) == model.config.num_hidden_layers
    got = passes(model)
    assert flash.uninstall(model) == model.config.num_hidden_layers
    for mine, eager in zip(got, wanted, strict=True):
        assert distance(mine, eager) < OFF[tier]
    for again, eager in zip(passes(model), wanted, strict=True):
        assert torch.equal(again, eager)


def test_the_kernels_run_for_causal_masks_only(monkeypatch):
    monkeypatch.setattr(flash, "find_tier", lambda device: "kvboost_cuda")
    model = tiny("llama", "kvboost_cuda")
    layers = model.config.num_hidden_layers
    with standing_in() as (kernels, standin):
        assert isinstance(standin, StandIn)
        monkeypatch.setattr(cuda, "extension", lambda: kernels)
        flash.install(model)
        counts = [standin.launches]
        mask = torch.ones(2, 8, dtype=torch.int64)
        for given in (mask, mask.clone().index_fill_(1, torch.tensor([0]), 0)):
            with torch.inference_mode():
                model(draw(2, 8), attention_mask=given)
            counts.append(standin.launches)
        model(draw(2, 8))  # requires a gradient, and there is no backward pass
        counts.append(standin.launches)
        flash.uninstall(model)
    assert [after - before for before, after in itertools.pairwise(counts)] == [layers, 0, 0]


def test_gradients_equal_torchs(tier):
    model = tiny("llama", tier).float()
    grads = []
    for installed in (False, True):
        if installed:
            flash.install(model)
        model.zero_grad()
        model(draw(1, 12)).logits.square().mean().backward()
        grads.append(model.model.layers[0].self_attn.q_proj.weight.grad.clone())
    flash.uninstall(model)
    assert distance(grads[1], grads[0]) < 1e-4


def test_install_returns_the_number_of_changed_layers(tier):
    model = tiny("llama", tier)
    other = tiny("llama", tier)
    before = model.config._attn_implementation
    assert flash.uninstall(model) == 0
    assert flash.install(model) == model.config.num_hidden_layers
    assert model.config._attn_implementation != before
    assert flash.install(model) == 0
    assert flash.uninstall(other) == 0
    assert flash.uninstall(model) == model.config.num_hidden_layers
    assert flash.uninstall(model) == 0
    assert model.config._attn_implementation == before


def test_a_model_that_fails_is_restored(tier, monkeypatch):
    model = tiny("llama", tier)
    before = model.config._attn_implementation

    def fail(*args, **kwargs):
        raise ValueError("no such input")

    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", fail)
        with pytest.raises(ModelFormatError, match="no such input"):
            flash.install(model)
    assert model.config._attn_implementation == before
    assert flash.install(model) > 0
    flash.uninstall(model)


# the public names


def test_on_a_cpu_nothing_is_installed():
    model = build_tiny_model("llama")
    before = model.config._attn_implementation
    assert kvboost_edge.install_flash_attention(model) == 0
    assert model.config._attn_implementation == before
    assert kvboost_edge.uninstall_flash_attention(model) == 0


def test_the_public_functions_install_and_uninstall(tier):
    model = tiny("llama", tier)
    assert kvboost_edge.install_flash_attention(model) == model.config.num_hidden_layers
    assert kvboost_edge.uninstall_flash_attention(model) == model.config.num_hidden_layers


def test_other_objects_are_refused():
    for function in (kvboost_edge.install_flash_attention, kvboost_edge.uninstall_flash_attention):
        with pytest.raises(RequestError, match="Linear is not a transformers model"):
            function(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("has_cuda", "problem", "capability", "expected"),
    [
        (False, None, (9, 0), "vanilla"),
        (True, None, (7, 5), "kvboost_cuda"),
        (True, "kvboost_edge_cuda is not installed", (8, 0), "torch_flash"),
        (True, "kvboost_edge_cuda is not installed", (7, 5), "vanilla"),
    ],
)
def test_the_tier_follows_from_the_device(has_cuda, problem, capability, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(cuda, "unsupported_reason", lambda device: problem)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    assert kvboost_edge.get_flash_attn_tier() == expected
    assert kvboost_edge.flash_attention_available() == (expected != "vanilla")
    assert cuda.find_tier("cpu") == "vanilla"
