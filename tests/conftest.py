"""Shared by all tests: an isolated cache directory, no network, nothing left running, and tiny
models.
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
from helpers.long_files import place_of
from helpers.tools import missing_tools

LONG = os.environ.get("KVBOOST_EDGE_TEST_LONG") == "1"
QUICK = os.environ.get("KVBOOST_EDGE_TEST_QUICK") == "1"
ONE_THREAD = os.environ.get("KVBOOST_EDGE_TEST_ONE_THREAD") == "1"

# Times of single examples vary with what else the machine does; seeds are fixed so that a failure
# repeats.
settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("suite")

# Threads of libraries that live as long as the process.
LIBRARY_THREADS = ("asyncio_", "tqdm", "ThreadPoolExecutor", "pydevd", "pytest")
RAY_SERVE_THREAD = "_run_router_event_loop"  # one for the process, with a number before it

# After this time without the end of a test, the stacks of all threads are printed.
HANG_SECONDS = 600
REARM_SECONDS = 60


class HangTimer:
    """The timer that prints the stacks. It starts a thread, which takes up to two milliseconds, so
    it is set again once a minute and not, as by pytest's `faulthandler_timeout`, for each test.
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
    if config.pluginmanager.has_plugin("faulthandler"):
        config.pluginmanager.register(HangTimer(), "hang-timer")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Let the garbage collector never visit what is collected: a million objects that stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def sampled(cases, step, first=0):
    """Return every step-th case and, of a product, for each value that those lack one more case."""
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
    """Mark `full` what a mark `some` leaves out."""
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
    """Workers of `make test` run one test of a name, so there may be no two. They begin with the
    files that take long, so that all end at the same time. `make test-quick`: of each test the
    first case, of the slow ones none.
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
    """Leave out test_schemathesis.py where its tests would be deselected: to collect it makes all
    its examples.
    """
    leaves_out = "not alone" in config.option.markexpr
    return True if leaves_out and collection_path.name == "test_schemathesis.py" else None


@pytest.fixture(scope="session", autouse=True)
def isolated_cache(tmp_path_factory):
    """The package's cache directory and the hub's, both empty and thrown away afterwards."""
    root = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVBOOST_EDGE_CACHE", str(root / "kvboost_edge"))
        patch.setenv("HF_HOME", str(root / "huggingface"))
        yield root


@pytest.fixture(scope="session", autouse=True)
def one_certificate(tmp_path_factory):
    """Clients trust one authority. To load all takes 30 ms for each client of a server, most of
    which have no TLS.
    """
    import certifi

    path = tmp_path_factory.mktemp("certificates") / "one.pem"
    end = "-----END CERTIFICATE-----\n"
    path.write_text(certifi.contents().partition(end)[0] + end, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(path))
        yield


@pytest.fixture(scope="session", autouse=True)
def short_bandwidth_measurement():
    """`doctor` reads 8 MB once, not 192 MB for 0.3 s on all threads."""
    from kvboost_edge.host import bandwidth

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bandwidth, "_BYTES", 8 << 20)
        patch.setattr(bandwidth.measure_read_bandwidth, "__defaults__", (0.0,))
        yield


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_arrives():
    """A suite started in the background inherits an ignored SIGINT; tests send that signal and need
    it heard.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def one_torch_thread():
    """Threads only slow down work as small as a tiny model's, most of all when the machine is
    busy.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def one_thread_if_asked():
    """The second run of `make test`: the machine looks as if it had one CPU, so every default is
    one thread.
    """
    with pytest.MonkeyPatch.context() as patch:
        if ONE_THREAD:
            patch.setattr("kvboost_edge.host.processor._affinity", lambda: 1)
        yield


@functools.cache
def takes_all_threads(path):
    """Whether tests of a file in a room that computes may leave it to the machine how many threads
    there are: those `make test-all` runs a second time, with one.
    """
    room = path.relative_to(Path(__file__).parent).parts[0]
    return room not in ("kernels", "runners") or "from_pretrained" in path.read_text(
        encoding="utf-8"
    )


@pytest.fixture(autouse=True)
def threads_are_said(request, monkeypatch):
    """What is not run again with one thread says how many it computes with, so that one run shows
    all there is.
    """

    def refuse():
        raise AssertionError(
            f"say num_threads: {request.path.name} is not run again with one thread"
        )

    if not takes_all_threads(request.path):
        for name in ("kvboost_edge.backends.cpu", "kvboost_edge.engine.build"):
            if name in sys.modules:
                monkeypatch.setattr(sys.modules[name], "default_num_threads", refuse)


@pytest.fixture(autouse=True)
def the_clock_is_real(monkeypatch):
    """A test that moved the clock of the whole process would leave servers that no longer end."""
    yield
    assert time.monotonic is REAL_CLOCK, (
        "give the modules under test a clock of their own: clocks.give_clock"
    )


class NetworkBlocked(OSError):
    """A test tried to reach something outside this machine."""


@pytest.fixture(autouse=True)
def no_network(request, monkeypatch):
    """Connections that leave the machine raise, and fail the test even if the code under test
    swallowed the error.
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
            f"nothing may connect outside unless a hub model is named; tried {attempts}"
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
    """After the last test no thread and no process of ours is alive."""
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
        thread.join(timeout=5)  # an engine that was just collected may be on its way out
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
    """A complete directory of a tiny random Llama with a byte-level tokenizer; do not write into
    it.
    """
    from helpers.models.tiny_models import save_tiny_model

    return save_tiny_model("llama", tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture
def tiny_engine(tiny_model_dir):
    """An engine over the tiny Llama with 64 blocks of 16 and the debug checks on."""
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
    """Return a function `scale(short, long)` that chooses the N of `make test` or of `make
    test-all`.
    """
    return lambda short, long: long if LONG else short


def pytest_terminal_summary(terminalreporter, config):
    if "not alone" in config.option.markexpr:
        return  # another call of pytest follows, which reports them
    for tool in missing_tools():
        terminalreporter.write_line(tool.report())
