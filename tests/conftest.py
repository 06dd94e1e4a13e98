"""Fixtures and hooks for all tests: an isolated cache directory, no network, a check for leftover
threads and processes, and tiny models.
"""

import faulthandler
import functools
import gc
import ipaddress
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import HealthCheck, settings

from helpers.clocks import REAL_CLOCK
from helpers.kernels.prebuilt import offer_library
from helpers.long_files import place_of
from helpers.tools import missing_tools

LONG = os.environ.get("KVBOOST_EDGE_TEST_LONG") == "1"
QUICK = os.environ.get("KVBOOST_EDGE_TEST_QUICK") == "1"
ONE_THREAD = os.environ.get("KVBOOST_EDGE_TEST_ONE_THREAD") == "1"

# No deadline, since the load of the machine changes the time of an example. Fixed seeds make
# failures reproducible.
settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("suite")

# Library threads that live as long as the process.
LIBRARY_THREADS = ("asyncio_", "tqdm", "ThreadPoolExecutor", "pydevd", "pytest")
RAY_SERVE_THREAD = "_run_router_event_loop"  # one per process; its name starts with a number

# The stacks of all threads are printed if no test ends within this time.
HANG_SECONDS = 600
REARM_SECONDS = 60


class HangTimer:
    """Timer that prints the stacks of all threads when a test hangs.

    Setting it starts a thread, which takes up to two milliseconds. It is therefore set at most once
    a minute, and not for each test as with pytest's `faulthandler_timeout`.
    """

    def __init__(self):
        self._set_at = -REARM_SECONDS

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        if time.monotonic() >= self._set_at + REARM_SECONDS:
            self._set_at = time.monotonic()
            file = item.config.stash[fault_handler_stderr_fd_key]
            faulthandler.dump_traceback_later(HANG_SECONDS, file=file)

    def pytest_sessionfinish(self):
        faulthandler.cancel_dump_traceback_later()


def pytest_configure(config):
    offer_library()
    if config.pluginmanager.has_plugin("faulthandler"):
        config.pluginmanager.register(HangTimer(), "hang-timer")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep the collected tests out of garbage collection: they are a million permanent objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def sampled(cases, step, first=0):
    """Return every step-th case, plus one case for each parameter value that these do not cover.

    Only values that occur in several cases are added, as in a product of parameters.
    """
    values = [{(name, repr(value)) for name, value in one.callspec.params.items()} for one in cases]
    counts = Counter(value for each in values for value in each)
    missing = {value for value, count in counts.items() if count > 1}
    kept = []
    for index in sorted(range(len(cases)), key=lambda index: index % step != first):
        if index % step == first or values[index] & missing:
            kept.append(cases[index])
            missing -= values[index]
    return kept


def _sample(items):
    """Add the mark `full` to the cases that a mark `some` leaves out."""
    cases = {}
    for item in items:
        if item.get_closest_marker("some") and not item.get_closest_marker("full"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for each in cases.values():
        kept = set(sampled(each, *each[0].get_closest_marker("some").args))
        for item in each:
            if item not in kept:
                item.add_marker(pytest.mark.full)


def pytest_collection_modifyitems(config, items):
    """Check that test names are unique, and choose and order the tests of this run.

    - The workers of `make test` run each name once, so a duplicate name is an error.
    - Workers start with the slow files, so that all workers end at about the same time.
    - `make test-quick` runs the first case of each test and skips slow tests.
    """
    _sample(items)
    names = Counter(item.nodeid for item in items if item.get_closest_marker("alone") is None)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise pytest.UsageError(
            f"more than one test has this name; mark them alone: {', '.join(twice)}"
        )
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: place_of(item.nodeid))
    if not QUICK:
        return
    first = {}
    for item in items:
        if not item.get_closest_marker("slow") and not item.get_closest_marker("full"):
            first.setdefault(item.nodeid.partition("[")[0], item)
    config.hook.pytest_deselected(items=[item for item in items if item not in set(first.values())])
    items[:] = first.values()


def pytest_ignore_collect(collection_path, config):
    """Ignore test_schemathesis.py if its tests would be deselected: collecting it generates all its
    examples.
    """
    leaves_out = "not alone" in config.option.markexpr
    return True if leaves_out and collection_path.name == "test_schemathesis.py" else None


@pytest.fixture(scope="session", autouse=True)
def isolated_cache(tmp_path_factory):
    """Empty temporary cache directories of the package and of the Hugging Face hub."""
    root = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVBOOST_EDGE_CACHE", str(root / "kvboost_edge"))
        patch.setenv("HF_HOME", str(root / "huggingface"))
        yield root


@pytest.fixture(scope="session", autouse=True)
def one_certificate(tmp_path_factory):
    """CA bundle with a single certificate, for the HTTP clients of all tests.

    Loading the full bundle takes 30 ms per client, and most test servers do not use TLS.
    """
    import certifi

    path = tmp_path_factory.mktemp("certificates") / "one.pem"
    end = "-----END CERTIFICATE-----\n"
    path.write_text(certifi.contents().partition(end)[0] + end, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(path))
        yield


@pytest.fixture(scope="session", autouse=True)
def files_may_be_lost_with_the_power():
    """`os.fsync` that only checks its file, since no test turns the machine off."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture(scope="session", autouse=True)
def short_bandwidth_measurement():
    """Bandwidth measurement of `doctor`, shortened from 192 MB for 0.3 s on all threads to 8 MB
    once.
    """
    from kvboost_edge.host import bandwidth

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bandwidth, "_BYTES", 8 << 20)
        patch.setattr(bandwidth.measure_read_bandwidth, "__defaults__", (0.0,))
        yield


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_arrives():
    """Default SIGINT handler, which tests need when they send that signal.

    A test run that was started in the background inherits an ignored SIGINT.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def one_torch_thread():
    """PyTorch with one thread. More threads slow down a tiny model, especially on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def one_thread_if_asked():
    """One visible CPU in the second run of `make test-all`, so that every default is one thread."""
    with pytest.MonkeyPatch.context() as patch:
        if ONE_THREAD:
            patch.setattr("kvboost_edge.host.processor._affinity", lambda: 1)
        yield


@functools.cache
def takes_all_threads(path):
    """Return whether the tests of a file may use the default number of threads.

    They may if `make test-all` runs them a second time with one thread.
    """
    room = path.relative_to(Path(__file__).parent).parts[0]
    return room not in ("kernels", "runners") or "from_pretrained" in path.read_text(
        encoding="utf-8"
    )


@pytest.fixture(autouse=True)
def threads_are_said(request, monkeypatch):
    """Error for a default number of threads in tests that run only once.

    These tests must set `num_threads`, so that a single run covers all thread counts.
    """

    def refuse():
        raise AssertionError(
            f"set num_threads: {request.path.name} is not run again with one thread"
        )

    if not takes_all_threads(request.path):
        for name in ("kvboost_edge.backends.cpu", "kvboost_edge.engine.build"):
            if name in sys.modules:
                monkeypatch.setattr(sys.modules[name], "default_num_threads", refuse)


@pytest.fixture(autouse=True)
def the_clock_is_real(monkeypatch):
    """Check that the test left the clock of the process unchanged. With a moved clock, servers
    would never stop.
    """
    yield
    assert time.monotonic is REAL_CLOCK, (
        "the test replaced the clock of the process: use clocks.give_clock"
    )


class NetworkBlocked(OSError):
    """Error raised when a test tries to reach another machine."""


@pytest.fixture(autouse=True)
def no_network(request, monkeypatch):
    """Block connections to other machines, and fail the test even if the tested code ignores the
    error.
    """
    attempts = []

    def guard(real):
        def connect(sock, address):
            if sock.family in (socket.AF_INET, socket.AF_INET6) and not _is_loopback(address[0]):
                attempts.append(str(address))
                raise NetworkBlocked(f"tests may not connect to {address}")
            return real(sock, address)

        return connect

    real_lookup = socket.getaddrinfo

    def lookup(host, *args, **kwargs):
        if host is not None and not _is_loopback(host):
            attempts.append(str(host))
            raise NetworkBlocked(f"tests may not look up {host!r}")
        return real_lookup(host, *args, **kwargs)

    monkeypatch.setattr(socket.socket, "connect", guard(socket.socket.connect))
    monkeypatch.setattr(socket.socket, "connect_ex", guard(socket.socket.connect_ex))
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    yield
    if request.node.get_closest_marker("names_hub_model") is None:
        assert not attempts, (
            f"only tests that name a hub model may use the network; tried {attempts}"
        )


def _is_loopback(host):
    text = host.decode() if isinstance(host, bytes) else str(host)
    if text in ("", "localhost"):
        return True
    try:
        return ipaddress.ip_address(text).is_loopback
    except ValueError:
        return False


@pytest.fixture(scope="session", autouse=True)
def nothing_left_running(isolated_cache):
    """Check after the last test that no thread and no child process is still running."""
    before = set(threading.enumerate())
    yield
    gc.collect()
    left = [
        t
        for t in threading.enumerate()
        if t not in before and not t.name.startswith(LIBRARY_THREADS)
    ]
    left = [thread for thread in left if RAY_SERVE_THREAD not in thread.name]
    for thread in left:
        thread.join(timeout=5)  # an engine that was just collected may still be stopping
    alive = [thread.name for thread in left if thread.is_alive()]
    assert not alive, f"threads left running: {alive}"
    children = [
        child
        for child in psutil.Process().children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE
    ]
    assert not children, f"processes left running: {children}"


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory):
    """Complete directory of a tiny random Llama with a byte-level tokenizer. Tests must not write
    into it.
    """
    from helpers.models.tiny_models import save_tiny_model

    return save_tiny_model("llama", tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture
def tiny_engine(tiny_model_dir):
    """Engine of the tiny Llama with 64 blocks of 16 tokens and debug checks."""
    from kvboost_edge import CPUPagedEngine

    options = {
        "num_blocks": 64,
        "backend": "cpu",
        "dtype": "float32",
        "debug_checks": True,
        "reuse_gate": "off",
    }
    with CPUPagedEngine.from_pretrained(str(tiny_model_dir), **options) as engine:
        yield engine


@pytest.fixture(scope="session")
def scale():
    """Function `scale(short, long)`, which returns `short` in `make test` and `long` in `make
    test-all`.
    """
    return lambda short, long: long if LONG else short


def pytest_terminal_summary(terminalreporter, config):
    if "not alone" in config.option.markexpr:
        return  # a later pytest call reports them
    for tool in missing_tools():
        terminalreporter.write_line(tool.report())
