"""Tests of the Host and Origin headers that the server accepts."""

import pytest

from helpers.server.live_servers import serving
from kvboost_edge.errors import ConfigError
from kvboost_edge.server.api_errors import ApiError
from kvboost_edge.server.http.hosts import HostList
from kvboost_edge.server.settings import ServerSettings, is_loopback


def check(settings, *headers, address="127.0.0.1"):
    """Return the status of the host list's error, or 200 if it accepts the request."""
    raw = [(name.encode(), value.encode()) for name, value in headers]
    try:
        HostList(settings).check({"type": "http", "headers": raw, "server": (address, 8000)})
    except ApiError as error:
        return error.status_code
    return 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:8000", 200),
        ("[::1]", 200),
        ("", 400),
        ("example.org", 421),
        ("localhost.example.org", 421),
        ("127.0.0.1.example.org", 421),
        ("example.org:8000@localhost", 421),
        ("[::1", 421),
        ("localhost:8000:evil.com", 421),
        ("localhost:evil", 421),
        ("localhost:", 200),
        ("[::1]:80:80", 421),
        ("[::1]x", 421),
        ("0.0.0.0", 421),
        ("localhost.", 421),
    ],
)
def test_only_loopback_hosts_are_allowed_by_default(host, status):
    assert check(ServerSettings(), ("host", host)) == status


def test_the_bind_address_and_allowed_hosts_are_accepted():
    settings = ServerSettings(host="192.0.2.7", insecure=True, allowed_hosts=("LLM.example.org",))
    assert check(settings, ("host", "192.0.2.7:8000")) == 200
    assert check(settings, ("host", "llm.example.org")) == 200
    assert check(settings, ("host", "192.0.2.8")) == 421
    wild = ServerSettings(host="0.0.0.0", insecure=True)
    assert check(wild, ("host", "198.51.100.3:8000"), address="198.51.100.3") == 200
    assert check(wild, ("host", "0.0.0.0"), address="198.51.100.3") == 421
    assert check(wild, ("host", "rebound.example.org"), address="198.51.100.3") == 421
    assert check(ServerSettings(allowed_hosts=("*",)), ("host", "anything.example.org")) == 200


def test_two_host_headers_are_refused():
    assert check(ServerSettings(), ("host", "localhost"), ("host", "localhost")) == 400


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:8000", 200),
        ("https://localhost:8000", 200),
        ("http://localhost:9000", 403),
        ("https://example.org", 403),
        ("null", 403),
        ("", 403),
    ],
)
def test_requests_of_other_origins_are_refused(origin, status):
    assert check(ServerSettings(), ("host", "localhost:8000"), ("origin", origin)) == status
    allowed = ServerSettings(cors_origins=("https://example.org",))
    assert check(allowed, ("host", "localhost:8000"), ("origin", "https://example.org")) == 200


def test_an_invalid_host_is_refused_in_the_apis_format(live_server):
    with live_server.client(headers={"Host": "rebound.example.org"}) as client:
        answer = client.get("/health")
    assert (answer.status_code, answer.json()["error"]["code"]) == (421, "invalid_host")
    assert answer.headers["x-request-id"]


def test_cors_is_off_by_default(demo_engine, live_server):
    preflight = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    with live_server.client(headers=preflight) as client:
        answer = client.options("/v1/chat/completions")
        assert answer.status_code == 403
        assert not [name for name in answer.headers if name.startswith("access-control")]
    with serving(demo_engine, cors_origins=("https://example.org",), api_keys=("k",)) as server:
        with server.client(
            headers={**preflight, "Access-Control-Request-Headers": "authorization"}
        ) as client:
            answer = client.options("/v1/chat/completions")
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == "https://example.org"
        # OpenAI's JavaScript client adds its own headers to every request.
        wanted = "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-retry-count,openai-project"
        with server.client(
            headers={**preflight, "Access-Control-Request-Headers": wanted}
        ) as client:
            answer = client.options("/v1/chat/completions")
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-headers"] == wanted
        with server.client(headers={"Origin": "https://example.org"}) as client:
            denied = client.get("/v1/models")
            assert denied.status_code == 401
            assert denied.headers["access-control-allow-origin"] == "https://example.org"
        with server.client(headers={**preflight, "Origin": "https://evil.example"}) as client:
            assert client.options("/v1/chat/completions").status_code == 403


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org", "[::]"])
def test_a_non_loopback_bind_without_a_key_is_refused(host):
    with pytest.raises(ConfigError, match="--insecure"):
        ServerSettings(host=host)
    assert ServerSettings(host=host, insecure=True).host == host
    assert ServerSettings(host=host, api_keys=("key",)).host == host


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "127.9.9.9", "::1", "[::1]", "LOCALHOST"]
)
def test_loopback_needs_no_key(host):
    assert is_loopback(host)
    assert ServerSettings(host=host).host == host
