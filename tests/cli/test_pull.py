"""Tests of `kvboost-edge pull`, `rm` and `ps`: a pulled model runs by its name, and is gone after
removal.
"""

import pytest

from helpers.gguf.writer import write_gguf
from helpers.models.fake_hub import fake_hub

REPO = "someone/Tiny-GGUF"


@pytest.fixture
def hub(tmp_path, tiny_model_dir, monkeypatch):
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path / "own"))
    path = write_gguf(tiny_model_dir, tmp_path / "Tiny-Q8_0.gguf", kind="Q8_0")
    files = {"Tiny-Q8_0.gguf": (path or tmp_path / "Tiny-Q8_0.gguf").read_bytes()}
    with fake_hub(REPO, files, tmp_path / "hub", monkeypatch) as found:
        yield found


def test_a_pulled_model_is_listed_and_removed(hub, answered, printed, refused):
    name = f"{REPO}:Q8_0"
    assert answered("pull", name) == {"name": name, "bytes": len(hub.files["Tiny-Q8_0.gguf"])}
    assert name in [row["name"] for row in answered("models") if row["runs"] == "native"]
    assert answered("inspect", name)["format"].startswith("GGUF")
    assert f"kvboost-edge chat -m {name}" in printed("pull", name).out
    assert printed("rm", name).out == f"Removed {name}.\n"
    assert name not in [row["name"] for row in answered("models")]
    assert "was not pulled or created here" in refused("rm", name)


@pytest.mark.parametrize(
    ("argv", "problem", "code"),
    [
        (["pull", "../x"], "is invalid", 2),
        (["pull", "llama9"], "is not in a registry", 2),
        (["pull", "models.example.org/a/b"], "is not configured", 2),
        (["pull", f"{REPO}:Q8_0", "--max-bytes", "10"], "over the limit of 10", 1),
        (["rm", "/etc/passwd"], "is invalid", 2),
    ],
)
def test_invalid_pulls_are_refused(hub, argv, problem, code, refused):
    assert problem in refused(*argv, code=code)
    assert not hub.downloads()
