"""A forked child has the engine's memory but not its thread: every call raises an error, and none
waits.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, signal, sys, time, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python itself warns of fork beside threads
from kvboost_edge import CPUPagedEngine
from kvboost_edge.errors import KVBoostError

engine = CPUPagedEngine.from_pretrained({path!r}, num_blocks=64, num_threads=2)
engine.generate([7, 8, 9], max_new_tokens=2)
busy = {busy}
handle = engine.submit("Hello", max_new_tokens=400, ignore_eos=True)
if busy:
    next(iter(handle))
else:
    handle.result()
core = engine._core
core.lock.acquire() if busy else None  # as if the engine's thread held it at this moment
child = os.fork()
if child == 0:
    signal.alarm(20)
    told = 0
    calls = [
        lambda: engine.generate([7, 8, 9], max_new_tokens=2), lambda: engine.submit([7, 8, 9]),
        lambda: list(engine.stream("Hello")), lambda: engine.logits([1, 2, 3]), lambda: engine.warm("Hello"),
        lambda: engine.warm_result([1, 2]), engine.paged_stats, engine.cache_stats, engine.reset_cache,
        engine.block_map, engine.block_details, lambda: engine.check("Hello"),
    ]
    if busy:
        calls += [handle.result, lambda: list(handle)]
    for number, call in enumerate(calls):
        try:
            call()
        except KVBoostError as error:
            assert "fork" in str(error) and "spawn" in str(error), (number, error)
            told += 1
    assert told == len(calls), told
    assert not engine.is_alive() and isinstance(engine.failure(), KVBoostError)
    handle.cancel()
    engine.close()
    engine.close()
    sys.exit(7)  # with all that runs at exit
core.lock.release() if busy else None
deadline = time.monotonic() + 30
while True:
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
        break
    assert time.monotonic() < deadline, "the child hangs"
    time.sleep(0.05)
assert os.waitstatus_to_exitcode(status) == 7, os.waitstatus_to_exitcode(status)
handle.cancel()
print(engine.generate([7, 8, 9], max_new_tokens=2).generated_tokens, engine.is_alive())
engine.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")
@pytest.mark.parametrize("busy", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_forked_child_gets_an_error_and_the_parent_continues(tiny_model_dir, busy):
    code = SCRIPT.format(path=str(tiny_model_dir), busy=busy)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "2 True\n", "")
