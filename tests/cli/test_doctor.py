"""Tests of `doctor`'s report on memory: recurrent states and the bound of the process."""

import re
import subprocess
import sys

import pytest

from helpers.models.mtp_heads import save_with_head
from helpers.models.tiny_models import save_tiny_model
from kvboost_edge.cli import doctor
from kvboost_edge.cli.doctor import _speed_up
from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.memory.check import plan_fit
from kvboost_edge.engine.memory.selection import select_path
from kvboost_edge.engine.spec_decode.pass_costs import PassCosts
from kvboost_edge.models.checkpoint import Checkpoint


def test_doctor_reports_a_reduced_number_of_drafts(tmp_path, monkeypatch, answered):
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path / "cache"))
    path = save_tiny_model("lfm2", tmp_path / "model")
    checkpoint = Checkpoint.open(path)
    config = EngineConfig.from_options(num_blocks=64)
    spec = plan_fit(
        checkpoint, config, select_path(checkpoint, config), checkpoint.summary(), 10**9
    ).info.kv_spec
    for rows in (9, 31):
        room = 4 * spec.bytes_per_state + rows * spec.bytes_per_draft
        options = {"weights": "int8", "num_blocks": 64, "max_num_seqs": 3, "max_state_bytes": room}
        named = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        found = answered("doctor", path, *named)[f"Model {path}"]
        assert (found["fits"], found["state_bytes"]) == (True, room)
        assert ("; room for 9 draft tokens of " in found["fit_reason"]) == (rows == 9)
        assert ("draft tokens" in found["fit_reason"]) == (rows == 9)


@pytest.mark.full
def test_doctors_smallest_bound_equals_the_engines():
    """Each command measures its own process. The bounds differ by at most 16 MB."""
    argv = ("-o", "max_memory=1MB", "-o", "max_model_len=256")
    least = []
    for command in (["doctor", "--json"], ["generate", "Hi"]):
        done = subprocess.run(
            [sys.executable, "-m", "kvboost_edge", *command, *argv],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 1
        said = done.stdout + done.stderr
        least.append(int(re.search(r"give at least (\d+)MB", said)[1]))
        assert ("`serve` takes about 32.00 MB more" in said) == (command[0] == "doctor")
    assert abs(least[0] - least[1]) <= 16


def test_the_estimated_speed_with_a_draft_model():
    passes = PassCosts()
    relative = [passes.seconds(rows, 0.0) / passes.seconds(1, 0.0) for rows in range(1, 10)]
    free = [rows / cost for rows, cost in enumerate(relative, 1)]
    assert _speed_up(0.0, 1.0) == pytest.approx(max(free))
    assert _speed_up(0.0, 0.0) == _speed_up(1.0, 0.6) == 1.0
    two, three = (1.6 / (relative[1] + 0.4), 1.96 / (relative[2] + 0.8))
    assert _speed_up(0.4, 0.6) >= max(two, three)
    for accepted in (0.6, 0.75, 0.9):
        speeds = [_speed_up(ratio, accepted) for ratio in (0.1, 0.2, 0.4, 0.8)]
        assert speeds == sorted(speeds)[::-1]
    assert _speed_up(0.4, 0.9) > _speed_up(0.4, 0.75) > _speed_up(0.4, 0.6) > 1


def test_a_draft_model_is_added_to_the_memory_or_refused(tmp_path, monkeypatch, answered):
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path / "cache"))
    target = save_tiny_model("llama", tmp_path / "target")
    draft = save_tiny_model("llama", tmp_path / "draft", num_hidden_layers=1)
    argv = ["doctor", target, "-o", "num_blocks=64", "--draft-model"]
    found = answered(*argv, draft)[f"Model {target}"]
    parts = ("weight_bytes", "pool_bytes", "draft_weight_bytes", "draft_pool_bytes")
    sizes = [found[name] for name in parts]
    assert min(sizes) > 0
    assert (found["fits"], found["needed_bytes"]) == (True, sum(sizes))
    assert found["fit_reason"].split(",")[2].endswith(" of both models")
    assert found["draft_pool_bytes"] == 64 * 16 * found["draft_kv_bytes_per_token"]
    assert re.fullmatch(
        r"about 1\.\d\d times at 60%, 1\.\d\d times at 75%, .* \(one request, not measured\)",
        found["draft_speed"],
    )
    assert found["draft_vocabulary"] == 300
    short = answered(*argv, draft, "-o", "draft_vocabulary=32")[f"Model {target}"]
    assert short["draft_vocabulary"] == 32
    fastest = [float(one["draft_speed"].split()[1]) for one in (found, short)]
    assert fastest == sorted(fastest)
    hybrid = save_tiny_model("lfm2", tmp_path / "hybrid")
    found = answered(*argv, hybrid, code=1)[f"Model {target}"]
    assert (found["fits"], found["runner"]) == (False, "native")
    assert "have a recurrent state" in found["fit_reason"]
    assert not (tmp_path / "cache" / "packed").exists()


def test_a_head_that_does_not_fit_is_reported_and_left_out(tmp_path, monkeypatch, answered):
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path / "cache"))
    path = save_with_head("glm4_moe", tmp_path / "model")
    argv = ("doctor", path, "-o", "num_blocks=40")
    with_head = answered(*argv)[f"Model {path}"]
    alone = answered(*argv, "-o", "mtp=off")[f"Model {path}"]
    assert with_head["needed_bytes"] > alone["needed_bytes"]
    assert "not used" not in with_head["fit_reason"]
    monkeypatch.setattr(doctor, "available_on", lambda device: alone["needed_bytes"])
    found = answered(*argv)[f"Model {path}"]
    assert found["fits"]
    assert found["needed_bytes"] == alone["needed_bytes"]
    assert "; the multi-token prediction head is not used, because " in found["fit_reason"]
    assert "draft_weight_bytes" not in found
