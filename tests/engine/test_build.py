"""Checks before a model is loaded: the memory of the packed weights, and the packages that loading
needs.
"""

import importlib.util

import pytest

from helpers.models.awq_gptq_files import quantize_dir
from helpers.models.tiny_checkpoints import save_tiny_checkpoint
from kvboost_edge import CPUPagedEngine
from kvboost_edge.engine import build
from kvboost_edge.errors import BackendUnavailable, CapacityError
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.config.spec import describe_model
from kvboost_edge.models.packed.pack_plan import pack_plan
from kvboost_edge.models.packed.weight_file import load_packed

WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}


@pytest.mark.parametrize("weights", ["int4", "int4-asym", "int8", "bf16", "f32"])
def test_planned_weight_bytes_equal_packed_ones(weights, tmp_path, monkeypatch):
    """The vocabulary is large for the number of layers. With 4 bits, embedding and head stay at 8
    bits and are counted so.
    """
    directory = save_tiny_checkpoint("llama", tmp_path, vocab_size=8000, **WIDE)
    checkpoint = Checkpoint.open(directory)
    plan = pack_plan(describe_model(checkpoint.config), weights)
    packed = load_packed(checkpoint, plan, weights=weights, cache_dir=tmp_path / "cache")
    needed = checkpoint.packed_bytes(weights)
    assert (
        0 <= packed.nbytes - needed < 0.01 * needed + 10_000
    )  # the header, and sections at multiples of 64
    packed.close()
    monkeypatch.setattr(build, "available_on", lambda device: needed - 1)
    with pytest.raises(CapacityError, match="the weights take"):
        CPUPagedEngine.from_pretrained(directory, weights=weights, num_blocks=8)


def test_more_threads_than_cpus_cause_a_warning(tiny_model_dir, monkeypatch, caplog):
    monkeypatch.setattr(build, "default_num_threads", lambda: 2)
    for num_threads, warned in ((None, 0), (2, 0), (3, 1)):
        caplog.clear()
        options = {"num_blocks": 8, "num_threads": num_threads}
        CPUPagedEngine.from_pretrained(tiny_model_dir, **options).close()
        said = [text for text in caplog.messages if text.startswith(f"num_threads={num_threads} ")]
        assert len(said) == warned
        assert all("more than the 2 CPUs" in text for text in said)


@pytest.mark.parametrize(
    ("method", "missing"), [("awq", "gptqmodel"), ("gptq", "optimum"), ("gptq", "gptqmodel")]
)
def test_a_missing_package_of_the_torch_runner_is_named(method, missing, tmp_path, monkeypatch):
    save_tiny_checkpoint("llama", tmp_path, **WIDE)
    quantize_dir(tmp_path, method, group=128, symmetric=True)
    found = importlib.util.find_spec

    def find(name, *rest):
        return (
            None
            if name == missing
            else object()
            if name in ("gptqmodel", "optimum")
            else found(name, *rest)
        )

    monkeypatch.setattr(importlib.util, "find_spec", find)
    with pytest.raises(
        BackendUnavailable,
        match=f"needs {missing}, which is not installed; it reads {method} weights",
    ):
        CPUPagedEngine.from_pretrained(tmp_path, runner="torch", num_blocks=8)


def test_a_part_that_cannot_be_closed_leaves_no_other_part_open(caplog):
    class Part:
        is_open = True

        def close(self):
            self.is_open = False

    class Broken:
        def close(self):
            raise RuntimeError("a thread does not end")

    part = Part()
    with (
        pytest.raises(CapacityError, match="too large"),
        build._closed_on_error(Broken(), None, part),
    ):
        raise CapacityError("the model is too large")
    assert not part.is_open
    assert "Broken cannot be closed: RuntimeError('a thread does not end')" in caplog.text
