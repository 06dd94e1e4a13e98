"""What `doctor` says of the room that states of a model find."""

from helpers.models.tiny_models import save_tiny_model
from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.memory.check import plan_fit
from kvboost_edge.engine.memory.selection import select_path
from kvboost_edge.models.checkpoint import Checkpoint


def test_room_for_fewer_drafts_than_there_would_be_is_said_of_a_model_that_fits(
    tmp_path, monkeypatch, answered
):
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
        assert ("; room for 9 drafts of " in found["fit_reason"]) == (rows == 9)
        assert ("drafts" in found["fit_reason"]) == (rows == 9)
