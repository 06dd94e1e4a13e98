"""Redis URLs: accepted ones, refusals that name the option, and no password in any message or repr."""

import pytest

from kvboost_edge.errors import ConfigError
from kvboost_edge.tiers.redis.address import parse_url


@pytest.mark.parametrize(
    ("url", "place", "options"),
    [
        (
            "redis://localhost",
            "redis://localhost:6379/0",
            {"host": "localhost", "port": 6379, "db": 0},
        ),
        (
            "valkey://10.0.0.1:7000/3",
            "redis://10.0.0.1:7000/3",
            {"host": "10.0.0.1", "port": 7000, "db": 3},
        ),
        ("redis://[::1]:7000", "redis://[::1]:7000/0", {"host": "::1", "port": 7000, "db": 0}),
        (
            "redis://:p%40%2Fw@h",
            "redis://h:6379/0",
            {"host": "h", "port": 6379, "db": 0, "username": None, "password": "p@/w"},
        ),
        (
            "redis://u:p@h/1",
            "redis://h:6379/1",
            {"host": "h", "port": 6379, "db": 1, "username": "u", "password": "p"},
        ),
        (
            "unix:///run/r.sock",
            "unix:///run/r.sock?db=0",
            {"unix_socket_path": "/run/r.sock", "db": 0},
        ),
        (
            "unix://u:p@/r.sock?db=2",
            "unix:///r.sock?db=2",
            {"unix_socket_path": "/r.sock", "db": 2, "username": "u", "password": "p"},
        ),
        (
            "rediss://h?ssl_ca_certs=/ca.pem",
            "rediss://h:6379/0",
            {
                "host": "h",
                "port": 6379,
                "db": 0,
                "ssl": True,
                "ssl_cert_reqs": "required",
                "ssl_check_hostname": True,
                "ssl_ca_certs": "/ca.pem",
            },
        ),
        (
            "Valkeys://h",
            "rediss://h:6379/0",
            {
                "host": "h",
                "port": 6379,
                "db": 0,
                "ssl": True,
                "ssl_cert_reqs": "required",
                "ssl_check_hostname": True,
            },
        ),
    ],
)
def test_redis_urls_are_parsed(url, place, options):
    address = parse_url(url)
    assert (address.place, dict(address.options)) == (place, options)


def test_an_external_password_is_used_if_the_url_has_none():
    assert parse_url("redis://h", "elsewhere").options["password"] == "elsewhere"
    assert parse_url("redis://u@h", "elsewhere").options["username"] == "u"
    assert parse_url("redis://u:own@h", "elsewhere").options["password"] == "own"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis+cluster://u:hunter2@h", "cluster"),
        ("redis-sentinel://u:hunter2@h", "cluster"),
        ("redis://u:hunter2@h1:1,h2:2", "cluster"),
        ("http://u:hunter2@h", "redis://, valkey://, rediss://, valkeys://, unix://$"),
        ("u:hunter2@h", "must begin with one of redis://"),
        ("", "must begin with one of redis://"),
        ("redis://:hunter2", "cannot be read"),
        ("redis://u:hunter2/more@h", "cannot be read"),
        ("redis://u:hunter2@h:port", "cannot be read"),
        ("redis://u:hunter2@h:0", "cannot be read"),
        ("redis://u:hunter2@h:70000", "cannot be read"),
        ("redis://u:hunter2@h/x", "cannot be read"),
        ("redis://u:hunter2@h/-1", "cannot be read"),
        ("redis://u:hunter2@", "cannot be read"),
        ("redis://u:hunter2@[::1", "cannot be read"),
        ("redis://u:hunter2℀@h", "cannot be read"),
        ("unix://u:hunter2@r.sock", "cannot be read"),
        ("unix://", "cannot be read"),
        ("redis://u@h", "contains a user but no password"),
        ("redis://h?password=hunter2", "does not support; supported: none"),
        ("redis://u:hunter2@h?decode_responses=1", "does not support"),
        ("rediss://u:hunter2@h?ssl_cert_reqs=none", r"supported: \?ssl_ca_certs="),
        ("redis://u:hunter2@h?socket_timeout=100", "does not support"),
        ("redis://u:hunter2@h#hunter2", "does not support"),
    ],
)
def test_refused_urls_are_not_repeated_in_the_error(url, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse_url(url)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_the_repr_contains_no_password():
    assert "hunter2" not in repr(parse_url("redis://u:hunter2@h"))
