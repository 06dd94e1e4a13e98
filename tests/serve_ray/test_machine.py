"""Identities of directories, by which the figures of replicas are summed."""

import subprocess
import sys

from kvboost_edge.serve_ray.machine import directory_id


def test_a_directory_has_one_identity_in_all_processes(tmp_path):
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    script = (
        "import sys; from kvboost_edge.serve_ray.machine import directory_id;"
        "print(*map(directory_id, sys.argv[1:]))"
    )
    paths = [str(tmp_path / name) for name in ("first", "second", "first/../first")]
    found = subprocess.run(
        [sys.executable, "-c", script, *paths], capture_output=True, text=True, check=True
    ).stdout.split()
    assert found == [directory_id(path) for path in paths]
    assert found[0] == found[2] != found[1]
    assert directory_id(tmp_path / "missing") == directory_id(tmp_path / "missing")
    assert directory_id(tmp_path / "missing") not in found
