"""The limit on open files."""

import os
import subprocess
import sys

import pytest

from kvboost_edge.host.open_files import num_open_files

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no such limit")

ASK = """
import resource
from kvboost_edge.host.open_files import allow_open_files
print(allow_open_files(WANTED), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "told"),
    [
        (100, 300, 200, "200 200 300"),
        (100, 300, 300, "300 300 300"),
        (100, 300, 400, "300 300 300"),
        (200, 300, 100, "100 200 300"),
        (100, 100, 400, "100 100 100"),
    ],
)
def test_the_descriptor_limit_is_raised_as_needed(soft, hard, wanted, told):
    """The limit is never lowered. The result gives the usable number, the soft limit and the hard
    limit.
    """
    limited = f'ulimit -Sn {soft} && ulimit -Hn {hard} && exec "$0" -c "$1"'
    code = ASK.replace("WANTED", str(wanted))
    done = subprocess.run(
        ["sh", "-c", limited, sys.executable, code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == told


def test_descriptors_are_counted():
    before = num_open_files()
    ends = os.pipe()
    try:
        assert num_open_files() == before + 2
    finally:
        for end in ends:
            os.close(end)
