"""Tests of API keys: protected routes, constant-time comparison, and one tenant per key."""

import hmac
import io
import json
import re

import pytest

from helpers.server.live_servers import ADMIN_KEY, KEYS, raw_answer, wait_until
from kvboost_edge.errors import ConfigError
from kvboost_edge.server.api_errors import ApiError, error_body
from kvboost_edge.server.http.keys import KeyRing
from kvboost_edge.server.http.middleware import ADMIN_PATHS
from kvboost_edge.server.logs import configure_logging
from kvboost_edge.server.settings import ServerSettings, collect_api_keys, tenant_of_key

OPEN = {"/health", "/ready", "/version", "/"}
# Each becomes an open path or another route if it is decoded, normalized or case-folded.
TRICKS = [
    b"//health",
    b"/health/",
    b"/health/../v1/models",
    b"/health/..%2fv1/models",
    b"/./health",
    b"/%68ealth",
    b"/health%00",
    b"/health;a=b",
    b"/health%3f",
    b"/HEALTH",
    b"/health//",
    b"/v1/%6dodels",
    b"//v1/models",
    b"/v1/models;/health",
    b"/static/../v1/models",
    b"/static/%2e%2e/v1/models",
    b"/static//style.css",
    b"http://localhost//health",
    b"http://localhost/health/../v1/models",
    b"http://localhost/v1/models",
    b"\\health",
    b"/version#/v1/models",
    b"/metrics",
]


def _bearer(key):
    return [(b"authorization", b"Bearer " + key.encode())]


def test_every_route_except_the_public_ones_needs_a_key(keyed_server):
    paths = {route.path for route in _routes(keyed_server)}
    assert {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/metrics",
        "/tokenize",
        "/openapi.json",
    } <= paths
    with keyed_server.client(headers={}) as client:
        told = client.get("/v1/models").json()["error"]
        assert told["code"] == "invalid_api_key"
        invalid = ApiError(401, told["message"], code=told["code"])
        for path in sorted(paths):
            expected = 200 if path in OPEN or path.startswith("/static/") else 401
            answers = [client.request(method, path) for method in ("GET", "POST", "DELETE")]
            if expected == 401:
                assert {answer.status_code for answer in answers} == {401}, path
                assert answers[0].json() == error_body(invalid, path)
                assert answers[0].headers["www-authenticate"] == "Bearer"
            else:
                assert answers[0].status_code == 200, path
        assert client.get("/no-such-route").status_code == 401


@pytest.mark.parametrize("target", TRICKS)
def test_path_variants_do_not_bypass_authentication(keyed_server, target):
    with keyed_server.connect() as sock:
        sock.sendall(
            b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        )
        answer = raw_answer(sock)
    assert answer.split(b" ")[1] in (b"400", b"401"), answer[:80]


@pytest.mark.parametrize(
    "values",
    [
        [],
        ["Bearer wrong"],
        ["Bearer"],
        [KEYS[0]],
        [f"Basic {KEYS[0]}"],
        [f"Bearer {KEYS[0]}x"],
        [f"Bearer {KEYS[0][:-1]}"],
        [f"Bearer {KEYS[0].upper()}"],
        [f"Bearer {KEYS[0]},{KEYS[1]}"],
        [f"Bearer {KEYS[0]}", f"Bearer {KEYS[0]}"],
        ["Bearer wrong", f"Bearer {KEYS[0]}"],
        ["Bearer " + "a" * 5000],
    ],
)
def test_anything_but_one_valid_key_is_401(keyed_server, values):
    with keyed_server.client(headers=[("Authorization", value) for value in values]) as client:
        assert client.get("/v1/models").status_code == 401


@pytest.mark.parametrize("key", KEYS)
def test_each_key_is_accepted(keyed_server, key):
    with keyed_server.client(headers={"Authorization": f"bearer  {key}"}) as client:
        assert client.get("/v1/models").status_code == 200


def test_a_non_text_header_is_401():
    with pytest.raises(ApiError):
        KeyRing(KEYS).tenant([(b"authorization", b"Bearer \xff\xfe\x00")])


def test_all_keys_are_compared_in_constant_time(monkeypatch):
    compared = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(1) or real(a, b))
    ring = KeyRing([*KEYS, "third"])
    for key in (*KEYS, "third"):
        compared.clear()
        assert ring.tenant(_bearer(key)) == tenant_of_key(key)
        assert len(compared) == 3
    compared.clear()
    with pytest.raises(ApiError):
        ring.tenant(_bearer("wrong"))
    assert len(compared) == 3


def test_tenants_never_hit_each_others_cache(keyed_server):
    prompt = {
        "model": "kvboost-edge/demo",
        "prompt": "A secret of the first tenant. " * 10,
        "max_tokens": 1,
    }

    def cached(key):
        with keyed_server.client(headers={"Authorization": f"Bearer {key}"}) as client:
            usage = client.post("/v1/completions", json=prompt).json()["usage"]
            return usage["prompt_tokens_details"]["cached_tokens"]

    assert cached(KEYS[0]) == 0
    assert cached(KEYS[0]) > 0
    assert cached(KEYS[1]) == 0, "a tenant must not hit another tenant's blocks"
    assert cached(KEYS[1]) > 0


def test_shared_statistics_need_the_admin_key(keyed_server):
    """Totals of hits and blocks would reveal one tenant's activity to another."""
    # tests/server/models/test_changes.py tests the paths that change models.
    paths = sorted(path for path in ADMIN_PATHS if not path.startswith("/api/"))
    statuses = {}
    for key in (*KEYS, ADMIN_KEY):
        with keyed_server.client(headers={"Authorization": f"Bearer {key}"}) as client:
            answers = [
                client.request("POST" if path == "/cache/reset" else "GET", path) for path in paths
            ]
            answers += [client.get("/v1/%73tats"), client.get("/v1/models")]
        statuses[key] = [answer.status_code for answer in answers]
        if key != ADMIN_KEY:
            assert answers[0].json()["error"]["code"] == "admin_key_required"
    refused = [403] * len(paths) + [403, 200]
    assert statuses == {KEYS[0]: refused, KEYS[1]: refused, ADMIN_KEY: [200] * len(refused)}


@pytest.mark.parametrize(
    ("keys", "admins"), [(("only",), ()), ((), ("only",)), (("a",), ("only",))]
)
def test_a_single_key_or_an_admin_key_sees_everything(keys, admins):
    ring = KeyRing(keys, admins)
    assert ring.tenant(_bearer("only")) == tenant_of_key("only")
    ring.check_admin(tenant_of_key("only"))


def test_shared_statistics_are_refused_without_an_admin_key():
    for key in KEYS:
        with pytest.raises(ApiError) as refused:
            KeyRing(KEYS).check_admin(tenant_of_key(key))
        assert refused.value.status_code == 403


def test_a_salt_cannot_reach_another_tenant(keyed_server):
    body = {
        "model": "kvboost-edge/demo",
        "prompt": "Salted words of a tenant. " * 10,
        "max_tokens": 1,
    }
    with keyed_server.client(headers={"Authorization": f"Bearer {KEYS[0]}"}) as client:
        client.post("/v1/completions", json=body)
    with keyed_server.client(headers={"Authorization": f"Bearer {KEYS[1]}"}) as client:
        for salt in (tenant_of_key(KEYS[0]), KEYS[0]):
            usage = client.post("/v1/completions", json={**body, "cache_salt": salt}).json()[
                "usage"
            ]
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_neither_keys_nor_prompts_are_logged(keyed_server, kept_logging):
    stream = io.StringIO()
    wait_until(
        lambda: not keyed_server.server.server_state.tasks, "the lines of earlier tests' requests"
    )
    configure_logging(ServerSettings(log_level="debug"), stream)
    with keyed_server.client() as client:
        for body in (
            {"prompt": "MY-SECRET-PROMPT", "max_tokens": 2},
            {"prompt": ["MY-SECRET-PROMPT", 5]},
        ):
            answer = client.post(
                "/v1/completions?q=MY-SECRET-QUERY", json={"model": "kvboost-edge/demo", **body}
            )
        assert answer.status_code == 400
        client.get("/v1/models/MY-SECRET-PATH")
    # A line is written after the response was sent.
    wait_until(
        lambda: stream.getvalue().count('"event": "request"') >= 3, "the lines of three requests"
    )
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    requests = [line for line in lines if line["event"] == "request"]
    assert [line["status"] for line in requests] == [200, 400, 404]
    assert requests[0]["request_id"].startswith("req-")
    assert requests[0]["route"] == "/v1/completions"
    assert requests[0]["prompt_tokens"] > 0
    assert requests[0]["generated_tokens"] == 2
    assert "SECRET" not in stream.getvalue()
    assert not any(key in stream.getvalue() for key in KEYS)


def test_keys_are_not_in_repr_or_errors():
    settings = ServerSettings(api_keys=KEYS)
    assert not any(key in repr(settings) for key in KEYS)
    for bad in ("with space", "", "ünicode", "line\n"):
        with pytest.raises(ConfigError) as caught:
            ServerSettings(api_keys=(bad,))
        assert not bad or bad not in str(caught.value)
    for twice in (
        {"api_keys": ("same", "same")},
        {"api_keys": ("same",), "admin_api_keys": ("same",)},
    ):
        with pytest.raises(ConfigError, match="twice"):
            ServerSettings(**twice)
    assert ServerSettings(host="0.0.0.0", admin_api_keys=("a",)).all_keys == ("a",)


def test_a_key_may_have_a_weight(tmp_path):
    file = tmp_path / "keys"
    file.write_text("one weight=4\ntwo\n  three \t weight=0.5  \n")
    keys = collect_api_keys(["four weight=1e3"], file, {"KVBOOST_API_KEYS": "five,six weight=2"})
    settings = ServerSettings(api_keys=keys, admin_api_keys=("admin weight=0.001",))
    expected = {"one": 4, "two": 1, "three": 0.5, "four": 1000, "five": 1, "six": 2, "admin": 0.001}
    assert settings.tenant_weights == {
        tenant_of_key(key): weight for key, weight in expected.items()
    }
    ring = KeyRing(settings.api_keys, settings.admin_api_keys)
    for key in expected:
        assert ring.tenant(_bearer(key)) == tenant_of_key(key)
    for bad in ("one weight=4", "weight=4", "one weight"):
        with pytest.raises(ApiError):
            ring.tenant(_bearer(bad))


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf", "1001", "0.0009", "x", "", "4,5"])
def test_an_invalid_weight_is_refused_by_name(weight):
    with pytest.raises(
        ConfigError,
        match=re.escape(f"weight={weight} of an API key must be a number in 0.001..1000"),
    ):
        ServerSettings(api_keys=(f"the-key weight={weight}",))


@pytest.mark.parametrize(
    "key", ["the-key weigth=4", "the-key 4", "the-key weight = 4", "the-key weight=4 5"]
)
def test_an_invalid_key_option_is_refused_without_showing_the_key(key):
    with pytest.raises(ConfigError, match="weight=NUMBER") as caught:
        ServerSettings(api_keys=(key,))
    assert "the-key" not in str(caught.value)


def test_a_key_with_two_weights_is_refused():
    with pytest.raises(ConfigError, match="twice"):
        ServerSettings(api_keys=("same", "same weight=2"))


def test_keys_come_from_flags_file_and_environment(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\nfrom-file\n\n  spaced  \n")
    environment = {"KVBOOST_API_KEY": "one", "KVBOOST_API_KEYS": "two, three,,from-flag"}
    keys = collect_api_keys(["from-flag"], file, environment)
    assert keys == ("from-flag", "from-file", "spaced", "one", "two", "three")
    assert collect_api_keys((), None, {}) == ()
    assert collect_api_keys(
        (), None, {**environment, "KVBOOST_ADMIN_API_KEYS": "x"}, "KVBOOST_ADMIN_API_KEY"
    ) == ("x",)


@pytest.mark.parametrize("value", [",", " ", " , ,"])
@pytest.mark.parametrize("name", ["KVBOOST_API_KEY", "KVBOOST_API_KEYS", "KVBOOST_ADMIN_API_KEYS"])
def test_an_empty_key_variable_does_not_disable_authentication(name, value):
    single = not name.endswith("S")
    if single and value.strip():
        assert collect_api_keys((), None, {name: value}) == (value.strip(),)
        return
    with pytest.raises(ConfigError, match=f"{name} is set but holds no key"):
        collect_api_keys((), None, {name: value}, name.removesuffix("S"))
    assert collect_api_keys((), None, {name: ""}, name.removesuffix("S")) == ()


@pytest.mark.parametrize("content", [None, b"", b"# only a comment\n", b"\xff\xfe"])
def test_an_invalid_key_file_is_an_error(tmp_path, content):
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match="API key file"):
        collect_api_keys((), file, {})


def _routes(server):
    found = []
    queue = list(server.server.config.app.routes)
    while queue:
        route = queue.pop()
        nested = getattr(
            route, "original_router", route
        )  # newer FastAPI versions keep included routers nested
        if hasattr(nested, "routes"):
            queue.extend(nested.routes)
        elif hasattr(route, "path") and "{" not in route.path:
            found.append(route)
    return found


def test_x_api_key_is_accepted():
    ring = KeyRing(KEYS)
    tenant = tenant_of_key(KEYS[0])
    own = (b"x-api-key", KEYS[0].encode())
    assert ring.tenant([own]) == tenant
    assert ring.tenant([own, *_bearer(KEYS[0])]) == tenant
    for headers in (
        [],
        [own, *_bearer(KEYS[1])],
        [(b"x-api-key", b"")],
        [(b"x-api-key", b"Bearer " + own[1])],
    ):
        with pytest.raises(ApiError, match="key") as caught:
            ring.tenant(headers)
        assert caught.value.status_code == 401
