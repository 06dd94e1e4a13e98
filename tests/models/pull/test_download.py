"""Pulls download the requested file once, resume and verify it, and refuse excessive sizes and
other hosts.
"""

import threading

import pytest
from huggingface_hub import constants

from helpers.models.fake_hub import COMMIT, fake_hub
from kvboost_edge.errors import CapacityError, ConfigError, ModelFormatError
from kvboost_edge.models.locate import locate_model
from kvboost_edge.models.locate.managed import managed_models
from kvboost_edge.models.locate.stores import stored_models
from kvboost_edge.models.pull import registry_client
from kvboost_edge.models.pull.download import PullLimits, PullStopped, pull_model
from kvboost_edge.models.pull.names import checked_name, source_of

REPO = "someone/Tiny-1B-GGUF"
Q4 = "Tiny-1B-Q4_K_M.gguf"
Q8 = "Tiny-1B-Q8_0.gguf"
FILES = {
    "README.md": b"words",
    Q8: b"GGUF" + b"8" * 5000,
    Q4: b"GGUF" + bytes(range(256)) * 16_000,  # longer than one chunk
}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setattr(registry_client, "_RETRY_SECONDS", 0.0)
    with fake_hub(REPO, FILES, tmp_path / "hub", monkeypatch) as found:
        yield found


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path / "cache"))
    return managed_models()


def test_a_pulled_model_is_found_by_its_name(hub, store):
    events = []
    model = pull_model(f"{REPO}:Q4_K_M", store, tell=events.append)
    path = store.path_of(model)
    assert path.read_bytes() == FILES[Q4]
    assert set(hub.downloads()) == {Q4}
    assert locate_model(f"{REPO}:Q4_K_M") == path
    assert f"{REPO}:Q4_K_M" in {one.name for one in stored_models()}
    assert [one.status for one in (events[0], events[-1])] == [
        "pulling manifest",
        "writing manifest",
    ]
    told = [one for one in events if one.digest]
    assert (told[-1].completed, told[-1].total) == (len(FILES[Q4]), len(FILES[Q4]))
    pull_model(f"{REPO}:Q4_K_M", store)
    assert len(hub.downloads()) == 1


def test_a_pulled_directory_has_the_files_locate_model_needs(tmp_path, monkeypatch, store):
    files = {
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "model.safetensors": b"w" * 100,
        "onnx/model.onnx": b"o",
        "1_Pooling/config.json": b"{}",
        "README.md": b"",
    }
    with fake_hub("someone/Dense", files, tmp_path / "hub", monkeypatch) as hub:
        path = store.path_of(pull_model("hf.co/someone/Dense", store))
    wanted = {"config.json", "tokenizer.json", "model.safetensors", "1_Pooling/config.json"}
    assert set(hub.downloads()) == wanted
    assert {p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()} == wanted


def test_a_pull_resumes_an_interrupted_one(hub, store, monkeypatch):
    monkeypatch.setattr(registry_client, "_ATTEMPTS", 1)
    hub.cut = 3_000_000
    with pytest.raises(ModelFormatError, match=r"broke off|could not be downloaded"):
        pull_model(f"{REPO}:Q4_K_M", store)
    assert store.models() == []
    model = pull_model(f"{REPO}:Q4_K_M", store)
    assert store.path_of(model).read_bytes() == FILES[Q4]
    start = int(hub.asked[-1][2].removeprefix("bytes=").removesuffix("-"))
    assert 0 < start <= 3_000_000


def test_a_broken_connection_is_retried(hub, store):
    hub.cut = 2_000_000
    assert store.path_of(pull_model(f"{REPO}:Q4_K_M", store)).read_bytes() == FILES[Q4]
    assert len(hub.downloads()) == 2


def test_a_stopped_pull_leaves_no_model(hub, store):
    stopped = threading.Event()
    with pytest.raises(PullStopped):
        pull_model(
            f"{REPO}:Q4_K_M",
            store,
            tell=lambda event: stopped.set() if event.completed else None,
            stopped=stopped,
        )
    assert store.models() == []
    assert store.path_of(pull_model(f"{REPO}:Q4_K_M", store)).read_bytes() == FILES[Q4]


def test_damaged_files_are_removed(hub, store):
    hub.damaged = True
    with pytest.raises(ModelFormatError, match="damaged during the download"):
        pull_model(f"{REPO}:Q8_0", store)
    assert not [path for path in store.root.rglob("*") if path.is_file()]
    hub.damaged = False
    assert store.path_of(pull_model(f"{REPO}:Q8_0", store)).read_bytes() == FILES[Q8]


def test_pull_limits_are_enforced(hub, store, monkeypatch):
    with pytest.raises(CapacityError, match="max-pull-bytes"):
        pull_model(f"{REPO}:Q8_0", store, limits=PullLimits(max_bytes=5000))
    with pytest.raises(CapacityError, match="must stay free"):
        pull_model(f"{REPO}:Q8_0", store, limits=PullLimits(free_bytes=2**62))
    assert hub.downloads() == []
    hub.more = b"more than listed"
    with pytest.raises(ModelFormatError, match="sends more than the 5004 bytes"):
        pull_model(f"{REPO}:Q8_0", store)
    monkeypatch.setattr(registry_client, "_MAX_LISTING_BYTES", 100)
    with pytest.raises(ModelFormatError, match="too long"):
        pull_model(f"{REPO}:Q8_0", store)
    assert store.models() == []


def _nowhere(host):
    raise OSError("no address")


@pytest.mark.parametrize(
    ("to", "reason"),
    [
        ("http://localhost:9/x", "not public"),
        ("http://10.0.0.1/x", "not public"),
        ("http://169.254.169.254/latest", "not public"),
        ("http://[::ffff:192.168.0.1]/x", "not public"),
        ("http://[fd00::1]/x", "not public"),
        ("file:///etc/passwd", "refused"),
        ("http://no-such-host.invalid/x", "no address"),
    ],
)
def test_redirects_to_private_addresses_are_refused(hub, store, monkeypatch, to, reason):
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    if "no-such" in to:
        monkeypatch.setattr(registry_client, "_addresses", _nowhere)
    hub.redirects[Q8] = to
    with pytest.raises(ModelFormatError, match=reason):
        pull_model(f"{REPO}:Q8_0", store)


def test_dns_rebinding_is_refused(hub, store, monkeypatch):
    """The name passes the check, but the connection goes to this machine."""
    monkeypatch.setattr(registry_client, "_addresses", lambda host: ["93.184.216.34"])
    port = hub.endpoint.rpartition(":")[2]
    hub.redirects[Q8] = f"http://localhost:{port}/{REPO}/resolve/{COMMIT}/{Q4}"
    with pytest.raises(ModelFormatError, match=r"127\.0\.0\.1, which is not public"):
        pull_model(f"{REPO}:Q8_0", store)


def test_a_redirect_on_the_registry_itself_is_followed(hub, store):
    hub.files["moved.bin"] = FILES[Q8]
    hub.redirects[Q8] = f"/{REPO}/resolve/{COMMIT}/moved.bin"
    assert store.path_of(pull_model(f"{REPO}:{Q8}", store)).read_bytes() == FILES[Q8]
    hub.redirects["moved.bin"] = hub.redirects[Q8]
    store.remove(f"{REPO}:{Q8}")
    with pytest.raises(ModelFormatError, match="redirects too often"):
        pull_model(f"{REPO}:{Q8}", store)


def test_other_registries_are_configured_and_get_no_token(hub, store, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    host = hub.endpoint.removeprefix("http://")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    name = f"{host}/{REPO}:Q8_0"
    with pytest.raises(ConfigError, match="which is not configured"):
        pull_model(name, store)
    model = pull_model(name, store, registries=[hub.endpoint])
    assert store.path_of(model).read_bytes() == FILES[Q8]
    assert hub.authorized == [None]


def test_the_token_is_sent_to_the_hub_only(hub, store, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    pull_model(f"{REPO}:Q8_0", store)
    assert hub.authorized == ["Bearer hf_secret"]


@pytest.mark.parametrize("path", ["../x.gguf", "a/../../x.gguf", "/etc/x.gguf", ".cache/x.gguf"])
def test_paths_outside_the_folder_are_refused(hub, store, path):
    hub.files = {path: b"GGUF"}
    with pytest.raises(ModelFormatError, match="whose name cannot be used"):
        pull_model(REPO, store)
    assert not [one for one in store.root.rglob("*") if one.is_file()]


@pytest.mark.parametrize(
    "name",
    ["", "../x", "a/../b", "/etc/passwd", "a/b/c/d", "a b", "x:../y", "~x", "a\n", "ä", "a" * 300],
)
def test_invalid_names(name, store):
    with pytest.raises(ConfigError, match="is invalid"):
        checked_name(name)


def test_model_names_are_parsed():
    assert checked_name("owner/name:latest") == "owner/name"
    assert source_of("qwen3:0.6b") == ("", "Qwen/Qwen3-0.6B-GGUF", "Q8_0")
    assert source_of("hf.co/owner/name:Q4_K_M") == ("", "owner/name", "Q4_K_M")
    with pytest.raises(ConfigError, match=r"one of qwen2\.5:0\.5b"):
        source_of("llama9")


@pytest.mark.parametrize(
    "url", ["ftp://x", "models.example.org", "https://a:b@x", "https://", "h://x"]
)
def test_invalid_registries(url):
    with pytest.raises(ConfigError, match="model_registries holds"):
        source_of("x.example/owner/name", [url])
