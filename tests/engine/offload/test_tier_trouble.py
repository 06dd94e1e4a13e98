"""A running engine over a real disk tier, and faults caused by its operator: answers stay right,
and nothing hangs.
"""

import contextlib
import os
import shutil
import threading
import types

import numpy as np
import pytest

from helpers.engine.fake_runner import assert_clean, expected_tokens, fake_engine, runner_of
from helpers.server.live_servers import wait_until
from kvboost_edge.errors import KVBoostError
from kvboost_edge.tiers.disk.tier import DiskTier

SPACE = bytes(32)
SECONDS = 30  # nothing here takes as long


def prompt(number, length=100):
    return [(7 * number + 3 * place) % 250 for place in range(length)]


@contextlib.contextmanager
def opened(directory, num_blocks=64, *, max_bytes=16 << 20, **options):
    tier = DiskTier.open(directory, SPACE, max_bytes=max_bytes)
    with fake_engine(num_blocks, tiers=[tier], **options) as engine:
        yield engine


def ask(engine, token_ids, count=4):
    """Check the answer to a prompt and return the sources of its cached tokens."""
    handle = engine.submit(token_ids, max_new_tokens=count, temperature=0.0, ignore_eos=True)
    result = handle.result(SECONDS)
    assert list(result.output_token_ids) == expected_tokens(token_ids, count)
    return dict(result.hit_tokens)


def fill(directory, *prompts):
    """Store the blocks of these prompts on disk."""
    with opened(directory) as engine:
        for token_ids in prompts:
            ask(engine, token_ids)


def no_memory(*args, **options):
    raise MemoryError("there is none")


def test_blocks_are_not_stored_if_copying_fails(tmp_path, monkeypatch, caplog):
    with opened(tmp_path) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine._parts.backend, "read_blocks", no_memory)
            ask(engine, prompt(1))
            ask(engine, prompt(2))
        assert engine.failure() is None
        ask(engine, prompt(3))
        assert engine.paged_stats()["lost_blocks"] == 12
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    with opened(tmp_path) as engine:
        assert [ask(engine, prompt(number)).get("disk", 0) for number in (1, 2, 3)] == [0, 0, 96]


def test_the_prompt_is_computed_if_staging_memory_is_refused(tmp_path, monkeypatch, caplog):
    fill(tmp_path, prompt(1))

    def empty(shape, dtype):
        return no_memory() if shape[0] else np.empty(shape, dtype)

    with opened(tmp_path) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(
                "kvboost_edge.tiers.io_thread.np",
                types.SimpleNamespace(empty=empty, uint8=np.uint8),
            )
            assert ask(engine, prompt(1)) == {"pool": 0}
        assert engine.paged_stats()["staging_bytes"] == 0
        engine.reset_cache()
        assert ask(engine, prompt(1)) == {"pool": 0, "disk": 96}
    assert {record.levelname for record in caplog.records} == {"WARNING"}


@pytest.mark.parametrize("call", ["read", "write"])
def test_a_tier_is_used_again_after_a_memory_error(call, tmp_path, monkeypatch, caplog):
    fill(tmp_path, prompt(1))
    with opened(tmp_path) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(DiskTier, call, no_memory)
            ask(engine, prompt(1))
            ask(engine, prompt(2))
            wait_until(
                lambda: caplog.records, "the tier to be refused"
            )  # blocks are written after the answer
        ask(engine, prompt(3))
        engine.reset_cache()
        assert ask(engine, prompt(1)) == {"pool": 0, "disk": 96}
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    with opened(tmp_path) as engine:
        assert ask(engine, prompt(3)) == {"pool": 0, "disk": 96}


def test_blocks_are_computed_if_writing_the_pool_fails(tmp_path, monkeypatch, caplog):
    fill(tmp_path, prompt(1))
    with opened(tmp_path) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine._parts.backend, "write_blocks", no_memory)
            assert ask(engine, prompt(1)) == {"pool": 0}
        assert_clean(engine)
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_a_failed_request_stores_nothing(tmp_path):
    with opened(tmp_path) as engine:
        runner_of(engine).nan_for = {251}
        for _ in range(2):
            with pytest.raises(KVBoostError, match="NaN"):
                engine.generate([*prompt(1, 60), 251], max_new_tokens=2)
    with opened(tmp_path) as engine:
        assert engine.paged_stats()["tiers"]["disk"]["blocks"] == 0


def test_two_engines_on_one_directory_share_it(tmp_path):
    with opened(tmp_path) as one, opened(tmp_path) as other:
        callers = [
            threading.Thread(target=lambda e=engine: [ask(e, prompt(i % 5)) for i in range(20)])
            for engine in (one, other)
        ]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        one.close()
        ask(other, prompt(9))
        assert_clean(other)
    with opened(tmp_path) as engine:
        assert ask(engine, prompt(9)) == {"pool": 0, "disk": 96}


@pytest.mark.skipif(os.name != "posix", reason="elsewhere an open file cannot be deleted")
def test_a_deleted_directory_is_logged_once_and_recreated(tmp_path, caplog):
    with opened(tmp_path / "disk") as engine:
        ask(engine, prompt(1))
        wait_until(
            lambda: engine.paged_stats()["tiers"]["disk"]["blocks"] == 6, "the prompt to be on disk"
        )
        shutil.rmtree(tmp_path / "disk")
        engine.reset_cache()
        for number in range(8):
            ask(engine, prompt(number))
        assert_clean(engine)
        wait_until(
            lambda: engine.paged_stats()["tiers"]["disk"]["blocks"] >= 42,
            "the prompts to be on disk",
        )
        assert engine.paged_stats()["tiers"]["disk"]["state"] == ""
    assert sum("starts empty" in record.getMessage() for record in caplog.records) == 1
    assert {record.levelname for record in caplog.records} == {
        "WARNING"
    }  # perhaps of a segment that was being written
    with opened(tmp_path / "disk") as engine:
        assert [ask(engine, prompt(number)).get("disk", 0) for number in range(2, 8)] == [96] * 6


@pytest.mark.parametrize("num_blocks", [8, 10, 13])
def test_alternating_prompts_in_a_small_pool_hit_the_tier(tmp_path, num_blocks):
    hits = 0
    with opened(tmp_path, num_blocks) as engine:
        for number in range(40):
            hits += ask(engine, prompt(number % 6, 110)).get("disk", 0)
        assert engine.paged_stats()["lost_blocks"] == 0
        assert_clean(engine)
    assert hits > 2000


def test_cancels_and_resets_during_loads(tmp_path):
    prompts = [prompt(number, 150) for number in range(6)]
    fill(tmp_path, *prompts)
    with opened(tmp_path, 32) as engine:
        for _ in range(40):
            engine.reset_cache()
            handles = [engine.submit(token_ids, max_new_tokens=3) for token_ids in prompts]
            engine.reset_cache()
            for handle in handles[::2]:
                handle.cancel()
            for handle, token_ids in list(zip(handles, prompts, strict=True))[1::2]:
                assert list(handle.result(SECONDS).output_token_ids) == expected_tokens(
                    token_ids, 3
                )
            for handle in handles:
                handle.result(SECONDS)
        assert_clean(engine)
        assert len(engine._scheduler.loads) == 0


def test_closing_during_loads(tmp_path):
    prompts = [prompt(number, 150) for number in range(6)]
    fill(tmp_path, *prompts)
    for _ in range(10):
        with opened(tmp_path) as engine:
            handles = [engine.submit(token_ids, max_new_tokens=3) for token_ids in prompts]
            engine.close()
            for handle in handles:
                with contextlib.suppress(KVBoostError):
                    handle.result(SECONDS)
    with opened(tmp_path) as engine:
        assert ask(engine, prompts[0]) == {"pool": 0, "disk": 144}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_use_the_tier(tmp_path):
    with opened(tmp_path) as engine:
        ask(engine, prompt(1))
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                with contextlib.suppress(KVBoostError):
                    engine.generate([1], max_new_tokens=1)
                    os._exit(2)
                engine.close()
                with contextlib.closing(DiskTier.open(tmp_path, SPACE)) as tier:
                    code = 3 if tier.stat().writable else 0  # its parent owns the directory
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        ask(engine, prompt(2))
    with opened(tmp_path) as engine:
        assert ask(engine, prompt(2)) == {"pool": 0, "disk": 96}
